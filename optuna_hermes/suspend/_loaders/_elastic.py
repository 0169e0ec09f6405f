"""Plain ``DataLoader`` s whose batches may change in size, or be divided among processes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from optuna_hermes.suspend._loaders._kinds import length_of
from optuna_hermes.suspend._loaders._sampler import PassState, ResumableSampler
from optuna_hermes.suspend._state import kept_rng, rng_state, seed_everything, trial_seed

LEAST_SAMPLES = 2
"""Least samples of a process in a batch: modules with batch normalisation raise with one."""


def why_not_regrouped(loader: object) -> str | None:
    """The reason why a loader's batch size cannot change, None if it can."""
    if not ResumableSampler.fits(loader) or callable(getattr(loader, "state_dict", None)):
        return "its train loader is no plain DataLoader over a map-style data set"
    sampler = getattr(loader, "batch_sampler", None)
    # First, since a sampler that is wrapped by now is of another type, but of the same length.
    if sampler is not None and length_of(sampler) is None:
        return "its train loader's sampler has no length"
    if type(sampler) is not BatchSampler:
        return "its train loader does not make batches of batch_size samples"
    return None


class ElasticSampler(ResumableSampler):
    """A ``ResumableSampler`` that counts samples, and groups them into batches of any size.

    The sampler gives an epoch's samples in its order. Trained samples are skipped, the others come
    in batches of the present size: none comes twice and none is lost. With ``drop_last`` the last
    samples of an epoch are left out if they do not fill a batch of the size at that time.

    Args:
        limit: samples in an epoch, None for all.
    """

    def __init__(
        self, loader: DataLoader[Any], trained: Callable[[], int], limit: int | None = None
    ) -> None:
        super().__init__(loader, trained)
        self._limit = limit
        self.samples: int = len(self._sampler.sampler) if limit is None else limit
        """Samples in an epoch."""
        self.first_size = int(self._sampler.batch_size)
        self.size = self.first_size
        """Samples in the next batch."""
        self.drops_last = bool(self._sampler.drop_last)
        self.rewind()

    @property
    def seen(self) -> int:
        """Trained samples of this epoch."""
        batches = self._trained() - self._batches_before
        return min(self.samples, self._samples_before + batches * self.size)

    @property
    def left(self) -> int:
        """Samples of this epoch that are not trained yet."""
        return self.samples - self.seen

    def begin_with(self, size: int) -> None:
        """Set the batch size of the first epoch."""
        self.size = size
        self._show_size(size)

    def resize(self, size: int) -> None:
        """Set the batch size with which the next iterator goes on."""
        self._go_on(self._resume or self._present(), self._trained(), size)
        self.expect()

    def rewind(self) -> None:
        """Count from the beginning of an epoch."""
        self._batches_before = self._samples_before = 0

    def batches_of(self, samples: int, size: int) -> int:
        """Number of batches of ``size`` that the last ``samples`` of an epoch make."""
        return samples // size if self.drops_last else math.ceil(samples / size)

    def ends_alone(self, samples: int, size: int) -> bool:
        """True if the last ``samples`` of an epoch leave a single one for the last batch."""
        # Modules with batch normalisation raise there, unless the user's own batches end so, too.
        alone = not self.drops_last and size > 1 and samples % size == 1
        return alone and self.samples % self.first_size != 1

    def unwrap(self) -> None:
        super().unwrap()
        self._show_size(self.first_size)

    def _present(self) -> PassState:
        seen, batches = self.seen, self._trained()
        # None ahead: they are drawn again, as the batch size may have changed.
        state = replace(super()._present(), skip=seen, drawn=seen, ahead=None, ended=False)
        return replace(state, batches_before=batches, size=self.size)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ``ResumableSampler``, whose states are taken: their batches have the first size."""
        if "size" not in state:
            skipped, size = state["skip"], self.first_size
            state = {**state, "skip": skipped * size, "batches_before": skipped, "size": size}
            state |= {"drawn": skipped * size, "ahead": None, "ended": False}
        self._pool.load_state(state)
        self._go_on(PassState(**state), state["batches_before"], state["size"])

    def _go_on(self, state: PassState, batches: int, size: int) -> None:
        self._resume = replace(state, batches_before=batches, size=size)
        self._samples_before = min(self.samples, state.skip)
        self._batches_before, self.size = batches, size
        self._show_size(size)

    def _trained_pass(self) -> Iterator[Any]:
        if self._resume is None:
            self.rewind()
        return super()._trained_pass()

    def __len__(self) -> int:
        left = self.samples - self._samples_before
        return self._batches_before + self.batches_of(left, self.size)

    def _items(self) -> Iterator[Any]:
        # islice: a sampler that is asked for one item too many may draw more random numbers.
        yield from itertools.islice(iter(self._sampler.sampler), self._limit)

    def _batches(self, items: Iterator[Any]) -> Iterator[Any]:
        size = self.size
        while batch := list(itertools.islice(items, size)):
            if self.drops_last and len(batch) < size:
                return
            yield batch

    def _show_size(self, size: int) -> None:
        loader = self._loader()
        if loader is not None:
            # Not setattr: DataLoader forbids to change it once it is made.
            object.__setattr__(loader, "batch_size", size)


class DividedSampler(ResumableSampler):
    """A ``ResumableSampler`` that gives each process its part of every batch.

    An epoch has the same batches, of the same samples in the same order, with any number of
    processes: every process draws the order from a seed of the trial and of the epoch.
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
        # Worker processes begin anew: another number of ranks has another number of them.
        super().load_state_dict({**state, "seed": None, "workers": None})

    def _fresh(self) -> Iterator[Any]:
        return self._again()

    def _again(self) -> Iterator[Any]:
        state = self._resume or PassState(before=self._pass.before, own=self._own.state())
        if state.begin is None:
            # From trial and epoch only: so all processes draw the same order.
            with kept_rng():
                seed_everything(trial_seed(self._seed, self._epoch()))
                begin = {"rng": rng_state(), "own": state.own}
            state = PassState(before=state.before, begin=begin, own=state.own)
        self._resume = state
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

    All parts have the same length.

    Example:
        >>> [share([1, 2, 3, 4, 5, 6], rank, 2) for rank in (0, 1)]
        [[1, 3, 5], [2, 4, 6]]
        >>> [share([1, 2, 3, 4, 5], rank, 2) for rank in (0, 1)]
        [[1, 3, 5], [2, 4, 1]]
    """
    if count == 1:
        return batch
    # Some samples twice where it cannot be divided: as ``DistributedSampler`` at an epoch's end.
    length = max(-(-len(batch) // count), min(LEAST_SAMPLES, len(batch)))
    return [batch[(rank + count * place) % len(batch)] for place in range(length)]
