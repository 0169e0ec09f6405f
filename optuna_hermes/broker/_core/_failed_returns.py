"""Suspended trials that fail before they go on: they wait, and others go on. Pure."""

from __future__ import annotations

import math

from optuna_hermes.broker._core._broker_state import BrokerState
from optuna_hermes.broker._core._checkpoints_away import MOST_FAILED, RETRY_SECONDS
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._core._study import Study
from optuna_hermes.broker._core._turn import Turn


def released(turn: Turn, trial: LiveTrial, reason: str) -> None:
    """Let a trial wait for its next try on this host, after the last one for good."""
    study = turn.state.studies[trial.study]
    turn.log(trial.study, trial.number, "released", {"reason": reason})
    reasons = [*study.failed_returns.pop(trial.number, ()), reason]
    study.failed_returns[trial.number] = reasons  # as the latest one
    more = len(reasons) < MOST_FAILED
    study.retry_at[trial.number] = turn.now + RETRY_SECONDS if more else math.inf


def end_study(state: BrokerState, study: Study) -> None:
    """End a study if its script is at fault, or if nothing else of it is left to train here.

    An error of the script, or of what all trials need, is met by each of them. Nothing has trained
    then since the driver came; a trial that fails where others train is tried some times.
    """
    if not study.failed_returns or study.is_plain or study.problem or study.draining:
        return
    works = study.overhead_seconds.keys() & {"opening", "resuming"}  # known at a first batch
    tries = MOST_FAILED if works else 1
    failed = {each for each, reasons in study.failed_returns.items() if len(reasons) >= tries}
    of_all = not works and len(failed) > 1
    if of_all or not _others(state, study, failed):
        study.problem = next(reversed(study.failed_returns.values()))[-1]


def _others(state: BrokerState, study: Study, failed: set[int]) -> bool:
    """True if a study has trials to train, or may get some, beside those that have failed."""
    if study.may_open.any or study.coming or state.count_begun(study):
        return True
    live = (trial for trial in study.trials.values() if trial.live and not study.is_barred(trial))
    return any(t.number not in failed or t.in_process or study.is_elsewhere(t) for t in live)
