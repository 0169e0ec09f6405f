"""Suspend and resume a Lightning training between any two batches."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from optuna_hermes import _lightning
from optuna_hermes._lightning._namespace import (
    AnyCallback,
    LightningModule,
    Trainer,
    refuse_unsupported,
)
from optuna_hermes._optuna import (
    pruned,
    report,
    reported_steps,
    session_of,
    should_prune,
    sign,
)
from optuna_hermes.errors import (
    CheckpointError,
    HermesError,
    InvalidInputError,
    Suspended,
)
from optuna_hermes.suspend import Session, kept_rng, rng_state
from optuna_hermes.suspend import _supported as _supported
from optuna_hermes.suspend._disk import why_unwritable
from optuna_hermes.suspend._rank import Rank
from optuna_hermes.suspend._ranks import Ranks
from optuna_hermes.suspend._saver import Saver
from optuna_hermes.suspend._state import captured_graphs
from optuna_hermes.suspend._storages import Gauge

if TYPE_CHECKING:
    from optuna_hermes._lightning._devices import ElasticDevices
    from optuna_hermes._lightning._elastic import ElasticBatch

refuse_unsupported()

_BEAT_SECONDS = 1.0
_LONG_VALIDATION_SECONDS = 5.0
"""A validation that has taken this long may be interrupted; the trial then waits in memory only.
"""

log = logging.getLogger(__name__)


class _Fits:
    """The fits of one trial, each of which may have its own callback."""

    def __init__(self) -> None:
        self.count = 0
        self.units: _lightning.Units | None = None
        """Units of the last callback."""
        self.callback: weakref.ref[HermesCallback] | None = None


_fits: weakref.WeakKeyDictionary[Any, _Fits] = weakref.WeakKeyDictionary()
"""Fits by session, or by trial if it has no session."""


class HermesCallback(AnyCallback):
    """Reports a trial after each validation, and lets other trials have its device between batches.

    Under ``optuna_hermes.optimize`` the trial is suspended when its slice is over and resumed later
    with the same losses and weights as if nothing had happened, in this process or in another one.
    Under plain Optuna the callback reports to the trial and asks the study's pruner.

    Args:
        trial: the ``optuna.Trial`` that trains.
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
        _lightning.watch_launches(HermesCallback)
        self._trial = trial
        self._session = _session
        self._run = f"trial {getattr(trial, 'number', '?')}"
        self._units = _lightning.Units(monitor, self._run)
        self._reported: frozenset[int] = frozenset()
        self._fits = 0
        self._trainer: Trainer | None = None
        self._wiring: _lightning.Wiring | None = None
        self._stores = False
        self._begun = False
        self._warned = False
        self._unsaved = False
        self._saver: Saver | Rank | None = None
        self._rank: Rank | None = None
        self._validating_since = -math.inf
        self._gauge = Gauge()
        self._busy = True
        self._next_beat = -math.inf
        self._elastic: ElasticBatch | ElasticDevices | None = None
        self._spreads: ElasticDevices | None = None
        if elastic_batch is not None and max_devices is not None:
            raise InvalidInputError(
                "A run may have elastic_batch or max_devices but was given both: choose one."
            )
        if max_devices is not None:
            from optuna_hermes._lightning._devices import ElasticDevices

            self._elastic = self._spreads = ElasticDevices(max_devices, self._run)
        if elastic_batch is not None:
            from optuna_hermes._lightning._elastic import ElasticBatch  # lazy: few trials need it

            self._elastic = ElasticBatch(elastic_batch, batch_scaling, self._run)
        self._checkpoints = _lightning.Checkpoints(self._run, self._spreads)

    @property
    def value(self) -> float | None:
        """The last value of the monitored metric."""
        return self._units.value

    @property
    def devices(self) -> int:
        """Number of devices that the trial has in this process; 1 without ``optimize``."""
        session = self._rank or self._session or session_of(self._trial)
        return 1 if session is None else max(1, len(session.devices))

    @property
    def trainer_options(self) -> dict[str, Any]:
        """``Trainer`` arguments for the devices that the trial has in this process.

        These are ``accelerator``, ``devices`` and ``strategy``.
        """
        session = self._session or session_of(self._trial)
        ids = () if session is None else session.devices
        on_cpu = all(id_.startswith("cpu:") for id_ in ids)
        return {
            "accelerator": ("cpu" if on_cpu else "gpu") if ids else "auto",
            "devices": self.devices,
            "strategy": "ddp_fork" if self.devices > 1 else "auto",
        }

    # -- Lightning's hooks ---------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the trial's session, and make ``fit`` resume from its newest checkpoint."""
        if stage != "fit":
            return
        if self._rank is None:
            self._take_session()
        self._trainer = trainer
        session = self._session
        if session is None:
            return
        if trainer.world_size > 1 and self._rank is None:
            raise _lightning.refused_strategy(trainer.strategy)
        self._trainer = trainer
        self._wiring = _lightning.Wiring(trainer, self._run, *self._replays(trainer))
        if self._spreads is not None:
            self._spreads.prepare(trainer, self._wiring, self.devices)
        self._checkpoints.resume(trainer, self._wiring, self._rank)
        if session.checkpoint_dir is not None and why_unwritable(session.checkpoint_dir) is None:
            _lightning.own_root(trainer, session.checkpoint_dir)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare for checkpoints, and hook in between batches."""
        session, wiring = self._session, self._wiring
        if session is None or wiring is None:
            return
        reason = self._why_not_stored(trainer, session)
        if reason is not None:
            log.info("The run of %s can only wait in memory: %s.", self._run, reason)
        self._stores = reason is None
        self._saver = (self._rank or Saver(session, self._run)) if self._stores else None
        inexact = _lightning.why_not_exact(trainer)
        if self._stores and inexact is not None and trainer.is_global_zero:
            log.warning("The run of %s may differ in the last bits: %s.", self._run, inexact)
        if self._elastic is not None:
            self._begin_elastic(self._elastic, trainer, wiring)
        self._begun = False
        self._busy = True
        if self._checkpoints.loaded:
            wiring.skip_finished_validation()
            self._checkpoints.pass_over(trainer, wiring)
        wiring.between_batches(self._between_batches)

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Measure the time of a batch, if its size or the number of devices may change."""
        if self._elastic is not None:
            self._elastic.batch_ended()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember the start of a validation."""
        self._validating_since = time.monotonic()
        if self._elastic is not None:
            self._elastic.interrupted()

    def on_validation_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Report a long validation as progress, and yield within it if asked to."""
        session = self._session
        if session is None or self._wiring is None or trainer.sanity_checking:
            return
        self._beat(session)
        if not session.must_yield or session.asked == "disk":
            return
        if time.monotonic() - self._validating_since >= _LONG_VALIDATION_SECONDS:
            self._park(trainer, session, stores=False)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report a unit, if this validation logged the metric."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        if self._units.validated(trainer):
            self._report(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember that the epoch is to be reported: the module may still log metrics of it."""
        self._units.epoch_ended()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the epoch before this one, if it is a unit."""
        if self._units.epoch_done(trainer, last=False):
            self._report(trainer)
        if self._elastic is not None:
            self._elastic.begin_epoch()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the last epoch, if it is a unit."""
        if self._units.epoch_done(trainer, last=True):
            self._report(trainer)
        _lightning.release_loggers(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Remove all hooks from the trainer."""
        if isinstance(exception, Suspended):
            _lightning.expect_suspension(trainer)
        elif isinstance(exception, Exception) and not isinstance(exception, HermesError):
            _lightning.release_loggers(trainer)  # the trial is over
        self._leave()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove all hooks from the trainer."""
        self._leave()

    def state_dict(self) -> dict[str, Any]:
        """The number of reported units, and the last value."""
        return self._units.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count on from a checkpoint."""
        self._units.load_state_dict(state_dict)

    # -- units ---------------------------------------------------------------------------------

    def _report(self, trainer: Trainer) -> None:
        rank, units = self._rank, self._units
        value = units.take(trainer, spread=self._spreads is not None and rank is not None)
        self._busy = self._unsaved = True
        if rank is not None:
            prunes = rank.reported(units.done, value)
        else:
            known = self._session is not None and self._fits == 1
            prunes = self._say(units.done, value, units.left(trainer) if known else None)
        if prunes:
            raise pruned(f"Pruned after unit {units.done} at {units.monitor}={value}.")

    def _say(self, unit: int, value: float, units_left: int | None = None) -> bool:
        """Report to Optuna and the broker; return True if the trial is pruned."""
        if unit not in self._reported:  # after a crash a unit may be trained again
            report(self._trial, value, unit)
        if self._session is not None:
            value = sign(self._trial) * value
            self._session.report(unit=unit, step=unit, value=value, units_left=units_left)
        return should_prune(self._trial)

    # -- between two batches -------------------------------------------------------------------

    def _between_batches(self) -> None:
        session = self._session
        if _lightning.tunes(self._trainer, self):
            return
        if self._rank is not None:
            self._rank.pass_point()
        if self._busy or session.must_yield:  # type: ignore[union-attr]  # there is one here
            self._attend()
        if self._elastic is not None:
            self._follow(self._elastic, session)  # type: ignore[arg-type]
        if time.monotonic() >= self._next_beat:
            self._beat(session)  # type: ignore[arg-type]

    def _attend(self) -> None:
        trainer, session, wiring = self._trainer, self._session, self._wiring
        assert trainer is not None
        assert session is not None
        assert wiring is not None
        if not self._begun:
            self._begun = True
            self._checkpoints.restore(trainer, wiring)
            self._trains(session)
        saver = self._saver
        if saver is not None:
            saver.finish(wait=False)
        # Ranks stop at the same batch only where they have just synchronised their gradients.
        if (self._stores or self._rank is not None) and not _lightning.clean(trainer):
            return
        here = self._stores and wiring.stores_here()
        if session.must_yield:
            self._park(trainer, session, stores=here)
        if self._unsaved and saver is not None and here:
            saver.begin(self._dump(rng_state()), units=self._units.done)
            self._unsaved = False
        self._busy = saver is not None and (saver.busy or self._unsaved)

    def _park(self, trainer: Trainer, session: Session, *, stores: bool) -> None:
        self._warn_of_random_workers()
        if self._elastic is not None:
            self._elastic.interrupted()
        with _lightning.parked(trainer) as leave_out_wait, kept_rng() as rng:
            session.park(_FitState(self, trainer, rng, leave_out_wait, stores=stores))
        if self._saver is not None and self._saver.behind:
            self._busy = self._unsaved = True
        self._trains(session)

    def _trains(self, session: Session) -> None:
        session.training(stores=self._stores)
        self._tell_sizes(session)

    def _beat(self, session: Session) -> None:
        now = time.monotonic()
        if now < self._next_beat:
            return
        trainer = self._trainer
        assert trainer is not None
        self._next_beat = now + _BEAT_SECONDS
        self._warn_of_random_workers()
        session.beat(_lightning.batches_done(trainer), self._gauge.read(_lightning.roots(trainer)))
        self._tell_sizes(session)

    def _warn_of_random_workers(self) -> None:
        if self._warned or not self._stores or self._wiring is None:
            return
        warning = self._wiring.random_warning()
        if warning is not None:
            self._warned = True
            log.warning("%s", warning)

    # -- another batch size, or number of devices ----------------------------------------------

    def _replays(self, trainer: Trainer) -> tuple[Callable[..., Any], ...]:
        """Arguments that let the wiring use an elastic ``Replay`` for loaders, if there is one."""
        if self._elastic is None:
            return ()
        return (functools.partial(self._elastic.replay, trainer),)

    def _begin_elastic(
        self, elastic: ElasticBatch | ElasticDevices, trainer: Trainer, wiring: _lightning.Wiring
    ) -> None:
        if self._fits > 1:
            raise elastic.refused("the objective calls fit more than once")
        elastic.begin(trainer, wiring, getattr(self._trial, "params", {}))

    def _follow(self, elastic: ElasticBatch | ElasticDevices, session: Session) -> None:
        if elastic.follow(session.batch_size):
            self._tell_sizes(session)

    def _tell_sizes(self, session: Session) -> None:
        if self._elastic is None:
            return
        sizes = self._elastic.sizes(by_validation=self._units.by_validation)
        if sizes is not None:
            session.stretches(sizes)

    # -- checkpoints ---------------------------------------------------------------------------

    def _dump(self, rng: dict[str, Any]) -> dict[str, Any]:
        assert self._wiring is not None
        assert self._trainer is not None
        return self._checkpoints.dump(self._trainer, self._wiring, rng, self._rank)

    def _why_not_stored(self, trainer: Trainer, session: Session) -> str | None:
        if session.checkpoint_dir is None:
            return "it has no folder for checkpoints"
        if self._fits > 1:
            return "the objective calls fit more than once"
        return _lightning.why_not_storable(trainer)

    def _begin_fit(self) -> None:
        """Count on from the fits before this one.

        Raises:
            InvalidInputError: another callback is in a fit of this trial.
        """
        fits = _fits.setdefault(self._session or self._trial, _Fits())
        other = fits.callback() if fits.callback is not None else None
        if other is not None and other is not self and other._trainer is not None:
            raise InvalidInputError(
                f"{self._run.capitalize()} has more than one HermesCallback in one Trainer: leave "
                "all but one out."
            )
        if fits.units is not None:
            self._units.done = fits.units.done
        fits.units, fits.callback = self._units, weakref.ref(self)
        fits.count += 1
        self._fits = fits.count

    # -- several processes: see ``_lightning/_ddp.py`` ------------------------------------------

    def leased(self) -> bool:
        """True if the trial has a session."""
        return (self._session or session_of(self._trial)) is not None

    @contextlib.contextmanager
    def ranks(self, count: int, context: Any) -> Iterator[Ranks]:
        """Listen to the processes of this trial, which are started within."""
        self._take_session()
        session = self._session
        if session is not None and self._spreads is not None:
            self._spreads.check(count, self.devices)
            self._spreads.settle()
        elif session is not None and self._elastic is not None:
            raise self._elastic.refused("it trains in several processes")
        self._saver = None if session is None else Saver(session, self._run)
        ranks = Ranks(
            count,
            context,
            run=self._run,
            session=session,
            seated=self._checkpoints.forget,
            report=self._say,
            save=None if self._saver is None else self._saver.begin,
            merge=_lightning.merged,
        )
        try:
            yield ranks
        finally:
            ranks.close()
            self._leave()
            if ranks.end is not None:
                self.load_state_dict(ranks.end)

    def be_rank(self, rank: Rank) -> None:
        """Continue as a rank, in its own process."""
        self._rank, self._saver = rank, None
        self._session = rank if rank.leased else None

    def __getstate__(self) -> dict[str, Any]:
        # Ranks that are started by ``spawn`` get a copy; trial and session stay in the parent.
        return {**vars(self), "_trial": None, "_session": None, "_saver": None}

    def _take_session(self) -> None:
        session = self._session = self._session or session_of(self._trial)
        self._begin_fit()
        if session is not None:
            self._reported = reported_steps(self._trial)
            if self._fits == 1:
                self._checkpoints.find(session)
            else:
                self._checkpoints.forget()

    def _leave(self) -> None:
        try:
            if self._saver is not None:
                self._saver.finish(wait=True)
        except CheckpointError as error:
            log.warning("%s", error)  # only logged: the training is over, perhaps by a worse error
        if self._wiring is not None:
            self._wiring.remove()
        self._checkpoints.leave()
        self._wiring = self._trainer = self._saver = None


class _FitState:
    """A trial between two batches (``suspend.TrialState``)."""

    def __init__(
        self,
        callback: HermesCallback,
        trainer: Trainer,
        rng: dict[str, Any],
        leave_out_wait: Callable[[], None],
        *,
        stores: bool,
    ) -> None:
        self.name = callback._run
        self.units = callback._units.done
        self.stores = stores
        self.moves = not captured_graphs()
        self._callback = callback
        self._trainer = trainer
        self._rng = rng
        self._leave_out_wait = leave_out_wait

    def ended(self) -> bool:
        return _lightning.ended(self._trainer)

    def roots(self) -> Iterable[object]:
        return _lightning.roots(self._trainer)

    def dump(self) -> dict[str, Any]:
        if self._callback._saver is not None:
            self._callback._saver.finish(wait=True)  # files are numbered in the order of states
        self._leave_out_wait()
        return self._callback._dump(self._rng)
