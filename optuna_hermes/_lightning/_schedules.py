"""Learning rates and their schedules, scaled and paced when the batch size changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from optuna_hermes._lightning._namespace import Trainer
from optuna_hermes.suspend._loaders._elastic import ElasticSampler


class Pace:
    """Steps the schedulers of a ``fit`` as often in an epoch as with batches of the first size.

    Schedulers that watch a metric are still called once for each step of the optimizer.
    """

    def __init__(self, trainer: Trainer, replay: ElasticSampler) -> None:
        self._trainer = trainer
        self._replay = replay
        self._made = self._due()

    def begin_epoch(self, replay: ElasticSampler) -> None:
        """Begin an epoch, whose loader may be another one."""
        self._replay, self._made = replay, 0

    def update(
        self, original: Callable[..., None], interval: str, update_plateau_schedulers: bool
    ) -> None:
        """Replacement for ``update_lr_schedulers`` of Lightning's epoch loop."""
        loop = self._trainer.fit_loop
        steps = 1
        if interval == "step" and not update_plateau_schedulers and not loop._should_accumulate():
            # Two steps for a batch of twice the first size, and one for every second batch of half
            # that size: so a schedule over a number of steps ends where it was meant to.
            due = self._due()
            steps, self._made = due - self._made, due
        for _ in range(steps):
            original(interval, update_plateau_schedulers)

    def _due(self) -> int:
        """Steps that this epoch's trained samples would have made in batches of the first size."""
        replay, windows = self._replay, self._trainer.accumulate_grad_batches
        if self._trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            return math.ceil(replay.batches_of(replay.samples, replay.first_size) / windows)
        return replay.seen // replay.first_size // windows


_IN_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
"""Keys of rates that optimizers and schedulers keep in parameter groups."""

_IN_SCHEDULERS = ("base_lrs", "max_lrs", "min_lrs", "eta_min", "_last_lr")
"""Attributes of schedulers that hold rates."""


def scale_rates(optimizers: Iterable[Any], schedulers: Iterable[Any], factor: float) -> None:
    """Multiply every learning rate, and every rate that a schedule may come back to."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            _scale(group, _IN_GROUPS, factor)
    for scheduler in _with_parts(schedulers):
        _scale(vars(scheduler), _IN_SCHEDULERS, factor)


def _scale(owner: dict[str, Any], names: Iterable[str], factor: float) -> None:
    for name in names:
        value = owner.get(name)
        if name == "lr" and isinstance(value, torch.Tensor):  # CUDA graphs hold its address
            value.mul_(factor)
        elif value is not None:
            owner[name] = _times(value, factor)


def _times(value: Any, factor: float) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(each * factor for each in value)
    return value * factor


def _with_parts(schedulers: Iterable[Any]) -> list[Any]:
    """Schedulers, and the ones that they contain."""
    found: list[Any] = []
    waiting = list(schedulers)
    while waiting:
        each = waiting.pop()
        if all(each is not known for known in found):
            found.append(each)
            waiting += getattr(each, "_schedulers", [])
    return found
