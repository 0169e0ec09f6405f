"""Loaders and accelerators that a user's loop has beside the loader whose batches it counts."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

from torch.utils.data import DataLoader

from optuna_hermes import _heap
from optuna_hermes.suspend._loader import OwnStates, Replay, idle
from optuna_hermes.suspend._wrapped import inner_of


class OtherLoaders:
    """The loaders and accelerators made before the loop: they stay the same from epoch to epoch.

    Restored with the trial are the loaders' generators, their worker processes where these persist,
    and the steps that an ``Accelerator`` counts to accumulate gradients.
    """

    def __init__(self) -> None:
        self._idle: weakref.WeakKeyDictionary[Any, Replay | OwnStates]
        self._idle = weakref.WeakKeyDictionary()
        self._accelerators: list[weakref.ref[Any]] = []

    def begin(self) -> None:
        """Collect them when the loop begins."""
        gc.collect()  # else loaders of an earlier trial of this process would be found, too
        accelerate = sys.modules.get("accelerate")  # imported if the user has one
        accelerators = () if accelerate is None else (accelerate.Accelerator,)
        self._accelerators = []
        for each in _heap.objects(DataLoader, *accelerators):
            if issubclass(type(each), accelerators):
                self._accelerators.append(weakref.ref(each))
                continue
            samplers = each.batch_sampler, each.sampler
            # One that holds a ``Replay`` is another trial's.
            if not any(isinstance(sampler, Replay) for sampler in samplers):
                self._idle[each] = idle(each)

    def release(self, loader: object) -> None:
        """Leave out a loader whose batches are counted, or that keeps its position itself."""
        inner = inner_of(loader)
        plain = loader if inner is None else inner
        if isinstance(plain, DataLoader) and plain in self._idle:
            self._idle.pop(plain).unwrap()

    def state(self) -> list[dict[str, Any]]:
        """States from which the loaders' next epochs begin."""
        return [
            {"loader": _described(loader), "idle": _unless_new(each.idle_state())}
            for loader, each in self._idle.items()
        ]

    def load_state(self, states: list[dict[str, Any]]) -> None:
        """Restore what ``state`` returned; loaders are matched by their description, in order."""
        left = list(self._idle.items())
        for state in states:
            for index, (loader, each) in enumerate(left):
                if _described(loader) == state["loader"]:
                    if state["idle"] is not None:
                        each.load_idle_state(state["idle"])
                    del left[index]
                    break

    def accelerator_steps(self) -> list[int]:
        """The step counters of the accelerators."""
        return [each.step for accelerator in self._accelerators if (each := accelerator())]

    def load_accelerator_steps(self, steps: list[int]) -> None:
        """Restore the step counters."""
        for accelerator, step in zip(self._accelerators, steps, strict=False):
            each = accelerator()
            if each is not None:
                each.step = step

    def leave(self) -> None:
        """Restore the loaders' own samplers."""
        for each in self._idle.values():
            each.unwrap()
        self._idle.clear()


def _unless_new(state: dict[str, Any]) -> dict[str, Any] | None:
    """The state of a loader, None if it is that of a new one."""
    own = state["own"]
    is_new = state["seed"] is None and not own["generators"] and not any(own["attributes"])
    return None if is_new else state


def _described(loader: DataLoader[Any]) -> list[Any]:
    data: Any = loader.dataset
    length = len(data) if hasattr(data, "__len__") else None
    kinds = [type(each).__qualname__ for each in (data, loader.sampler, loader.collate_fn)]
    return [*kinds, length, loader.batch_size, loader.num_workers, loader.drop_last]
