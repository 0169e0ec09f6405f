"""Learning rates and their schedules, scaled and paced when the batch size changes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim import lr_scheduler

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


def unscalable(schedulers: Iterable[Any]) -> Any:
    """The first scheduler, or part of one, that would write unscaled rates back; None if none."""
    return next((each for each in _with_parts(schedulers) if not _scales(each)), None)


def _scales(scheduler: Any) -> bool:
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        return True
    if not isinstance(scheduler, lr_scheduler.LRScheduler):
        return False  # its rates have other names, if any
    kind = type(scheduler)
    if all(each.__module__ == lr_scheduler.__name__ for each in (kind.step, kind.get_lr)):
        return True
    # Most classes of users scale ``base_lrs``; some compute a rate of their own.
    try:
        once, twice = (_next_rates(scheduler, factor) for factor in (1.0, 2.0))
        # Nearly twice is enough: a floor of its own may be a little part of a rate.
        return all(math.isclose(2 * a, b, rel_tol=0.2) for a, b in zip(once, twice, strict=True))
    except NotImplementedError:  # its ``step`` does all
        return False
    except Exception:  # it may not be asked outside of ``step``
        return True


def _next_rates(scheduler: Any, factor: float) -> list[float]:
    """The rates of a scheduler's next step, were all that it keeps multiplied by a factor."""
    asked = copy.copy(scheduler)
    optimizer = scheduler.optimizer
    groups = [{**group, "lr": float(group["lr"])} for group in optimizer.param_groups]
    asked.optimizer = SimpleNamespace(**{**vars(optimizer), "param_groups": groups})
    asked.last_epoch += 1
    asked._step_count += 1
    asked._get_lr_called_within_step = True  # else it warns
    for group in groups:
        _scale(group, _IN_GROUPS, factor)
    _scale(vars(asked), _IN_SCHEDULERS, factor)
    return [float(each) for each in asked.get_lr()]


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
    found: list[Any] = []
    waiting = list(schedulers)
    while waiting:
        each = waiting.pop()
        if all(each is not known for known in found):
            found.append(each)
            waiting += getattr(each, "_schedulers", [])
    return found
