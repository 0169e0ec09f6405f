"""Learning rates of optimizers and schedulers, scaled with the batch size."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

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
