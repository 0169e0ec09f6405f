"""A plain ``DataLoader`` that can be put back to any batch of an epoch without loading data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from optuna_hermes.suspend._state import kept_rng, rng_state, set_rng_state


class Replay:
    """Stands where a loader keeps its index sampler, and draws an epoch's indices once more.

    It remembers the random state from which the epoch's indices were drawn. To come back to batch
    ``k`` it draws them again from there and drops the first ``k`` lists of indices: nothing is
    read from the data set, and the random numbers of everybody else stay as they were.

    Args:
        loader: a loader over a map-style data set; the wrapper hangs itself into it.
        trained: says how many batches of this epoch are trained. The indices drawn are no measure
            of it: worker processes fetch ahead.
    """

    def __init__(self, loader: DataLoader[Any], trained: Callable[[], int]) -> None:
        self._loader = loader
        self._trained = trained
        self._slot = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._sampler: Any = getattr(loader, self._slot)
        self._begin: dict[str, Any] | None = None
        self._resume: dict[str, Any] | None = None
        self._hang(self)

    @staticmethod
    def fits(loader: object) -> bool:
        """Whether a loader's position is given by the indices it has drawn."""
        return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)

    def unwrap(self) -> None:
        """Give the loader its own sampler back."""
        self._hang(self._sampler)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is."""
        begin = self._begin
        generators = self._generator_states() if begin is None else begin["generators"]
        return {
            "skip": self._trained(),
            "rng": None if begin is None else begin["rng"],
            "generators": generators,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there with the next iterator that is made."""
        self._resume = state

    def __iter__(self) -> Iterator[Any]:
        self._begin = None  # at once, not with the first index: workers may never ask for one
        return self._draw()

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def _draw(self) -> Iterator[Any]:
        resume, self._resume = self._resume, None
        if resume is not None:
            self._set_generators(resume["generators"])
        if resume is None or resume["rng"] is None:
            self._begin = {"rng": rng_state(), "generators": self._generator_states()}
            yield from self._sampler
            return
        self._begin = {"rng": resume["rng"], "generators": resume["generators"]}
        with kept_rng():
            set_rng_state(resume["rng"])
            batches = iter(self._sampler)
            # At least one is drawn here, so that the epoch's order comes from its own state.
            head = list(itertools.islice(batches, max(1, resume["skip"])))
        yield from head[resume["skip"] :]
        yield from batches

    def _hang(self, sampler: Any) -> None:
        # Past DataLoader.__setattr__, which forbids it since a running iterator would not notice.
        object.__setattr__(self._loader, self._slot, sampler)

    def _generators(self) -> list[torch.Generator]:
        owners = (self._loader, self._sampler, getattr(self._sampler, "sampler", None))
        found = [getattr(owner, "generator", None) for owner in owners]
        return [generator for generator in found if isinstance(generator, torch.Generator)]

    def _generator_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def _set_generators(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators(), states, strict=True):
            generator.set_state(state)
