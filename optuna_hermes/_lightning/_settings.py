"""Settings of a Trainer that hooks change in training: the one of the next process lacks them."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping
from typing import Any

from optuna_hermes._lightning._namespace import Trainer

LIMITS = (
    "fit_loop.max_epochs",
    "fit_loop.min_epochs",
    "fit_loop.epoch_loop.max_steps",
    "fit_loop.epoch_loop.min_steps",
)
"""Lightning compares these with the state of its loops before the first batch."""
SETTINGS = (
    *LIMITS,
    "check_val_every_n_epoch",
    "gradient_clip_algorithm",
    "gradient_clip_val",
    "limit_train_batches",
    "limit_val_batches",
    "log_every_n_steps",
    "reload_dataloaders_every_n_epochs",
    "val_check_interval",
)
OF_TRAINER = frozenset(
    {
        *SETTINGS,
        *("accumulate_grad_batches", "barebones", "callbacks", "datamodule"),
        *("enable_autolog_hparams", "fast_dev_run", "limit_predict_batches"),
        *("limit_test_batches", "num_sanity_val_steps", "overfit_batches"),
        *("should_stop", "val_check_batch"),
    }
)
"""Names of the plain values in attributes of every trainer, which are not for users to add."""


class TrainerSettings:
    """The settings of a trainer that have changed since its fit began.

    All others are the script's: it may have a larger ``max_epochs`` when a trial comes back.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.restored: Mapping[str, Any] = {}
        """Those of the checkpoint that the fit is resumed from."""
        self._trainer = trainer
        self._first: Mapping[str, Any] = {}

    def begin(self) -> None:
        """Note the first values, and restore the limits; after the hooks ``on_fit_start``."""
        self._first = self._present()
        self._set({name: self.restored[name] for name in LIMITS if name in self.restored})

    def changed(self) -> dict[str, Any]:
        """The settings that have changed, in this process or in an earlier one."""
        return {
            name: getattr(value, "value", value)  # Lightning takes an enumeration's values, too
            for name, value in self._present().items()
            if name in self.restored or _differ(value, self._first.get(name, value))
        }

    def restore(self) -> None:
        """Restore them; before the first fetch, when the loaders are made."""
        self._set(self.restored)

    @contextlib.contextmanager
    def earlier(self, changed: Mapping[str, Any]) -> Iterator[None]:
        """Within, have what ``changed`` returned at an earlier moment."""
        present = self._present()
        self._set(changed)
        try:
            yield
        finally:
            self._set(present)

    def _present(self) -> dict[str, Any]:
        # One that validates by the clock has no ``val_check_interval``.
        return {place: getattr(*self._owner(place), None) for place in SETTINGS}

    def _set(self, values: Mapping[str, Any]) -> None:
        for place, value in values.items():
            setattr(*self._owner(place), value)

    def _owner(self, place: str) -> tuple[Any, str]:
        """The owner of a setting, and its name there."""
        loop, _, name = place.rpartition(".")
        return operator.attrgetter(loop)(self._trainer) if loop else self._trainer, name


def _differ(value: Any, first: Any) -> bool:
    return type(value) is not type(first) or value != first  # 1 batch is not 1.0 of all
