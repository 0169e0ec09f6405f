"""A run that Lightning trains in several processes: how they are started, and what each keeps."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch.multiprocessing
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.call import _interrupt
from lightning.pytorch.trainer.states import TrainerFn
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException
from torch.nn.parallel import DistributedDataParallel

from optuna_hermes.errors import CheckpointError, InvalidInputError, Suspended, SuspendError
from optuna_hermes.suspend._rank import Rank, Seats
from optuna_hermes.suspend._ranks import Ranks

_RANKS, _GONE = "ranks", "gone"

Tree = dict[str, Any]


class Ranked(Protocol):
    """The callback of a run, as far as its processes are concerned."""

    def ranks(self, count: int, context: Any) -> AbstractContextManager[Ranks]:
        """Listen to ranks that are started within."""

    def be_rank(self, rank: Rank) -> None:
        """Go on in the process of a rank."""

    def leased(self) -> bool:
        """Whether the run has a session."""

    def state_dict(self) -> dict[str, Any]:
        """What is said of the run when a rank ends."""


def watch_launches(kind: type[Any]) -> None:
    """Stand around every start of processes for a trainer with a callback of this ``Ranked`` kind.

    No hook is called before it. Without such a callback nothing changes.
    """
    for launcher, call in (
        (_MultiProcessingLauncher, _launch),
        (_SubprocessScriptLauncher, _launch_scripts),
    ):
        watched = functools.partialmethod(call, launcher.launch, kind)
        launcher.launch = watched  # type: ignore[method-assign,assignment]


def own_part(checkpoint: Tree, module: LightningModule, rank: int) -> Tree:
    """What a rank puts into a checkpoint: all of it for rank 0, else what it may have alone."""
    if rank == 0:
        return checkpoint
    shared = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    weights = checkpoint["state_dict"]
    return {
        **checkpoint,
        "optimizer_states": [],
        "state_dict": {name: weights[name] for name in weights if name not in shared},
    }


def merged(parts: list[Tree]) -> Tree:
    """The checkpoint of a run, made of the parts of its ranks."""
    return {**parts[0], _RANKS: parts[1:]}


def part_of(checkpoint: Tree, rank: int, count: int, run: str, *, any_count: bool = False) -> Tree:
    """The checkpoint as a rank is to load it.

    Where there were fewer ranks, one that is new gets what rank 0 has. Where there were more, those
    that are gone leave theirs to rank 0, see ``gone``.

    Args:
        checkpoint: of all ranks.
        rank: counted from 0.
        count: how many there are now.
        run: whose it is, as a message names it.
        any_count: whether there may have been more ranks, or fewer.

    Raises:
        CheckpointError: there were more ranks, or fewer.
    """
    parts = checkpoint.pop(_RANKS, [])
    if any_count:
        if rank == 0:
            checkpoint[_GONE] = parts[count - 1 :]
        elif rank > len(parts):
            return checkpoint
    elif len(parts) + 1 != count:
        raise CheckpointError(
            f"A checkpoint of {run} must be resumed by as many processes as have written it, but "
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
    """The parts of ranks that are there no more, out of what ``part_of`` gave."""
    found: list[Tree] = checkpoint.pop(_GONE, [])
    return found


def count_of(checkpoint: Tree) -> int:
    """How many ranks have written a checkpoint."""
    return 1 + len(checkpoint.get(_RANKS, []))


def why_not_exact(trainer: Trainer) -> str | None:
    """Why a run that comes back from disk may differ, None if it may not; for ``on_train_start``.

    DDP sums gradients bucket by bucket, and puts them into other buckets after the first batch of
    each process. Where two are added that changes nothing.
    """
    model = trainer.strategy.model
    if trainer.world_size <= 2 or not isinstance(model, DistributedDataParallel):
        return None
    if model.find_unused_parameters and not model.static_graph:
        return None
    return (
        f"DDP adds the gradients of its {trainer.world_size} processes in another order in the "
        "first batch after the run comes back from disk; with "
        'strategy="ddp_fork_find_unused_parameters_true" it does not'
    )


def buffers(module: LightningModule) -> dict[str, torch.Tensor]:
    """Running statistics and the like, which DDP takes from rank 0 when it begins."""
    return dict(module.named_buffers())


def restore_buffers(module: LightningModule, saved: dict[str, torch.Tensor]) -> None:
    """Give them back to their rank."""
    for name, buffer in module.named_buffers():
        if name in saved:
            buffer.copy_(saved[name])


def refused_strategy(strategy: object) -> InvalidInputError:
    """The error of a run whose processes cannot be suspended together."""
    return InvalidInputError(
        "A run in several processes must start them by itself to take turns, but strategy "
        f"{type(strategy).__name__} runs the script once more for each: give the Trainer "
        'strategy="ddp_fork".'
    )


def _launch(
    launcher: Any,
    launch: Callable[..., Any],
    kind: type[Any],
    function: Any,
    /,
    *args: Any,
    trainer: Trainer | None = None,
    **kwargs: Any,
) -> Any:
    callback = _callback(trainer, kind)
    if trainer is None or callback is None or trainer.state.fn != TrainerFn.FITTING:
        return launch(launcher, function, *args, trainer=trainer, **kwargs)
    if trainer.num_nodes > 1 and callback.leased():
        raise refused_strategy(trainer.strategy)
    context = torch.multiprocessing.get_context(launcher._start_method)
    failed: Exception | None = None
    result = None
    with callback.ranks(launcher._strategy.num_processes, context) as ranks:
        in_rank = _InRank(callback, ranks.seats, trainer, function)
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
    kind: type[Any],
    function: Any,
    /,
    *args: Any,
    trainer: Trainer | None = None,
    **kwargs: Any,
) -> Any:
    callback = _callback(trainer, kind)
    if (
        trainer is not None
        and trainer.world_size > 1
        and callback is not None
        and callback.leased()
    ):
        raise refused_strategy(trainer.strategy)
    return launch(launcher, function, *args, trainer=trainer, **kwargs)


def _callback(trainer: Trainer | None, kind: type[Any]) -> Ranked | None:
    callbacks = getattr(trainer, "callbacks", [])
    return next((each for each in callbacks if isinstance(each, kind)), None)


def _reason(failed: Exception | None, said: BaseException | None) -> BaseException | None:
    """Why ``fit`` raises: what torch saw of the processes, or what they or the session said."""
    killed = isinstance(failed, ProcessExitedException) and failed.signal_name is not None
    if killed and not isinstance(said, Suspended):  # whoever did it, it was not the user's code
        return SuspendError(
            f"All processes of a run must live, but of this one {failed}: look for what did that, "
            "a lack of memory for instance."
        )
    return said or failed


class _InRank:
    """What Lightning calls in the process of each rank, in place of ``fit``'s own function."""

    def __init__(
        self, callback: Ranked, seats: Seats, trainer: Trainer, function: Callable[..., Any]
    ) -> None:
        self._callback = callback
        self._seats = seats
        self._trainer = trainer
        self._function = function
        self._random = random.getstate()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rank = self._seats.take(int(os.environ["LOCAL_RANK"]))
        self._callback.be_rank(rank)
        random.setstate(self._random)  # Python seeds it anew in a fork, and only it
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
            rank.ended(self._callback.state_dict(), whole=whole)

    def _unwind(self, error: BaseException) -> None:
        """Lightning does this in the process that called ``fit``, where nothing is to unwind."""
        _interrupt(self._trainer, error)
        self._trainer._teardown()
        self._trainer.state.fn = None  # else the weights are handed over, for nobody
