"""The parts of a module, its objects with a state, and its optimizers, which a checkpoint fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from optuna_hermes._lightning._module import stateful
from optuna_hermes._lightning._module_hooks import loads
from optuna_hermes._lightning._namespace import BaseFinetuning, Trainer, callbacks_of
from optuna_hermes._lightning._pruning import without_masks
from optuna_hermes.suspend._named_objects import Parts, parts_of


class FitParts:
    """The parts of a module and of its optimizers, where their states are loaded.

    In a fit that begins without a checkpoint this is where they would be.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.weights = Parts(sizes={})
        self._trainer = trainer
        self._optimizers: list[Parts] = []
        self._stateful: dict[str, list[Any]] = {}

    def note_weights(self) -> None:
        """Note the module's weights; right before they are loaded."""
        self.weights = parts_of(self._trainer.lightning_module)

    def note_optimizers(self) -> None:
        """Note the parameters of the optimizers; right before their states are loaded."""
        self._optimizers = [parts_of(each) for each in self._trainer.optimizers]

    def note_stateful(self) -> None:
        """Note classes and objects with a state, after the hooks that each process calls."""
        module = self._trainer.lightning_module
        self.weights = replace(self.weights, kinds=parts_of(module).kinds)
        self._stateful = stateful(module)

    def changed(self) -> str | None:
        """The name of what has other parts than the next process makes; None if nothing has."""
        trainer = self._trainer
        if loads(trainer.lightning_module):  # it may make these parts before weights are loaded
            return None
        present = parts_of(trainer.lightning_module)
        unpruned, _ = without_masks(present.sizes, self.weights.sizes.keys())
        if not self.weights.fit(replace(present, sizes=unpruned)):
            return "its module"
        for attribute, kinds in stateful(trainer.lightning_module).items():
            if kinds != self._stateful.get(attribute):
                return f"{attribute} of its module"
        if callbacks_of(trainer, BaseFinetuning):  # it makes the groups again
            return None
        now = enumerate(zip(self._optimizers, trainer.optimizers, strict=False))
        return next(
            (f"its optimizer {i}" for i, (first, each) in now if not first.fit(parts_of(each))),
            None,
        )
