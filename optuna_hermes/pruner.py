"""``HermesPruner``, the pruner that suspends trials in place of stopping them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import optuna
from optuna.pruners import BasePruner, HyperbandPruner
from optuna.trial import FrozenTrial

from optuna_hermes import _optuna
from optuna_hermes.errors import UnsupportedPrunerError
from optuna_hermes.model import MOST_COUNT

if TYPE_CHECKING:
    from optuna_hermes.broker import TrialSession


class HermesPruner(BasePruner):
    """Pruner whose ``trial.should_prune()`` is the point where a trial may be suspended.

    The call reports the trial's last value to the broker and blocks while another trial has the
    device; then it returns the wrapped pruner's answer, or False if there is none.

    Args:
        wrapped: a pruner that may still stop trials for good; None for none.

    Raises:
        UnsupportedPrunerError: ``wrapped`` is a ``HyperbandPruner``.

    Example:
        >>> import optuna
        >>> from optuna_hermes import HermesPruner, HermesSampler
        >>> study = optuna.create_study(sampler=HermesSampler(), pruner=HermesPruner())
    """

    preempts = True
    """Mark for ``HermesSampler``: trials of this study take turns."""

    def __init__(self, wrapped: BasePruner | None = None) -> None:
        if isinstance(wrapped, HyperbandPruner):
            raise UnsupportedPrunerError(
                "HyperbandPruner cannot be wrapped: Optuna gives each bracket its own view of the "
                "study only if HyperbandPruner is the study's pruner itself. Wrap "
                "SuccessiveHalvingPruner, or use HermesPruner() alone."
            )
        self._wrapped = wrapped

    @property
    def wrapped(self) -> BasePruner | None:
        """The pruner that may still stop trials."""
        return self._wrapped

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Report, wait while other trials have the device, then ask the wrapped pruner."""
        with _optuna.turn(study, trial) as (session, is_own):
            if session is not None and not session.managed:
                _take_turns(session, study, trial, reports=is_own)
        if self._wrapped is None:
            return False
        _optuna.settle_reports(study)
        if _optuna.is_late(study):
            return False  # an outage: the other trials' values cannot be read
        return self._wrapped.prune(study, trial)


def _take_turns(
    session: TrialSession, study: optuna.Study, trial: FrozenTrial, *, reports: bool
) -> None:
    session.started(stores=False)
    step = trial.last_step
    if not reports:
        session.beat()  # a sign of life only: the session is that of another trial of this thread
    elif step is not None:
        unit = len(trial.intermediate_values)
        value = _optuna.sign(study) * trial.intermediate_values[step]
        # A time in nanoseconds is more than a message holds; it is the unit that counts.
        session.report(unit=unit, step=min(step, MOST_COUNT), value=value)
        session.wait_for_decision()
    if session.must_yield:
        session.park(None)
