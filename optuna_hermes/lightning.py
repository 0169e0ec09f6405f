"""Suspend and resume a Lightning training between any two batches."""

from __future__ import annotations

from typing import Any, Literal

from optuna_hermes._lightning._callbacks import (
    expect_suspension,
    move_before_checkpoints,
    search_of,
)
from optuna_hermes._lightning._early_setups import watch_checkpoints, watch_configurations
from optuna_hermes._lightning._launches import watch_launches
from optuna_hermes._lightning._loggers import leave_open, watch_versions
from optuna_hermes._lightning._namespace import (
    AnyCallback,
    Callback,
    LightningModule,
    Trainer,
    refuse_unsupported,
)
from optuna_hermes._lightning_fits import FitLoop
from optuna_hermes.errors import InvalidInputError, Suspended
from optuna_hermes.suspend import Session

refuse_unsupported()


class HermesCallback(AnyCallback):
    """Reports a trial after each validation, and lets other trials have its device between batches.

    Under ``optuna_hermes.optimize`` the trial is suspended when its slice is over and resumed later
    with the same losses and weights as if nothing had happened, in this process or in another one.
    Under plain Optuna the callback reports to the trial and asks the study's pruner.

    Args:
        trial: the ``optuna.Trial`` that trains; None for a training of no study.
        monitor: name of a logged metric. If validation logs it, every validation is one unit of
            the trial; otherwise every epoch of training is.
        elastic_batch: the smallest and the largest number of samples in a batch, between which a
            policy may change it from one slice to the next; None for the loader's own. The rest
            of an epoch then comes in batches of another size. A batch size that is a parameter of
            the trial never changes.
        batch_scaling: what changes with the batch size. ``linear`` and ``sqrt``: learning rates,
            by the quotient of the sizes or its root. ``accumulate``: the number of batches in a
            step, so that a step has as many samples as before.
        max_devices: most devices that a policy may give the trial for a slice; None for always
            one. The Trainer must be made with ``trainer_options``. Devices share each batch of
            the loader, so that a step has as many samples on any number of them.

    Raises:
        MonitorError: in training, when the metric was not logged, or not for all devices.
        InvalidInputError: invalid elastic limits, or both kinds of them; in training, batch sizes
            or devices that cannot change.

    Example:
        ```python
        def objective(trial):
            model = Net(lr=trial.suggest_float("lr", 1e-5, 1e-1, log=True))
            hermes = HermesCallback(trial, monitor="val_loss")
            L.Trainer(max_epochs=30, callbacks=[hermes]).fit(model, data)
            return hermes.value
        ```
    """

    def __init__(
        self,
        trial: Any,
        monitor: str,
        *,
        elastic_batch: tuple[int, int] | None = None,
        batch_scaling: Literal["linear", "sqrt", "accumulate"] = "linear",
        max_devices: int | None = None,
        _session: Session | None = None,
    ) -> None:
        watch_launches(_loop_of)
        watch_checkpoints(_set_up_early)
        watch_configurations(_set_up_early)
        watch_versions()
        if elastic_batch is not None and max_devices is not None:
            raise InvalidInputError(
                "A trial may have elastic_batch or max_devices but was given both: choose one."
            )
        self._is_set_up = False
        self._loop = FitLoop(trial, monitor, _session)
        if max_devices is not None:
            from optuna_hermes._lightning._devices import ElasticDevices

            self._loop.use_elastic_devices(ElasticDevices(max_devices, self._loop.name))
        if elastic_batch is not None:
            from optuna_hermes._lightning._elastic import ElasticBatch  # lazy: few trials need it

            self._loop.elastic = ElasticBatch(elastic_batch, batch_scaling, self._loop.name)

    @property
    def value(self) -> float | None:
        """The last value of the monitored metric."""
        return self._loop.value

    @property
    def devices(self) -> int:
        """Number of devices that the trial has in this process; 1 without ``optimize``."""
        return self._loop.n_devices

    @property
    def trainer_options(self) -> dict[str, Any]:
        """``Trainer`` arguments for the devices that the trial has in this process.

        These are ``accelerator``, ``devices`` and ``strategy``.
        """
        ids = self._loop.device_ids
        # One that is set up before it has a device will have a CPU slot.
        kind = "auto" if ids is None else "cpu"
        if ids and not all(id_.startswith("cpu:") for id_ in ids):
            kind = "gpu"
        return {
            "accelerator": kind,
            "devices": self.devices,
            "strategy": "ddp_fork" if self.devices > 1 else "auto",
        }

    # -- Lightning's hooks ---------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the trial's session, and make ``fit`` resume from its newest checkpoint."""
        early, self._is_set_up = self._is_set_up, False
        if stage != "fit" or early:
            return
        move_before_checkpoints(trainer, self)
        finder = search_of(trainer)
        if finder is None:
            self._loop.set_up(trainer)
        else:
            self._loop.set_up_search(trainer, finder, self.state_key)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the attributes that hooks before the first batch may change."""
        self._loop.fit_starts()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare for checkpoints, and hook in between batches."""
        self._loop.begin_batches(self)

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Measure the time of a batch, if its size or the number of devices may change."""
        if self._loop.elastic is not None:
            self._loop.elastic.batch_ended()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember the start of a validation."""
        self._loop.begin_validation()

    def on_validation_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Report a long validation as progress, and yield within it if asked to."""
        if not trainer.sanity_checking:
            self._loop.within_validation()

    def on_test_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Report a long test as progress."""
        self._loop.beat()

    def on_predict_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Report a long prediction as progress."""
        self._loop.beat()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report a unit, if this validation logged the metric."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        if self._loop.units.validated(trainer):
            self._loop.report_unit(trainer)
        else:
            self._loop.report_no_unit()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember that the epoch is to be reported: the module may still log metrics of it."""
        self._loop.units.epoch_ended()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the epoch before this one, if it is a unit."""
        if self._loop.units.epoch_done(trainer, last=False):
            self._loop.report_unit(trainer)
        elif not self._loop.units.by_validation:
            self._loop.report_no_unit()
        if self._loop.elastic is not None:
            self._loop.elastic.begin_epoch()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the last epoch, if it is a unit."""
        if self._loop.units.epoch_done(trainer, last=True):
            self._loop.report_unit(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Remove all hooks from the trainer."""
        # A trial whose process is told to end goes on in another one, too.
        if isinstance(exception, Suspended) or (self._loop.leased() and trainer.received_sigterm):
            leave_open(trainer)
        if isinstance(exception, Suspended):
            expect_suspension(trainer)
        self._is_set_up = False  # its turn may not have come
        self._loop.leave()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove all hooks from the trainer."""
        self._loop.leave()

    def state_dict(self) -> dict[str, Any]:
        """The number of reported units, the last value, and what searches have found."""
        return self._loop.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count on from a checkpoint with which a fit begins."""
        if self._loop.counts_on:
            self._loop.load_state_dict(state_dict)


def _loop_of(trainer: Trainer | None) -> FitLoop | None:
    callbacks = getattr(trainer, "callbacks", [])
    return next((each._loop for each in callbacks if isinstance(each, HermesCallback)), None)


def _set_up_early(before: Callback, trainer: Trainer, pl_module: LightningModule) -> bool:
    """Set a trainer's callback up for a fit before its turn; True if its trial goes on."""
    callbacks: list[Any] = getattr(trainer, "callbacks", [])
    hermes = next((each for each in callbacks if isinstance(each, HermesCallback)), None)
    if hermes is None:
        return False
    # A callback that another one has made and calls is not among the trainer's.
    earlier = before in callbacks[: callbacks.index(hermes)]
    if earlier and not hermes._is_set_up:
        hermes.setup(trainer, pl_module, "fit")
        hermes._is_set_up = True
    return hermes._loop.goes_on
