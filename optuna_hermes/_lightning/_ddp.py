"""Trainings in several processes: the ranks, and each rank's part of a checkpoint."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import torch.multiprocessing
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException
from torch.nn.parallel import DistributedDataParallel

from optuna_hermes._lightning._launches import LaunchableLoop
from optuna_hermes._lightning._namespace import LightningModule, Trainer, part
from optuna_hermes.errors import CheckpointError, Suspended, SuspendError
from optuna_hermes.suspend._ranks._rank import Rank, RankChannels

Tree = dict[str, Any]


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


def part_of(
    checkpoint: Tree, others: list[Tree], rank: Rank | None, trial: str, *, any_count: bool
) -> tuple[Tree, list[Tree]]:
    """The checkpoint as a rank is to load it, and the parts of ranks that no longer exist.

    If there were fewer ranks before, a new one gets the part of rank 0. If there were more, the
    parts of those that are gone go to rank 0.

    Args:
        others: the parts of the ranks after the first one.
        rank: None for a trial that trains in one process.

    Raises:
        CheckpointError: the number of ranks has changed, and must not.
    """
    number, count = (0, 1) if rank is None else (rank.rank, rank.count)
    if not any_count and len(others) + 1 != count:
        raise CheckpointError(
            f"A checkpoint of {trial} must be resumed by as many processes as have written it, but "
            f"these were {len(others) + 1} and now are {count}: give the Trainer as many devices "
            "as before."
        )
    if number == 0:
        return checkpoint, others[count - 1 :]
    if number > len(others):
        return checkpoint, []
    own = others[number - 1]
    shared = {
        "optimizer_states": checkpoint["optimizer_states"],
        "state_dict": {**checkpoint["state_dict"], **own["state_dict"]},
    }
    return {**own, **shared}, []


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


def launch_ranks(
    launch: Callable[..., Any],
    launcher: Any,
    loop: LaunchableLoop,
    function: Callable[..., Any],
    /,
    *args: Any,
    trainer: Trainer,
    **kwargs: Any,
) -> Any:
    """Start the ranks of a trial by Lightning's own ``launch``, and listen to them."""
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
        loop: LaunchableLoop,
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
