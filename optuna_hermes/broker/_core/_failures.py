"""Studies in which every trial fails, and for the same reason. Pure."""

from __future__ import annotations

import re
from typing import Any

from optuna_hermes.broker._core._broker_state import BrokerState
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._core._study import Failures, Study

MOST_ALIKE = 10
"""Equal failures in a row, with nothing else, after which a study ends."""

_NUMBER = re.compile(r"0x[0-9a-f]+|-?\d+(\.\d+)?(e[-+]?\d+)?", re.IGNORECASE)


def failed(state: BrokerState, trial: LiveTrial, error: str, now: float) -> None:
    """Count a failed trial. Reasons are equal if they differ in their numbers only."""
    study = state.studies[trial.study]
    known, without_numbers = study.failures, _NUMBER.sub("#", error)
    if known.first is None:
        known.first, known.first_error = trial.number, error
    if without_numbers != known.error:
        known.error, known.alike, known.units, known.seconds = without_numbers, 0, 0, 0.0
    known.alike += 1
    known.units = max(known.units, trial.furthest)
    known.seconds = max(known.seconds, trial.device_seconds)
    known.hopeless = known.alike >= MOST_ALIKE and not _promises(state, study, now)


def shown(failures: Failures) -> dict[str, Any]:
    """Failures as the status shows them to the driver."""
    return {
        "first": failures.first,
        "error": failures.first_error,
        "alike": failures.alike,
        "hopeless": failures.hopeless,
    }


def _promises(state: BrokerState, study: Study, now: float) -> bool:
    """True if any trial has succeeded, or has come further than those that failed alike."""
    held = {
        lease.number: lease.device_seconds(now)
        for lease in state.leases()
        if lease.study == study.spec.key
    }
    known = study.failures
    return any(
        trial.state == "done"
        or trial.furthest > known.units
        or (trial.live and trial.device_seconds + held.get(trial.number, 0.0) > known.seconds)
        for trial in study.trials.values()
    )
