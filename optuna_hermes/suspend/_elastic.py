"""A plain ``DataLoader`` whose batches change their size between two batches of an epoch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from optuna_hermes.suspend._loader import Replay


def why_not_regrouped(loader: object) -> str | None:
    """Why the batches of a loader cannot change their size, None if they can."""
    if not Replay.fits(loader) or callable(getattr(loader, "state_dict", None)):
        return "its train loader is no plain DataLoader over a map-style data set"
    if type(getattr(loader, "batch_sampler", None)) is not BatchSampler:
        return "its train loader does not make batches of batch_size samples"
    return None


class ElasticReplay(Replay):
    """A ``Replay`` that counts in samples, and makes batches of them in whatever size is asked for.

    The sampler gives an epoch's samples in its order, as always. Those that are trained are skipped
    and the others come in batches of the present size: none comes twice and none is lost. With
    ``drop_last`` the samples at the end of the epoch that do not fill a batch of the size that it
    has then are left out.

    Args:
        loader: one for which ``why_not_regrouped`` knows no reason.
        trained: see ``Replay``.
        limit: so many samples make an epoch, None for all.
    """

    def __init__(
        self, loader: DataLoader[Any], trained: Callable[[], int], limit: int | None = None
    ) -> None:
        super().__init__(loader, trained)
        self._limit = limit
        self.samples: int = len(self._sampler.sampler) if limit is None else limit
        """How many make an epoch."""
        self.first_size = int(self._sampler.batch_size)
        self.size = self.first_size
        """Of the next batch."""
        self.drops_last = bool(self._sampler.drop_last)
        self._batches_before = 0
        self._samples_before = 0

    @property
    def seen(self) -> int:
        """How many samples of this epoch are trained."""
        batches = self._trained() - self._batches_before
        return min(self.samples, self._samples_before + batches * self.size)

    @property
    def left(self) -> int:
        """How many samples of this epoch are not trained yet."""
        return self.samples - self.seen

    def begin_with(self, size: int) -> None:
        """Let the first epoch come in batches of this size."""
        self.size = size
        self._show_size(size)

    def resize(self, size: int) -> None:
        """Let the next iterator that is made go on in batches of another size."""
        batches, state = self._trained(), self.state_dict()
        self._go_on({**state, "batches_before": batches, "size": size})

    def rewind(self) -> None:
        """Count from the beginning of an epoch."""
        self._batches_before = self._samples_before = 0

    def batches_of(self, samples: int, size: int) -> int:
        """How many batches of one size so many samples make at the end of an epoch."""
        return samples // size if self.drops_last else math.ceil(samples / size)

    def ends_alone(self, samples: int, size: int) -> bool:
        """Whether so many samples at the end of an epoch leave a single one for the last batch.

        Modules with batch normalisation raise there. Not if the first size does so too.
        """
        alone = not self.drops_last and size > 1 and samples % size == 1
        return alone and self.samples % self.first_size != 1

    def unwrap(self) -> None:
        """See ``Replay``."""
        super().unwrap()
        self._show_size(self.first_size)

    def state_dict(self) -> dict[str, Any]:
        """See ``Replay``; what it skips are samples."""
        state = super().state_dict()
        if self._resume is not None:
            return state
        seen = self.seen
        return {
            **state,
            "skip": seen,
            "drawn": seen,
            "ended": False,
            "batches_before": self._trained(),
            "size": self.size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ``Replay``; a state of one is understood, its batches being of the first size."""
        if "size" not in state:
            skipped, size = state["skip"], self.first_size
            state = {**state, "skip": skipped * size, "batches_before": skipped, "size": size}
            state |= {"drawn": skipped * size, "ahead": None, "ended": False}
        self._pool.load_state(state)
        self._go_on(state)

    def _go_on(self, state: dict[str, Any]) -> None:
        self._resume = state
        self.size = state["size"]
        self._samples_before = min(self.samples, state["skip"])
        self._batches_before = state["batches_before"]
        self._show_size(self.size)

    def __iter__(self) -> Iterator[Any]:
        if self._resume is None:
            self.rewind()
        return super().__iter__()

    def __len__(self) -> int:
        left = self.samples - self._samples_before
        return self._batches_before + self.batches_of(left, self.size)

    def _items(self) -> Iterator[Any]:
        # A sampler that is asked once more than it has samples may draw more random numbers.
        yield from itertools.islice(iter(self._sampler.sampler), self._limit)

    def _items_ahead(self, trained: int) -> None:
        """They are drawn again: they may come in batches of another size."""

    def _batches(self, items: Iterator[Any]) -> Iterator[Any]:
        size = self.size
        while batch := list(itertools.islice(items, size)):
            if self.drops_last and len(batch) < size:
                return
            yield batch

    def _show_size(self, size: int) -> None:
        loader = self._loader()
        if loader is not None:
            object.__setattr__(loader, "batch_size", size)
