"""Weights that are pruned in the course of a training: a module begins without their masks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelPruning
from torch import nn
from torch.nn.utils.prune import custom_from_mask

_ORIG, _MASK = "_orig", "_mask"


@contextlib.contextmanager
def kept_pruned(trainer: Trainer) -> Iterator[None]:
    """A checkpoint made within holds weights and masks apart, whatever one of the user's does."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]  # it is set by a connector
    permanent = [
        each
        for each in callbacks
        if isinstance(each, ModelPruning) and each._make_pruning_permanent
    ]
    for each in permanent:
        each._make_pruning_permanent = False
    try:
        yield
    finally:
        for each in permanent:
            each._make_pruning_permanent = True


def without_masks(
    weights: dict[str, Any], module: nn.Module
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Weights as a module can load them that is not pruned yet, and the masks by parameter.

    A module that is made with masks keeps them among its weights.
    """
    own = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    masks = {
        name.removesuffix(_ORIG): weights[name.removesuffix(_ORIG) + _MASK]
        for name in weights
        if name.endswith(_ORIG)
        and name not in own
        and name.removesuffix(_ORIG) in own
        and name.removesuffix(_ORIG) + _MASK in weights
    }
    renamed = {name + _ORIG: name for name in masks}
    masked = {name + _MASK for name in masks}
    plain = {
        renamed.get(name, name): value for name, value in weights.items() if name not in masked
    }
    return plain, masks


def prune(module: nn.Module, masks: dict[str, torch.Tensor]) -> None:
    """Put masks on parameters, in their order."""
    for place, mask in masks.items():
        part, _, name = place.rpartition(".")
        owner = module.get_submodule(part)
        mask = mask.to(getattr(owner, name).device)
        custom_from_mask(owner, name, mask)  # type: ignore[no-untyped-call]


def lottery_state(trainer: Trainer) -> list[list[bool]]:
    """Of each callback that gives pruned weights their first values: which are those by now.

    It does not copy these: what it was given the first time is trained on, and is what it gives the
    next time.
    """
    return [
        [first.data_ptr() == now.data_ptr() for first, now in _lottery(each)]
        for each in _pruning(trainer)
    ]


def restore_lottery(trainer: Trainer, state: list[list[bool]]) -> None:
    """Let them be so again."""
    for each, shared in zip(_pruning(trainer), state, strict=False):
        for (first, now), same in zip(_lottery(each), shared, strict=False):
            if same:
                first.data = now.data


def _pruning(trainer: Trainer) -> list[ModelPruning]:
    callbacks = trainer.callbacks  # type: ignore[attr-defined]  # it is set by a connector
    return [each for each in callbacks if isinstance(each, ModelPruning)]


def _lottery(callback: ModelPruning) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """First values and present ones of what is pruned."""
    for layer in (callback._original_layers or {}).values():
        for index, name in layer["names"]:
            part, _ = callback._parameters_to_prune[index]
            now = part._parameters.get(name + _ORIG, part._parameters.get(name))
            first = getattr(layer["data"], name)
            if isinstance(now, torch.Tensor) and isinstance(first, torch.Tensor):
                yield first, now


def is_masked(part: nn.Module, name: str) -> bool:
    """Whether an attribute is what a mask has left of a parameter: each forward makes it anew."""
    return name + _ORIG in part._parameters
