"""The parts of a module and of its optimizers, which a checkpoint must fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from optuna_hermes._lightning._namespace import (
    OF_LIGHTNING,
    BaseFinetuning,
    LightningModule,
    Trainer,
    callbacks_of,
)
from optuna_hermes._lightning._optimizers import Groups, shared_groups
from optuna_hermes._lightning._pruning import without_masks
from optuna_hermes.suspend._named_objects import set_buffers


class Shape:
    """The names of a module's weights, and the groups of its optimizers, where they are loaded.

    In a fit that begins without a checkpoint this is where they would be.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.weights: set[str] = set()
        """Names of parameters and of the buffers in ``state_dict``."""
        self.groups: Groups = []
        """The optimizers, each with the first one that shares its groups."""
        self._trainer = trainer
        self._unset: set[str] = set()
        self._sizes: list[list[int]] = []

    def note_weights(self) -> None:
        """Note the names of weights; right before they are loaded."""
        self.weights, self._unset = _weights(self._trainer.lightning_module)

    def note_groups(self) -> None:
        """Note the groups of the optimizers; right before their states are loaded."""
        self._sizes, self.groups = _sizes(self._trainer), shared_groups(self._trainer)

    def make_room(self, weights: Mapping[str, Any]) -> None:
        """Make the buffers of a checkpoint that are None here, or that have another shape."""
        module = self._trainer.lightning_module
        here = dict(module.named_buffers(remove_duplicate=False))
        others = {
            name: value.clone()  # it is still to be loaded, and handed to the user's hooks
            for name, value in weights.items()
            if name in self._unset or _reshaped(here.get(name), value)
        }
        set_buffers(module, others)

    def changed(self) -> str | None:
        """The name of what has other parts than the next process makes; None if nothing has."""
        trainer = self._trainer
        if _makes_room_itself(trainer.lightning_module):
            return None
        weights, _ = _weights(trainer.lightning_module)
        unpruned, _ = without_masks(dict.fromkeys(weights), self.weights)
        if not self.weights <= unpruned.keys() <= self.weights | self._unset:
            return "its module"
        if callbacks_of(trainer, BaseFinetuning):  # it makes the groups again
            return None
        sizes = enumerate(zip(_sizes(trainer), self._sizes, strict=False))
        return next((f"its optimizer {i}" for i, (now, first) in sizes if now != first), None)


def _weights(module: nn.Module) -> tuple[set[str], set[str]]:
    """Names of parameters and persistent buffers, and of such buffers that are None."""
    there: set[str] = set()
    unset: set[str] = set()
    for place, part in module.named_modules(remove_duplicate=False):
        prefix = f"{place}." if place else ""
        there |= {prefix + name for name, each in part._parameters.items() if each is not None}
        for name, each in part._buffers.items():
            if name not in part._non_persistent_buffers_set:
                (unset if each is None else there).add(prefix + name)
    return there, unset


def _sizes(trainer: Trainer) -> list[list[int]]:
    return [[len(group["params"]) for group in each.param_groups] for each in trainer.optimizers]


def _reshaped(buffer: torch.Tensor | None, value: torch.Tensor) -> bool:
    return buffer is not None and not is_lazy(buffer) and buffer.shape != value.shape


def _makes_room_itself(module: LightningModule) -> bool:
    """True if a user's hook may add to a module what a checkpoint holds, before it is loaded."""
    return not module.on_load_checkpoint.__module__.startswith(OF_LIGHTNING)
