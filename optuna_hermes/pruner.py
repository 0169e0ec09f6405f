"""The pruner that pauses."""

from __future__ import annotations

import optuna
from optuna.pruners import BasePruner, HyperbandPruner
from optuna.trial import FrozenTrial

from optuna_hermes import _optuna as private
from optuna_hermes.broker import RunSession
from optuna_hermes.errors import UnsupportedPrunerError


class HermesPruner(BasePruner):
    """Makes ``trial.should_prune()`` the point where a trial gives its device to another.

    The call reports the trial's last value to the broker and blocks while it is another trial's
    turn; then it answers what the wrapped pruner says, or False: nothing is killed.

    Args:
        wrapped: a pruner that may still stop trials for good.

    Raises:
        UnsupportedPrunerError: ``wrapped`` is a ``HyperbandPruner``.

    Example:
        >>> import optuna
        >>> from optuna_hermes import HermesPruner, HermesSampler
        >>> study = optuna.create_study(sampler=HermesSampler(), pruner=HermesPruner())
    """

    preempts = True
    """Tells ``HermesSampler`` that trials of this study take turns."""

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
        """Report, let others run if it is their turn, then ask the wrapped pruner."""
        with private.turn(study, trial) as (session, is_own):
            if session is not None and not session.managed:
                _take_turns(session, study, trial, reports=is_own)
        if private.is_late(study):
            return False  # what the others have reported cannot be read now
        return self._wrapped.prune(study, trial) if self._wrapped is not None else False


def _take_turns(
    session: RunSession, study: optuna.Study, trial: FrozenTrial, *, reports: bool
) -> None:
    session.started(stores=False)
    step = trial.last_step
    if not reports:
        session.beat(0)  # its thread trains, though another trial
    elif step is not None:
        unit = len(trial.intermediate_values)
        value = private.sign(study) * trial.intermediate_values[step]
        session.report(unit=unit, step=step, value=value)
    if session.must_yield:
        session.park(None)
