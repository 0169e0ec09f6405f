"""Trainings in several processes: the start of the ranks, and each rank's part of the state."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch.multiprocessing
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException
from torch.nn.parallel import DistributedDataParallel

from optuna_hermes._lightning._namespace import LightningModule, Trainer, part, parts
from optuna_hermes.errors import CheckpointError, InvalidInputError, Suspended, SuspendError
from optuna_hermes.suspend._rank import Rank, RankChannels
from optuna_hermes.suspend._ranks import Ranks

_RANKS, _GONE = "ranks", "gone"

Tree = dict[str, Any]


class RankedTrial(Protocol):
    """The loop of a trial, as seen from the start of its ranks."""

    def ranks(self, count: int, context: Any) -> AbstractContextManager[Ranks]:
        """Listen to the ranks that are started within."""

    def be_rank(self, rank: Rank) -> None:
        """Continue in the process of a rank."""

    def leased(self) -> bool:
        """True if the trial has a session."""

    def state_dict(self) -> dict[str, Any]:
        """The state that a rank sends at its end."""


Find = Callable[[Trainer | None], RankedTrial | None]
"""Finds the loop of a trial in its trainer; None if it has none."""


def watch_launches(find: Find) -> None:
    """Wrap Lightning's launchers, for trainers in which there is a loop of a trial."""
    # Patched, since Lightning calls no hook before it starts processes.
    for name, module, call in (
        ("_MultiProcessingLauncher", "multiprocessing", _launch),
        ("_SubprocessScriptLauncher", "subprocess_script", _launch_scripts),
    ):
        for each in parts(f"strategies.launchers.{module}"):
            launcher = getattr(each, name)
            # A partialmethod: an earlier call has wrapped it.
            if not isinstance(vars(launcher)["launch"], functools.partialmethod):
                launcher.launch = functools.partialmethod(call, launcher.launch, find)


def own_part(checkpoint: Tree, module: LightningModule, rank: int) -> Tree:
    """A rank's part of a checkpoint: all for rank 0, else without parameters and optimizers."""
    if rank == 0:
        return checkpoint
    shared = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    weights = checkpoint["state_dict"]
    return {
        **checkpoint,
        # DDP keeps parameters and optimizers equal on all ranks; buffers may differ.
        "optimizer_states": [],
        "state_dict": {name: weights[name] for name in weights if name not in shared},
    }


def merged(parts: list[Tree]) -> Tree:
    """The checkpoint of a trial, made of the parts of its ranks."""
    return {**parts[0], _RANKS: parts[1:]}


def part_of(
    checkpoint: Tree, rank: int, count: int, trial: str, *, any_count: bool = False
) -> Tree:
    """The checkpoint as a rank is to load it.

    If there were fewer ranks before, a new one gets the part of rank 0. If there were more, the
    parts of those that are gone go to rank 0, see ``gone``.

    Raises:
        CheckpointError: the number of ranks has changed, and must not.
    """
    parts = checkpoint.pop(_RANKS, [])
    if any_count:
        if rank == 0:
            checkpoint[_GONE] = parts[count - 1 :]
        elif rank > len(parts):
            return checkpoint
    elif len(parts) + 1 != count:
        raise CheckpointError(
            f"A checkpoint of {trial} must be resumed by as many processes as have written it, but "
            f"these were {len(parts) + 1} and now are {count}: give the Trainer as many devices "
            "as before."
        )
    if rank == 0:
        return checkpoint
    own = parts[rank - 1]
    return {
        **own,
        "optimizer_states": checkpoint["optimizer_states"],
        "state_dict": {**checkpoint["state_dict"], **own["state_dict"]},
    }


def gone(checkpoint: Tree) -> list[Tree]:
    """Take the parts of ranks that no longer exist out of the result of ``part_of``."""
    found: list[Tree] = checkpoint.pop(_GONE, [])
    return found


def count_of(checkpoint: Tree) -> int:
    return 1 + len(checkpoint.get(_RANKS, []))


