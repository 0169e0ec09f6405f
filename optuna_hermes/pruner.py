"""``HermesPruner``, the pruner that suspends trials in place of stopping them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import optuna
from optuna.pruners import BasePruner, HyperbandPruner, WilcoxonPruner
from optuna.trial import FrozenTrial

from optuna_hermes import _optuna
from optuna_hermes.errors import UnsupportedPrunerError, require
from optuna_hermes.model import MOST_COUNT

if TYPE_CHECKING:
    from optuna_hermes.broker import TrialSession


LONG_SECONDS = 300.0
"""Device time of a trial whose loss is worth a warning beforehand."""

_IN_MEMORY = "it only calls trial.should_prune(), and its loop is in no suspendable() or callback"

_REFUSED: dict[type[BasePruner], str] = {
    HyperbandPruner: "Optuna gives each bracket its own view of the study only if HyperbandPruner "
    "is the study's pruner itself. Wrap SuccessiveHalvingPruner, or use HermesPruner() alone.",
    WilcoxonPruner: "its steps are instances, while trials take turns by how far they are. Report "
    "the mean of the instances so far, at their number, and use HermesPruner() alone.",
}


class HermesPruner(BasePruner):
    """Pruner whose ``trial.should_prune()`` is the point where a trial may be suspended.

    The call reports the trial's last value to the broker and blocks while another trial has the
    device; then it returns the wrapped pruner's answer, or False if there is none.

    Args:
        wrapped: a pruner that may still stop trials for good; None for none.

    Raises:
        InvalidInputError: ``wrapped`` is no pruner.
        UnsupportedPrunerError: ``wrapped`` is a ``HyperbandPruner`` or ``WilcoxonPruner``, or has
            one inside.

    Example:
        >>> import optuna
        >>> from optuna_hermes import HermesPruner, HermesSampler
        >>> study = optuna.create_study(sampler=HermesSampler(), pruner=HermesPruner())
    """

    preempts = True
    """Mark for ``HermesSampler``: trials of this study take turns."""

    def __init__(self, wrapped: BasePruner | None = None) -> None:
        require(
            isinstance(wrapped, BasePruner | None),
            "wrapped must be a pruner of Optuna or None",
            wrapped,
            "write a call, such as MedianPruner()",
        )
        for pruner in _optuna.nested_pruners(wrapped):
            for kind, reason in _REFUSED.items():
                if isinstance(pruner, kind):
                    raise UnsupportedPrunerError(f"{kind.__name__} cannot be wrapped: {reason}")
        self.wrapped = wrapped
        """The pruner that may still stop trials."""

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Report, wait while other trials have the device, then ask the wrapped pruner."""
        with _optuna.turn(study, trial) as (session, is_own):
            if session is not None and not session.managed:
                _take_turns(session, study, trial, reports=is_own)
        if self.wrapped is None:
            return False
        _optuna.settle_reports(study)
        if _optuna.is_late(study):
            return False  # an outage: the other trials' values cannot be read
        return self.wrapped.prune(study, trial)


def _take_turns(
    session: TrialSession, study: optuna.Study, trial: FrozenTrial, *, reports: bool
) -> None:
    step, unit = trial.last_step, len(trial.intermediate_values)
    session.started(can_store=False, late=step is not None)
    # A sign of life only: nothing was reported since the last call, or the session is that of
    # another trial of this thread.
    if step is None or unit == session.reported_unit or not reports:
        session.beat()
    else:
        value = _optuna.sign(study) * trial.intermediate_values[step]
        # A time in nanoseconds is more than a message holds; it is the unit that counts.
        session.report(unit=unit, step=min(step, MOST_COUNT), value=value)
        if session.checkpoint_dir is not None and session.device_seconds > LONG_SECONDS:
            from optuna_hermes.suspend._tiers._saver import (
                warn_of_memory,
            )  # here: most trials are short

            warn_of_memory(f"trial {trial.number}", session.checkpoint_dir, _IN_MEMORY)
        session.wait_for_decision()
    if session.must_yield:
        session.park(None)
