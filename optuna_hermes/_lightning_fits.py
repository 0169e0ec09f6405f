"""A trial's fits under Lightning, in its only process or in several ranks."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

from optuna_hermes._lightning._callbacks import found_by, skip_search, tunes
from optuna_hermes._lightning._checkpoints import Checkpoints, merged
from optuna_hermes._lightning._clocks import parked
from optuna_hermes._lightning._fit_loaders import why_not_storable
from optuna_hermes._lightning._launches import refused_strategy, sharded_strategy
from optuna_hermes._lightning._loggers import own_root
from optuna_hermes._lightning._loops import go_on_within_epoch
from optuna_hermes._lightning._namespace import Callback, Trainer
from optuna_hermes._lightning._requeue import switch_requeueing_off
from optuna_hermes._lightning._trainer_hooks import TrainerHooks, clean, roots
from optuna_hermes._lightning._units import Units
from optuna_hermes._lightning._unsaved import ADVICE, OF_DATA
from optuna_hermes.cooperative import CooperativeLoop, session_of
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import Checkpoint
from optuna_hermes.suspend import Session
from optuna_hermes.suspend._loaders._sampler import ResumableSampler
from optuna_hermes.suspend._loaders._wrapped import replay_of
from optuna_hermes.suspend._modules._parts import why_not_loadable
from optuna_hermes.suspend._tiers._disk import why_unwritable
from optuna_hermes.suspend._tiers._saver import Saver, warn_of_inexact

if TYPE_CHECKING:
    from optuna_hermes._lightning._devices import ElasticDevices
    from optuna_hermes._lightning._elastic import ElasticBatch
    from optuna_hermes.suspend._ranks._parent import Ranks
    from optuna_hermes.suspend._ranks._rank import Rank

_LONG_VALIDATION_SECONDS = 5.0
"""A validation that has taken this long may be interrupted; the trial then waits in memory only.
"""

log = logging.getLogger(__name__)


class _Fits:
    """The fits of one trial, each of which may have its own callback."""

    def __init__(self) -> None:
        self.count = 0
        self.units = 0
        """Units that all of them have reported."""
        self.searches: list[dict[str, Any]] = []
        """The settings that searches have found, each in a fit of its own that is not counted."""
        self.found: tuple[Checkpoint, Any] | None = None
        """The checkpoint that was read for a search before the first fit."""
        self.loop: weakref.ref[FitLoop] | None = None
        """The loop of the last one."""


_fits: dict[int, _Fits] = {}
"""Fits by the ``id`` of a session, or of a trial without one: a ``FrozenTrial`` has no hash."""


def _fits_of(owner: Any) -> _Fits:
    if id(owner) not in _fits:
        _fits[id(owner)] = _Fits()
        weakref.finalize(owner, _fits.pop, id(owner))
    return _fits[id(owner)]


class FitLoop(CooperativeLoop):
    """The batches of a callback's fits, in the trial's only process or in one of its ranks."""

    maker = "HermesCallback()"
    remedy = ADVICE
    _begins_late = True

    def __init__(self, trial: Any, monitor: str, session: Session | None) -> None:
        super().__init__(trial, {})
        self.name = self._name
        self.units = Units(monitor, self._name)
        self.elastic: ElasticBatch | ElasticDevices | None = None
        self._session = session
        self._monitored = f"{monitor}="
        self._fits = _Fits()
        self._number = 0
        self._search: tuple[_Fits, Callback] | None = None
        self._trainer: Trainer | None = None
        self._hooks: TrainerHooks | None = None
        self._rank: Rank | None = None
        self._elastic_devices: ElasticDevices | None = None
        self._checkpoints = Checkpoints(self._name)
        self._validating_since = -math.inf
        self._leave_out_wait: Callable[[], None] | None = None

    @property
    def goes_on(self) -> bool:
        """True if the fit goes on from a checkpoint, before its first batch."""
        return self._checkpoints.loaded

    @property
    def counts_on(self) -> bool:
        """True if the state of a checkpoint that is loaded now is that of this fit.

        A test, or another fit, may load the weights of an earlier epoch.
        """
        if self._search is not None or self.goes_on:
            return True
        return self._trainer is not None and not self._unit

    @property
    def _fit(self) -> TrainerHooks:
        """The hooks of the present fit; there are some where the trial has a session."""
        assert self._hooks is not None
        return self._hooks

    def use_elastic_devices(self, devices: ElasticDevices) -> None:
        self.elastic = self._elastic_devices = self._checkpoints.elastic_devices = devices

    @property
    def device_ids(self) -> tuple[str, ...] | None:
        """Ids of the trial's devices, empty if it has none yet; None if they are not known."""
        # A rank that was started by ``spawn`` has no trial to ask for a session.
        session = self._rank or self._session or session_of(self._trial)
        return None if session is None else session.devices

    @property
    def n_devices(self) -> int:
        """Number of the trial's devices, 1 if they are not known."""
        return max(1, len(self.device_ids or ()))

    # -- around a fit --------------------------------------------------------------------------

    def set_up(self, trainer: Trainer) -> None:
        """Begin a fit in this process, and make it resume from the newest checkpoint."""
        if self._rank is None:
            self._begin_fit()
        self._trainer = trainer
        session = self._session
        if session is None:
            return
        if trainer.world_size > 1 and self._rank is None:
            raise refused_strategy(trainer.strategy)
        if trainer.strategy.restore_checkpoint_after_setup:  # of FSDP, DeepSpeed, and their like
            raise sharded_strategy(trainer.strategy)
        replay: Callable[..., ResumableSampler] | None
        replay = replay_of if self._has_checkpoints else None
        if self.elastic is not None:
            replay = functools.partial(self.elastic.replay, trainer)
        switch_requeueing_off(trainer, session.checkpoint_dir)
        self._hooks = hooks = TrainerHooks(trainer, self._name, replay)
        if self._elastic_devices is not None:
            self._elastic_devices.prepare(trainer, hooks, self.n_devices)
        self._checkpoints.resume(hooks, self._rank)
        if session.checkpoint_dir is not None and why_unwritable(session.checkpoint_dir) is None:
            own_root(trainer, session.checkpoint_dir)

    def set_up_search(self, trainer: Trainer, finder: Callback, key: str) -> None:
        """Let a search of Lightning's ``Tuner`` take what it found in an earlier process.

        Args:
            finder: the callback that searches; it ends the fit before the first batch.
            key: ``state_key`` of this trial's ``HermesCallback``.
        """
        session = self._session or session_of(self._trial)
        if session is None or self._rank is not None:
            return
        fits = _fits_of(session)
        if not fits.count and fits.found is None:
            fits.found = self._find(session)
        callbacks = {} if fits.found is None else fits.found[1]["callbacks"]
        saved = callbacks.get(key, {}).get("searches", [])
        number = len(fits.searches)
        if number < len(saved):
            skip_search(trainer, finder, saved[number])
        self._search = fits, finder

    def _begin_fit(self) -> None:
        """Take the session, and count on from the fits before this one.

        Raises:
            InvalidInputError: another callback is in a fit of this trial.
        """
        session = self._session or session_of(self._trial)
        fits = self._fits = _fits_of(session or self._trial)
        other = fits.loop() if fits.loop is not None else None
        if other is not None and other is not self and other._trainer is not None:
            raise InvalidInputError(
                f"{self._name.capitalize()} has more than one HermesCallback in one Trainer: leave "
                "all but one out."
            )
        if other is not None and other is not self:
            other._fits = _Fits()  # it may still load a checkpoint, which must not count here
        if fits.count:
            self._unit = fits.units
        # Weak: a loop leads to its session and trial, whose fits are in ``_fits``.
        fits.loop, fits.units = weakref.ref(self), self._unit
        fits.count += 1
        self._number = fits.count
        self._claim(session)

    def _check_single(self, session: Session) -> None:
        # A trial may have several fits, which ``_begin_fit`` counts.
        self._check_kind(session)

    def _resume(self, session: Session) -> None:
        # Only the first fit of a trial is ever stored.
        found = (self._fits.found or self._find(session)) if self._number == 1 else None
        self._fits.found = None
        self._checkpoints.begin(found)

    def fit_starts(self) -> None:
        """Note attributes before a fit's sanity check and its first epoch."""
        if self._hooks is not None:
            # A resumed fit does not have their hooks called again, and would lack what they
            # change. Data modules change where loaders are made, which the next process does again.
            self._hooks.unsaved.start(but=OF_DATA)

    def begin_batches(self, callback: Callback) -> None:
        """Hook in between batches, and prepare for checkpoints; for ``on_train_start``."""
        hooks = self._hooks
        if hooks is None:
            return
        trainer, module = hooks.trainer, hooks.trainer.lightning_module
        self._begun, self._busy = False, True
        if hooks.lacks_models and self._session is not None and trainer.is_global_zero:
            reason = "models that its ModelCheckpoint has saved are gone; its log names the folder"
            warn_of_inexact(self._name, self._session.checkpoint_dir, {"models": reason})
        problem = why_not_storable(trainer)
        if problem is None and module.strict_loading:
            problem = why_not_loadable("its module", module)
        if self._number > 1:
            problem = "the objective calls fit more than once"
        self.begin(problem)
        if self._rank is not None and self.can_store and trainer.is_global_zero:
            from optuna_hermes._lightning._ddp import why_not_exact

            inexact = why_not_exact(trainer)
            if inexact is not None:
                log.warning("%s may differ in the last bits: %s.", self._name.capitalize(), inexact)
        if self.elastic is not None:
            if self._number > 1:
                raise self.elastic.refused("the objective calls fit more than once")
            self.elastic.begin(trainer, hooks, getattr(self._trial, "params", {}))
        if self._checkpoints.loaded:
            go_on_within_epoch(trainer, hooks.override)  # a validation that was due is done
            self._checkpoints.pass_over(hooks)
        hooks.between_batches(functools.partial(self._between_batches, callback))

    def _restore(self) -> None:
        self._checkpoints.restore(self._fit)

    def state_dict(self) -> dict[str, Any]:
        """The number of reported units, the last value, and what searches have found."""
        return {
            "unit": self._unit,
            "value": self.value,
            "by_validation": self.units.by_validation,
            "searches": list(self._fits.searches),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._unit = self._fits.units = state["unit"]
        self.value, self.units.by_validation = state["value"], state["by_validation"]

    def leave(self) -> None:
        """See ``CooperativeLoop``; the hooks are removed, too."""
        super().leave()
        if self._hooks is not None:
            self._hooks.remove()
        if self._search is not None:
            fits, finder = self._search
            fits.searches.append(found_by([finder]))
        self._checkpoints.leave()
        self._hooks = self._trainer = self._saver = self._leave_out_wait = self._search = None

    # -- units ---------------------------------------------------------------------------------

    def report_unit(self, trainer: Trainer) -> None:
        """Report the metric's present value.

        Raises:
            MonitorError: each of several devices has a value of its own.
            TrialPruned: the study's pruner prunes the trial.
        """
        several_devices = self._elastic_devices is not None and self._rank is not None
        self.report(self.units.read(trainer, several_devices=several_devices))

    def report_no_unit(self) -> None:
        """Let the other ranks know that this validation or epoch is no unit in this one."""
        if self._rank is not None:
            self._rank.reported(self._unit, None)

    def _count(self, value: float) -> float:
        value = super()._count(value)
        self._fits.units = self._unit
        return value

    def _report_to_all(self, value: float) -> bool:
        if self._rank is not None:
            return self._rank.reported(self._unit, value)
        return super()._report_to_all(value)

    def units_left(self) -> int | None:
        # The process that starts the ranks has no trainer in a fit; further fits may come.
        if self._trainer is None or self._number > 1:
            return None
        return self.units.left(self._trainer, self._unit)

    # -- between two batches -------------------------------------------------------------------

    def _between_batches(self, callback: Callback) -> None:
        if tunes(self._trainer, callback):
            return
        if self._rank is not None:
            self._rank.pass_point()
        self.switch_point()
        session, elastic = self._session, self.elastic
        if elastic is not None and session is not None and elastic.follow(session.batch_size):
            self._report_sizes(session)

    def waits_for_next_point(self) -> bool:
        # Ranks stop at the same batch only where they have just synchronised their gradients.
        waits = self.can_store or self._rank is not None
        return waits and not clean(self._fit.trainer)

    def can_store_here(self) -> bool:
        whole = (
            self._fit.loaders.can_store_here()
            and not self._has_other_parts()
            and not self._has_unmade(self._fit.unsaved.unmade())
        )
        if self._rank is not None:
            self._rank.can_store, whole = whole, True
        return whole

    def saves_now(self, saver: Saver) -> bool:
        return self._rank is None or self._rank.all_can_store(self._unit)

    def pause_seconds(self, save_seconds: float) -> float:
        # All ranks must save the same units, and each takes another time.
        return super().pause_seconds(save_seconds) if self._rank is None else 0.0

    def inexact(self) -> str | None:
        return self._fit.loaders.random_warning()

    def _lost(self) -> list[str]:
        return self._fit.unsaved.lost

    def _has_other_parts(self) -> bool:
        """True if a checkpoint would not fit what the next process makes, said once."""
        changed = self._fit.shape.changed()
        if changed is not None:
            self.warn_of_shape(
                changed,
                "parameters, buffers, dtypes, layers, tied parts or callbacks than at the fit's "
                "beginning",
                " An on_load_checkpoint of the module's own may make them again.",
            )
        return changed is not None

    def begin_validation(self) -> None:
        """Note the time at which a validation begins."""
        self._validating_since = time.monotonic()
        if self.elastic is not None:
            self.elastic.watch.interrupted()

    def within_validation(self) -> None:
        """Report progress, and yield the device to a trial that waits in memory."""
        session = self._session
        self.beat()
        if session is None or self._hooks is None:
            return
        # Lightning cannot resume within a validation: a trial asked to disk first completes it.
        if not session.must_yield or session.requested_tier == "disk":
            return
        if time.monotonic() - self._validating_since >= _LONG_VALIDATION_SECONDS:
            self._park(session, can_store=False)

    def _park(self, session: Session, *, can_store: bool) -> None:
        if self.elastic is not None:
            self.elastic.watch.interrupted()
        with parked(self._fit.trainer) as self._leave_out_wait:
            super()._park(session, can_store=can_store)
        self._leave_out_wait = None

    def roots(self) -> Iterable[object]:
        return roots(self._fit.trainer)

    def ended(self) -> bool:
        # Lightning's handler only notes the signal, and does so in the main thread only.
        return self._fit.trainer.received_sigterm

    def _dump(self, rng: dict[str, Any]) -> dict[str, Any]:
        if self._leave_out_wait is not None:  # the clocks in the state must not count the wait
            self._leave_out_wait()
        return self._checkpoints.dump(self._fit, rng, self._rank)

    def _train(self, session: Session, *, late: bool = False) -> None:
        super()._train(session, late=late)
        self._report_sizes(session)

    def _beat(self, session: Session) -> None:
        if self._hooks is None:  # in a test or a prediction, with whatever memory
            session.beat(None)
            return
        super()._beat(session)
        self._report_sizes(session)

    def _report_sizes(self, session: Session) -> None:
        if self.elastic is None:
            return
        sizes = self.elastic.sizes(self.units)
        if sizes is not None:
            session.report_sizes(sizes)

    # -- several processes: see ``_lightning/_ddp.py`` ------------------------------------------

    def leased(self) -> bool:
        return (self._session or session_of(self._trial)) is not None

    @contextlib.contextmanager
    def ranks(self, count: int, context: Any) -> Iterator[Ranks]:
        """Listen to the processes of this trial, which are started within."""
        from optuna_hermes.suspend._ranks._parent import Ranks

        self._begin_fit()
        session = self._session
        if session is not None and self._elastic_devices is not None:
            self._elastic_devices.check(count, self.n_devices)
            self._elastic_devices.settle()
        elif session is not None and self.elastic is not None:
            raise self.elastic.refused("it trains in several processes")
        self._saver = None if session is None else self._new_saver(session)
        ranks = Ranks(
            count,
            context,
            trial=self._name,
            session=session,
            all_started=self._checkpoints.forget,
            report=self._report_for_ranks,
            save=None if self._saver is None else self._saver.begin,
            settle=self._settle,
            merge=merged,
        )
        try:
            yield ranks
        finally:
            ranks.close()
            self.leave()
            # The parent has trained nothing itself, but users read ``value`` from its callback.
            if ranks.end is not None:
                self.load_state_dict(ranks.end)

    def _report_for_ranks(self, unit: int, value: float) -> bool:
        self._unit, self.value = unit, value
        prunes = self._report_to_all(value)
        if self._session is not None:
            self._session.wait_for_decision()
        return prunes

    def be_rank(self, rank: Rank) -> None:
        # A rank's ``copy`` sends its part of a checkpoint to the process that has a ``Saver``.
        self._rank, self._saver = rank, cast(Saver, rank)
        self._session = rank if rank.leased else None

    def __getstate__(self) -> dict[str, Any]:
        # Ranks that are started by ``spawn`` get a copy; trial and session stay in the parent.
        left = {"_trial": None, "_session": None, "_saver": None, "_fits": _Fits()}
        return {**vars(self), **left}
