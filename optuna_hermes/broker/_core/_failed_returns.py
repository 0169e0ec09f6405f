"""Suspended trials that fail before they go on: they wait, and others go on. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from optuna_hermes.broker._core._broker_state import BrokerState
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._core._study import Study
from optuna_hermes.broker._core._turn import Turn
from optuna_hermes.broker._core._unreachable_checkpoints import MOST_FAILED, RETRY_SECONDS


def released(turn: Turn, trial: LiveTrial, reason: str, *, final: bool) -> None:
    """Let a trial wait for its next try on this host, after the last one for good.

    A ``final`` reason leaves no try: it counts as if every one had failed.
    """
    study = turn.state.studies[trial.study]
    turn.log(trial.study, trial.number, "released", {"reason": reason})
    tries = MOST_FAILED if final else 1
    reasons = [*study.failed_returns.pop(trial.number, ()), *[reason] * tries]
    study.failed_returns[trial.number] = reasons  # as the latest one
    more = len(reasons) < MOST_FAILED
    study.retry_at[trial.number] = turn.now + RETRY_SECONDS if more else math.inf
    study.failed_in_a_row += [trial.number] * tries
    if more:  # what is away would fail new trials for good: the next try comes before them
        study.opens_again_at = turn.now + 2 * RETRY_SECONDS


def trained(study: Study, number: int) -> None:
    """Forget the failures of a trial that trains, and that others failed before it."""
    study.failed_returns.pop(number, None)
    study.failed_in_a_row, study.opens_again_at = [], 0.0


def try_again(study: Study, number: int) -> None:
    """Let a trial begin again at once, as if it had not failed."""
    study.failed_returns.pop(number, None)
    study.retry_at.pop(number, None)


def end_waits(turn: Turn) -> None:
    """Let new trials be opened again where that has waited for long enough."""
    for study in turn.state.studies.values():
        if study.opens_again_at <= turn.now:
            study.opens_again_at = 0.0


def wakeups(state: BrokerState) -> Iterator[float]:
    """Times at which new trials are opened again."""
    for study in state.studies.values():
        if study.opens_again_at and not study.draining:
            yield study.opens_again_at


def end_study(state: BrokerState, study: Study) -> None:
    """End a study if its script is at fault, or if nothing else of it is left to train here.

    An error of the script, or of what all trials need, is met by each of them: two fail before any
    has trained since the driver came, or, where some have, two as often as they are tried.
    """
    if not study.failed_returns or study.is_plain or study.problem or study.draining:
        return
    works = study.overhead_seconds.keys() & {"opening", "resuming"}  # known at a first batch
    tries = MOST_FAILED if works else 1
    # Others may have been trained elsewhere since, finished or put on hold.
    failed = [
        number
        for number, reasons in study.failed_returns.items()
        if len(reasons) >= tries and _may_begin_here(study, number)
    ]
    if not failed:
        return
    in_a_row = [number for number in failed if study.failed_in_a_row.count(number) >= tries]
    trains = any(lease.training for lease in state.leases_of(study))
    of_all = len(in_a_row) > 1 and not trains
    if of_all or not _others(state, study, failed):
        study.problem = study.failed_returns[failed[-1]][-1]


def _may_begin_here(study: Study, number: int) -> bool:
    trial = study.trials.get(number)
    barred = trial is None or study.is_barred(trial) or study.is_elsewhere(trial)
    return trial is not None and trial.live and not barred


def _others(state: BrokerState, study: Study, failed: Collection[int]) -> bool:
    """True if a study has trials to train, or may get some, beside those that have failed."""
    if study.may_open.any or study.opening_elsewhere or state.count_promised(study):
        return True
    live = (trial for trial in study.trials.values() if trial.live and not study.is_barred(trial))
    return any(t.number not in failed or t.in_process or study.is_elsewhere(t) for t in live)
