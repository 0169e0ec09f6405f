"""The parts of a module and of its optimizers, which a checkpoint fits."""

from __future__ import annotations

from dataclasses import replace

from optuna_hermes._lightning._module_hooks import loads
from optuna_hermes._lightning._namespace import BaseFinetuning, Trainer, callbacks_of
from optuna_hermes._lightning._pruning import without_masks, without_orig
from optuna_hermes.suspend._modules._parts import StateShape, changed, parts_of


class FitParts:
    """The parts of a module and of its optimizers, where their states are loaded.

    In a fit that begins without a checkpoint this is where they would be.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.weights = StateShape(sizes={})
        self._trainer = trainer
        self._optimizers: list[StateShape] = []
        self._first_callbacks = callbacks_of(trainer)
        self._callbacks: list[type] = []

    def note_weights(self) -> None:
        """Note the module's weights; right before they are loaded."""
        self.weights = parts_of(self._trainer.lightning_module)

    def note_optimizers(self) -> None:
        """Note the parameters of the optimizers; right before their states are loaded."""
        self._optimizers = [parts_of(each) for each in self._trainer.optimizers]

    def note_classes(self) -> None:
        """Note classes, dtypes and callbacks, after each process's own hooks."""
        module = self._trainer.lightning_module
        self.weights = self.weights.converted(self._unpruned(parts_of(module)))
        pairs = zip(self._optimizers, self._trainer.optimizers, strict=False)
        self._optimizers = [noted.converted(parts_of(each)) for noted, each in pairs]
        callbacks = callbacks_of(self._trainer)
        # A fit within this one, to find a learning rate, has only callbacks of its own.
        if all(each in callbacks for each in self._first_callbacks):
            self._callbacks = [type(each) for each in callbacks]

    def changed(self) -> str | None:
        """The name of what has other parts than the next process makes; None if nothing has."""
        trainer = self._trainer
        if [type(each) for each in callbacks_of(trainer)] != self._callbacks:
            return "its trainer"
        if loads(trainer.lightning_module):  # it may make these parts before weights are loaded
            return None
        first = {"its module": self.weights}
        now = {"its module": self._unpruned(parts_of(trainer.lightning_module))}
        if not callbacks_of(trainer, BaseFinetuning):  # it makes the groups again
            for number, (noted, each) in enumerate(
                zip(self._optimizers, trainer.optimizers, strict=False)
            ):
                name = f"its optimizer {number}"
                first[name], now[name] = noted, parts_of(each)
        return next(iter(changed(first, now)), None)

    def _unpruned(self, parts: StateShape) -> StateShape:
        # By the names that the next process has, where the module is not pruned yet.
        sizes, masks = without_masks(parts.sizes, self.weights.sizes.keys())
        return replace(
            parts,
            sizes=sizes,
            kinds=without_orig(parts.kinds, masks),
            ids=without_orig(parts.ids, masks),
        )