def why_not_exact(trainer: Trainer) -> str | None:
    """The reason why a resumed trial may differ, None if it cannot; for ``on_train_start``."""
    # DDP sums gradients bucket by bucket, and regroups the buckets after the first batch of each
    # process. With two processes the order of a sum does not matter.
    model = trainer.strategy.model
    if trainer.world_size <= 2 or not isinstance(model, DistributedDataParallel):
        return None
    if model.find_unused_parameters and not model.static_graph:
        return None
    return (
        f"DDP adds the gradients of its {trainer.world_size} processes in another order in the "
        "first batch after the trial comes back from disk; with "
        'strategy="ddp_fork_find_unused_parameters_true" it does not'
    )


def restore_buffers(module: LightningModule, saved: dict[str, torch.Tensor]) -> None:
    for name, buffer in module.named_buffers():
        if name in saved:
            buffer.copy_(saved[name])


def refused_strategy(strategy: object) -> InvalidInputError:
    """The error for a trial whose processes cannot be suspended together."""
    return InvalidInputError(
        "A trial in several processes must start them by itself to take turns, but strategy "
        f"{type(strategy).__name__} runs the script once more for each: give the Trainer "
        'strategy="ddp_fork".'
    )


def _launch(
    launcher: Any,
    launch: Callable[..., Any],
    find: Find,
    function: Any,
    /,
    *args: Any,
    trainer: Trainer | None = None,
    **kwargs: Any,
) -> Any:
    loop = find(trainer)
    # Only ``fit`` is suspended: validate, test and predict are started as ever.
    if trainer is None or loop is None or trainer.state.fn != "fit":
        return launch(launcher, function, *args, trainer=trainer, **kwargs)
    if trainer.num_nodes > 1 and loop.leased():
        raise refused_strategy(trainer.strategy)
    context = torch.multiprocessing.get_context(launcher._start_method)
    failed: Exception | None = None
    result = None
    with loop.ranks(launcher._strategy.num_processes, context) as ranks:
        in_rank = _InRank(loop, ranks.channels, trainer, function)
        try:
            result = launch(launcher, in_rank, *args, trainer=trainer, **kwargs)
        except (ProcessExitedException, ProcessRaisedException) as error:
            failed = error
    reason = _reason(failed, ranks.error)
    if reason is not None:
        raise reason from failed
    return result


def _launch_scripts(
    launcher: Any,
    launch: Callable[..., Any],
    find: Find,
    function: Any,
    /,
    *args: Any,
    trainer: Trainer | None = None,
    **kwargs: Any,
) -> Any:
    loop = find(trainer)
    if trainer is not None and trainer.world_size > 1 and loop is not None and loop.leased():
        raise refused_strategy(trainer.strategy)
    return launch(launcher, function, *args, trainer=trainer, **kwargs)


def _reason(failed: Exception | None, reported: BaseException | None) -> BaseException | None:
    """The error that ``fit`` raises: torch's about the processes, or theirs, or the session's."""
    killed = isinstance(failed, ProcessExitedException) and failed.signal_name is not None
    # A process that a signal has killed is no error of the user's code.
    if killed and not isinstance(reported, Suspended):
        return SuspendError(
            f"All processes of a trial must live, but of this one {failed}: look for what did "
            "that, a lack of memory for instance."
        )
    return reported or failed


class _InRank:
    """The function that Lightning calls in each rank, in place of ``fit``'s own."""

    def __init__(
        self,
        loop: RankedTrial,
        channels: RankChannels,
        trainer: Trainer,
        function: Callable[..., Any],
    ) -> None:
        self._loop = loop
        self._channels = channels
        self._trainer = trainer
        self._function = function
        self._random = random.getstate()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rank = self._channels.become_rank(int(os.environ["LOCAL_RANK"]))
        self._loop.be_rank(rank)
        random.setstate(self._random)  # a fork reseeds Python's generator, but not NumPy's
        whole = False
        try:
            result = self._function(*args, **kwargs)
            whole = True
            return result
        except BaseException as error:
            if isinstance(error, Exception):
                rank.raised(error)
            self._unwind(error)
            if not rank.leaves:
                raise
            return None
        finally:
            rank.ended(self._loop.state_dict(), whole=whole)

    def _unwind(self, error: BaseException) -> None:
        """Tear the trainer down, which Lightning only does in the process that called ``fit``."""
        part(self._trainer, "trainer.call")._interrupt(self._trainer, error)
        self._trainer._teardown()
        self._trainer.state.fn = None  # else the weights would be sent to the parent in vain
