"""The units after which a trial reports: its validations, or its epochs."""

from __future__ import annotations

import math
from fractions import Fraction

from optuna_hermes._lightning._namespace import Trainer
from optuna_hermes.errors import MonitorError


class Units:
    """Recognises the ends of a trial's units, and reads the value of each.

    If validations log the metric, every validation is a unit; otherwise every epoch is one.
    """

    def __init__(self, monitor: str, trial: str) -> None:
        self.monitor = monitor
        self.by_validation = False
        """True if each validation is a unit, else each epoch is one."""
        self._name = trial
        self._validated = False
        self._epoch_ended = False

    def validated(self, trainer: Trainer) -> bool:
        """Return True if a unit is done; for ``on_validation_end``."""
        self._validated = True
        if self.monitor in validated_names(trainer):
            self.by_validation = True
            return True
        return False

    def epoch_ended(self) -> None:
        # It is reported by the next hook: the module's own may still log metrics after this one.
        self._epoch_ended = True

    def epoch_done(self, trainer: Trainer, *, last: bool) -> bool:
        """Return True if the epoch that has ended is a unit; for the first hook after its end.

        Raises:
            MonitorError: the metric was not logged.
        """
        ended, self._epoch_ended = self._epoch_ended, False
        if not ended or self.by_validation:
            return False
        if self.monitor in trainer.callback_metrics:
            return True
        # No error before the first validation, which may be the one that logs it.
        if last or self._validated or not trainer.enable_validation:
            names = ", ".join(sorted(trainer.callback_metrics)) or "none"
            raise MonitorError(
                f"HermesCallback(monitor={self.monitor!r}) needs a metric of this name after the "
                f"first epoch, but the metrics logged are: {names}."
            )
        return False

    def read(self, trainer: Trainer, *, several_devices: bool) -> float:
        """The value of a unit that is done.

        Raises:
            MonitorError: each of several devices has a value of its own.
        """
        if several_devices and _unsynchronised(trainer, self.monitor):
            raise MonitorError(
                f"A metric that is compared must be that of all devices, but each of {self._name} "
                f"has a {self.monitor} of its own: log it with sync_dist=True."
            )
        return float(trainer.callback_metrics[self.monitor])

    def left(self, trainer: Trainer, done: int) -> int | None:
        """Units until ``max_epochs``, None if that cannot be known in advance."""
        epochs = trainer.max_epochs
        if epochs is None or epochs < 0 or trainer.max_steps >= 0:
            return None
        pace = self._pace(trainer)
        return None if pace is None else max(0, int(epochs // pace[0] * pace[1]) - done)

    def epochs_each(self, trainer: Trainer) -> float | None:
        """Epochs in a unit, on the average; None if that cannot be known in advance."""
        pace = self._pace(trainer)
        return None if pace is None else float(pace[0] / pace[1])

    def _pace(self, trainer: Trainer) -> tuple[Fraction, int] | None:
        """A number of epochs, and the units in them; None if that cannot be known in advance."""
        interval, batches = trainer.val_check_batch, trainer.num_training_batches
        every = trainer.check_val_every_n_epoch
        if not self.by_validation:
            return Fraction(1), 1
        if interval is None:  # they go by the clock
            return None
        # At the ends of epochs: then the interval is the number of batches, or infinity.
        if math.isinf(interval) or interval == batches:
            return Fraction(every or 1), 1
        if math.isinf(batches):
            return None
        if every is None:  # validations count batches across epochs
            return Fraction(int(interval), int(batches)), 1
        return Fraction(every), int(batches // interval)


def validated_names(trainer: Trainer) -> set[str]:
    """Names of the metrics logged by the validation that ends; for ``on_validation_end``."""
    results = trainer.fit_loop.epoch_loop.val_loop._results
    return {
        name
        for item in results.result_metrics
        if not item.has_reset and item.meta.on_epoch  # others have no value for the whole
        for name in results._forked_name(item, False)
    }


def _unsynchronised(trainer: Trainer, name: str) -> bool:
    """True if each process has its own value of a metric that was logged."""
    loop = trainer.fit_loop.epoch_loop
    return any(
        item.is_tensor and not item.meta.sync.should and name in results._forked_name(item, False)
        for results in (loop._results, loop.val_loop._results)
        for item in results.result_metrics
    )
