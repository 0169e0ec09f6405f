"""Weights that a ModelPruning callback prunes: a new module has no masks for them yet."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils.prune import custom_from_mask

from optuna_hermes._lightning._namespace import ModelPruning, Trainer, callbacks_of

_ORIG, _MASK = "_orig", "_mask"


def without_masks(
    weights: dict[str, Any], own: Collection[str]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Split into weights that an unpruned module can load, and the masks by parameter.

    Masks that this module is made with stay among its ``own`` names of weights.
    """
    masks = {
        name.removesuffix(_ORIG): weights[name.removesuffix(_ORIG) + _MASK]
        for name in weights
        if name.endswith(_ORIG)
        and name not in own
        and name.removesuffix(_ORIG) in own
        and name.removesuffix(_ORIG) + _MASK in weights
    }
    masked = {name + _MASK for name in masks}
    plain = {name: value for name, value in weights.items() if name not in masked}
    return without_orig(plain, masks), masks


def without_orig(named: dict[Any, Any], masks: Collection[str]) -> dict[Any, Any]:
    """The same by the names that masked parameters have in an unpruned module."""
    renamed = {name + _ORIG: name for name in masks}
    return {renamed.get(name, name): value for name, value in named.items()}


def prune(module: nn.Module, masks: dict[str, torch.Tensor]) -> None:
    """Apply masks to parameters, in the order of the masks."""
    for place, mask in masks.items():
        part, _, name = place.rpartition(".")
        owner = module.get_submodule(part)
        mask = mask.to(getattr(owner, name).device)
        custom_from_mask(owner, name, mask)  # type: ignore[no-untyped-call]


def lottery_state(trainer: Trainer) -> list[list[bool]]:
    """For each lottery ticket callback, True for each first value in the present one's memory."""
    # The callback does not copy first values: those that it has set once are trained on, and are
    # set again the next time.
    return [
        [first.data_ptr() == now.data_ptr() for first, now in _lottery(each)]
        for each in callbacks_of(trainer, ModelPruning)
    ]


def restore_lottery(trainer: Trainer, state: list[list[bool]]) -> None:
    """Let first values share memory with present ones, as ``lottery_state`` found them."""
    for each, shared in zip(callbacks_of(trainer, ModelPruning), state, strict=False):
        for (first, now), same in zip(_lottery(each), shared, strict=False):
            if same:
                first.data = now.data


def _lottery(callback: ModelPruning) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """First and present values of the pruned parameters."""
    for layer in (callback._original_layers or {}).values():
        for index, name in layer["names"]:
            part, _ = callback._parameters_to_prune[index]
            now = part._parameters.get(name + _ORIG, part._parameters.get(name))
            first = getattr(layer["data"], name)
            if isinstance(now, torch.Tensor) and isinstance(first, torch.Tensor):
                yield first, now


def is_masked(part: nn.Module, name: str) -> bool:
    """True if an attribute is a masked parameter, which each forward computes anew."""
    return name + _ORIG in part._parameters
