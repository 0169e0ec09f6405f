"""The loaders of Fabric's ``setup_dataloaders`` and Accelerate's ``prepare``.

Both wrap a plain loader, and ask it for an iterator only with an epoch's first batch, as loaders do
whose ``__iter__`` is a generator. Accelerate's fetches each batch before the one before it is
trained.
"""

from __future__ import annotations

import inspect
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from optuna_hermes.suspend._loaders._kinds import data_of, is_stateful
from optuna_hermes.suspend._loaders._sampler import PassState, ResumableSampler
from optuna_hermes.suspend._state import rng_state, set_rng_state
from optuna_hermes.suspend._values._generators import (
    FoundGenerators,
    GeneratorOwner,
    holders_in,
    set_states,
)

_INNER = {"_FabricDataLoader": "_dataloader", "DataLoaderShard": "base_dataloader"}
_EPOCHS = {"_FabricDataLoader": "_num_iter_calls", "DataLoaderShard": "iteration"}


def inner_of(loader: Any) -> Any:
    """The plain loader inside a wrapper; None if there is none, or it keeps its own position."""
    inner = getattr(loader, _INNER.get(type(loader).__name__, ""), None)
    return inner if ResumableSampler.fits(inner) and not is_stateful(inner) else None


def replay_of(loader: Any, trained: Callable[[], int]) -> ResumableSampler:
    """Make the sampler of a plain loader, or of one in a wrapper."""
    if inner_of(loader) is not None:
        return _WrappedSampler(loader, trained)
    is_late = inspect.isgeneratorfunction(type(loader).__iter__)
    return (_LazySampler if is_late else ResumableSampler)(loader, trained)


class _LazySampler(ResumableSampler):
    """A sampler that fetches batches again under the random states of their first fetch."""

    _begins_late = True

    def __init__(self, loader: DataLoader[Any], trained: Callable[[], int]) -> None:
        super().__init__(loader, trained)
        # Worker processes have random states of their own, which ``ResumableSampler`` restores.
        self._fetches = not loader.num_workers
        self._under: deque[dict[str, Any]] = deque(maxlen=2)
        self._again_under: list[dict[str, Any]] = []
        self._now: dict[str, Any] | None = None
        self._generators = FoundGenerators()

    def _present(self) -> PassState:
        state = super()._present()
        ahead = state.drawn - state.skip
        return replace(state, under=list(self._under)[-ahead:] if ahead and self._fetches else [])

    def _trained_pass(self) -> Iterator[Any]:
        if self._resume is not None and self._fetches:
            # Torch draws a seed after this, as it did when the epoch began.
            self._now, self._again_under = rng_state(), list(self._resume.under or ())
        return super()._trained_pass()

    def _follow(self, batches: Iterator[Any]) -> Iterator[Any]:
        rng, self._now = self._now, None
        now = None if rng is None else {**self._drawn_from(), "rng": rng}
        under, self._again_under = self._again_under, []
        indices = super()._follow(batches)
        while True:
            if now is not None and not under:
                self._draw_from(now)
                now = None
            try:
                batch = next(indices)
            except StopIteration:
                return
            if under:
                self._draw_from(under.pop(0))
            if self._fetches:
                self._under.append(self._drawn_from())
            yield batch

    def _drawn_from(self) -> dict[str, Any]:
        """The random states, and the attributes of the object that collates, as they are now."""
        return {
            "rng": rng_state(),
            "data": self._generators.states(self._of_data),
            "collate": self._own.collate_state(),
        }

    def _draw_from(self, states: dict[str, Any]) -> None:
        set_rng_state(states["rng"])
        set_states(self._of_data(), states["data"])
        self._own.load_collate_state(states["collate"])

    def _of_data(self) -> list[GeneratorOwner]:
        return holders_in(*data_of(self._loader()))


class _WrappedSampler(_LazySampler):
    """The sampler of a wrapper's plain loader, with the number of the wrapper's epoch."""

    def __init__(self, wrapper: Any, trained: Callable[[], int]) -> None:
        super().__init__(inner_of(wrapper), trained)
        self._wrapper = weakref.ref(wrapper)
        self._name = _EPOCHS[type(wrapper).__name__]
        self._epochs = 0

    def expect(self, expected: bool = True) -> None:
        super().expect(expected)
        self._epochs = getattr(self._wrapper(), self._name)

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self._epochs, "position": super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        setattr(self._wrapper(), self._name, state["epochs"])
        super().load_state_dict(state["position"])

    def idle_state(self) -> dict[str, Any]:
        return {"epochs": getattr(self._wrapper(), self._name), **super().idle_state()}

    def load_idle_state(self, state: dict[str, Any]) -> None:
        if "epochs" in state:  # else it had not been trained on
            setattr(self._wrapper(), self._name, state["epochs"])
        super().load_idle_state(state)
