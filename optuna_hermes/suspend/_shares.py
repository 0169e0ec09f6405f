"""A plain ``DataLoader`` whose batches are divided among a varying number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from optuna_hermes.suspend._loader import Replay
from optuna_hermes.suspend._seed import seed_everything, trial_seed
from optuna_hermes.suspend._state import kept_rng, rng_state

LEAST_SAMPLES = 2
"""Least samples of a process in a batch: modules with batch normalisation raise with one."""


class Shares(Replay):
    """A ``Replay`` that gives each process its part of every batch.

    An epoch has the same batches, of the same samples in the same order, with any number of
    processes: every process draws the order from a seed of the trial and of the epoch.

    Args:
        loader: the same one in all processes, with the user's own sampler.
        trained: see ``Replay``.
        epoch: returns the number of the epoch, counted from 0.
        seed: of the trial.
        rank: number of this process, counted from 0.
        count: number of processes.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        trained: Callable[[], int],
        *,
        epoch: Callable[[], int],
        seed: int,
        rank: int,
        count: int,
    ) -> None:
        super().__init__(loader, trained)
        self._epoch = epoch
        self._seed = seed
        self._rank = rank
        self._count = count

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ``Replay``; worker processes begin anew, as their number may have changed."""
        super().load_state_dict({**state, "seed": None, "workers": None})

    def _fresh(self) -> Iterator[Any]:
        return self._again()

    def _again(self) -> Iterator[Any]:
        if self._resume is None or self._resume["begin"] is None:
            before = self._resume
            own = self._own.state() if before is None else before["own"]
            # From trial and epoch only: so all processes draw the same order.
            with kept_rng():
                seed_everything(trial_seed(self._seed, self._epoch()))
                begin = {"rng": rng_state(), "own": own}
            self._resume = {
                "skip": 0,
                "before": self._before if before is None else before["before"],
                "drawn": 0,
                "ahead": None,
                "opened": None,
                "begin": begin,
                "own": own,
            }
        yield from super()._again()

    def _items_ahead(self, trained: int) -> None:
        """Return None: they are drawn again, as those that were drawn are one process's part."""

    def _items(self) -> Iterator[Any]:
        # All at once: a sampler that draws later would draw from states that differ by process.
        yield from list(self._sampler)

    def _batches(self, items: Iterator[Any]) -> Iterator[Any]:
        return (share(batch, self._rank, self._count) for batch in items)


def share(batch: list[Any], rank: int, count: int) -> list[Any]:
    """The part of a batch that one of ``count`` processes takes.

    All parts have the same length. Where a batch cannot be divided some samples are taken twice, as
    ``DistributedSampler`` does at the end of an epoch.

    Example:
        >>> [share([1, 2, 3, 4, 5, 6], rank, 2) for rank in (0, 1)]
        [[1, 3, 5], [2, 4, 6]]
        >>> [share([1, 2, 3, 4, 5], rank, 2) for rank in (0, 1)]
        [[1, 3, 5], [2, 4, 1]]
    """
    if count == 1:
        return batch
    length = max(-(-len(batch) // count), min(LEAST_SAMPLES, len(batch)))
    return [batch[(rank + count * place) % len(batch)] for place in range(length)]
