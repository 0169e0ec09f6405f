"""Loaders, accelerators and scalers that a loop has beside the loader whose batches it counts."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader

from optuna_hermes import _heap
from optuna_hermes.suspend._loaders._attributes import LoaderAttributes
from optuna_hermes.suspend._loaders._kinds import is_stateful, length_of
from optuna_hermes.suspend._loaders._position import Keeper
from optuna_hermes.suspend._loaders._sampler import ResumableSampler, idle
from optuna_hermes.suspend._loaders._weak import by_identity
from optuna_hermes.suspend._loaders._wrapped import inner_of


class OtherLoaders:
    """Loaders and their like that were made before the loop and stay from epoch to epoch.

    Restored with the trial are the loaders' generators, their worker processes where these persist,
    the steps that an ``Accelerator`` counts to accumulate gradients, and gradient scalers, which
    Accelerate and Fabric hold where nobody names them.
    """

    def __init__(self) -> None:
        # None for a loader whose batches are counted elsewhere: it stays in its place in the order.
        self._idle: MutableMapping[Any, ResumableSampler | LoaderAttributes | None]
        self._idle = by_identity()
        self._loaded: MutableMapping[Any, dict[str, Any]] = by_identity()
        self._accelerators: list[weakref.ref[Any]] = []
        self._scalers: list[weakref.ref[GradScaler]] = []

    def begin(self, places: Mapping[int, int]) -> None:
        """Collect them when the loop begins.

        Args:
            places: by ``id``, for their order: those that are alike are told apart by it.
        """
        gc.collect()  # else loaders of an earlier trial of this process would be found, too
        accelerate = sys.modules.get("accelerate")  # imported if the user has one
        accelerators = () if accelerate is None else (accelerate.Accelerator,)
        self._accelerators, self._scalers = [], []
        found = _heap.objects(DataLoader, GradScaler, *accelerators)
        for each in sorted(found, key=lambda each: places.get(id(each), len(places))):
            if issubclass(type(each), accelerators):
                self._accelerators.append(weakref.ref(each))
                continue
            if issubclass(type(each), GradScaler):
                self._scalers.append(weakref.ref(each))
                continue
            samplers = each.batch_sampler, each.sampler
            # One that holds a ``ResumableSampler`` is another trial's.
            if not any(isinstance(sampler, ResumableSampler) for sampler in samplers):
                self._idle[each] = idle(each)

    def release(self, loader: object) -> dict[str, Any] | None:
        """Leave out a loader whose batches are counted, or that keeps its position itself.

        Returns:
            The state from which its next epoch begins; None if none was restored.
        """
        inner = inner_of(loader)
        plain = loader if inner is None else inner
        each = self._idle.get(plain) if isinstance(plain, DataLoader) else None
        if each is None:
            return None
        each.unwrap()
        self._idle[plain] = None
        loaded = self._loaded.pop(plain, None)
        return None if loaded is None else {**loaded, **each.idle_state()}

    def problem(self, loader: object = None) -> str | None:
        """The reason why a trial that trains on this loader cannot be stored, None if it can.

        Args:
            loader: None for one that trains on none in its present epoch.
        """
        others = (each for each, keeper in self._idle.items() if keeper is None)
        if any(is_stateful(each) and each is not loader for each in others):
            return "it trains on a loader with a state in some of its epochs"
        return None

    def warning(self) -> str | None:
        """A warning about what cannot be restored exactly, None if all can."""
        watched = (each for each in self._idle.values() if isinstance(each, ResumableSampler))
        return next(filter(None, (each.warning() for each in watched)), None)

    def state(self, counted: Mapping[int, Keeper]) -> dict[str, Any]:
        """States from which the loaders' next epochs begin, and those of the others.

        Args:
            counted: by ``id``, those of the released loaders that are in no epoch.
        """
        states = [
            (loader, {**self._loaded.get(loader, {}), **each.idle_state()})
            for loader, own in self._idle.items()
            if (each := counted.get(id(loader), own)) is not None
        ]
        loaders = [
            {"loader": _described(loader), "idle": _unless_new(state)} for loader, state in states
        ]
        accelerators = (accelerator() for accelerator in self._accelerators)
        return {
            "other_loaders": loaders,
            "steps": [each.step for each in accelerators if each is not None],
            "scalers": [each.state_dict() for each in self._enabled_scalers()],
        }

    def load_state(self, tree: dict[str, Any]) -> None:
        """Restore what ``state`` returned; loaders are matched by their description, in order."""
        left = [(loader, each) for loader, each in self._idle.items() if each is not None]
        for state in tree["other_loaders"]:
            for index, (loader, each) in enumerate(left):
                if _described(loader) == state["loader"]:
                    if state["idle"] is not None:
                        each.load_idle_state(state["idle"])
                        self._loaded[loader] = state["idle"]
                    del left[index]
                    break
        for there, step in zip(self._accelerators, tree["steps"], strict=False):
            accelerator = there()
            if accelerator is not None:
                accelerator.step = step
        for scaler, state in zip(self._enabled_scalers(), tree["scalers"], strict=False):
            scaler.load_state_dict(state)

    def _enabled_scalers(self) -> Iterator[GradScaler]:
        scalers = (each() for each in self._scalers)
        return (each for each in scalers if each is not None and each.is_enabled())

    def leave(self) -> None:
        """Restore the loaders' own samplers."""
        for each in self._idle.values():
            if each is not None:
                each.unwrap()
        self._idle.clear()


def _unless_new(state: dict[str, Any]) -> dict[str, Any] | None:
    """The state of a loader, None if it is that of a new one."""
    own = state["own"]
    of_loader = state["seed"] is None and not state.get("epochs")
    return None if of_loader and not own["generators"] and not any(own["attributes"]) else state


def _described(loader: DataLoader[Any]) -> list[Any]:
    data: Any = loader.dataset
    kinds = [type(each).__qualname__ for each in (data, loader.sampler, loader.collate_fn)]
    return [*kinds, length_of(data), loader.batch_size, loader.num_workers, loader.drop_last]
