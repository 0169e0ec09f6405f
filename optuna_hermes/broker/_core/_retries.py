"""Suspended trials that cannot go on now: they wait for their next try, and others go on. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from optuna_hermes.broker._core._broker_state import BrokerState
from optuna_hermes.broker._core._study import Study
from optuna_hermes.broker._core._turn import Turn

RETRY_SECONDS = 60.0
"""Time after which a trial is tried again; another host may take it at once."""

MOST_FAILED = 3
"""Failed tries in a row, each a minute after the one before, after which there is no next one."""


def failed_read(study: Study, number: int, reason: str, now: float) -> None:
    """Let a trial wait whose checkpoint is away, or end its study here if others are too."""
    study.retry_at[number] = now + RETRY_SECONDS
    # A disk that is away for a moment is so for the trials of all devices: that counts once.
    if now >= study.failed_read_at + RETRY_SECONDS:
        study.failed_reads, study.failed_read_at = study.failed_reads + 1, now
    if study.failed_reads >= MOST_FAILED and not study.problem:
        study.problem_may_pass = True
        study.problem = (
            f"No checkpoint could be read on this host, {MOST_FAILED} times in a row, so every "
            "trial was suspended: bring the disk or store back, or remove a checkpoint that stays "
            f"unreadable, then run the same command again. {reason}"
        )


def failed_return(study: Study, number: int, reason: str, now: float, *, final: bool) -> None:
    """Let a trial wait that failed before it went on, after its last try for good.

    A ``final`` reason, such as a lost checkpoint, leaves no try. It is the trial's own: others go
    on, however many fail so.
    """
    tries = MOST_FAILED if final else 1
    reasons = [*study.failed_returns.pop(number, ()), *[reason] * tries]
    study.failed_returns[number] = reasons  # as the latest one
    more = len(reasons) < MOST_FAILED
    study.retry_at[number] = now + RETRY_SECONDS if more else math.inf
    if not final:
        study.failed_in_a_row.append(number)
    if more:  # what is away would fail new trials for good: the next try comes before them
        study.opens_again_at = now + 2 * RETRY_SECONDS


def trained(study: Study, number: int) -> None:
    """Forget the failures of a trial that trains, and that others failed before it."""
    study.failed_returns.pop(number, None)
    study.failed_in_a_row, study.opens_again_at = [], 0.0


def try_again(study: Study, number: int) -> None:
    """Let a trial begin again at once, as if it had not failed."""
    study.failed_returns.pop(number, None)
    study.retry_at.pop(number, None)


def end_waits(turn: Turn) -> None:
    """Let trials begin again, and new ones be opened, that have waited for long enough."""
    for study in turn.state.studies.values():
        study.retry_at = {number: at for number, at in study.retry_at.items() if at > turn.now}
        if study.opens_again_at <= turn.now:
            study.opens_again_at = 0.0


def wakeups(state: BrokerState) -> Iterator[float]:
    """Times at which trials are tried, or new ones opened, again."""
    for study in state.studies.values():
        if not study.draining:
            yield from study.retry_at.values()
            if study.opens_again_at:
                yield study.opens_again_at


def end_study(state: BrokerState, study: Study) -> None:
    """End a study if its script is at fault, or if nothing else of it is left to train here.

    An error of the script, or of what all trials need, is met by each of them: two fail before any
    has trained since the driver came, or, where some have, two as often as they are tried. If none
    of several suspended ones finds a checkpoint, it is sought in the wrong place, where new ones
    would only be trained beside it.
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
    astray = len(failed) > 1 and not works
    others = _suspended_others(study, failed) or (not astray and _new_ones(state, study))
    if of_all or not others:
        study.problem = study.failed_returns[failed[-1]][-1]


def _may_begin_here(study: Study, number: int) -> bool:
    trial = study.trials.get(number)
    barred = trial is None or study.is_barred(trial) or study.is_elsewhere(trial)
    return trial is not None and trial.live and not barred


def _suspended_others(study: Study, failed: Collection[int]) -> bool:
    """True if a study has trials to train, here or elsewhere, beside those that have failed."""
    live = (trial for trial in study.trials.values() if trial.live and not study.is_barred(trial))
    return any(t.number not in failed or t.in_process or study.is_elsewhere(t) for t in live)


def _new_ones(state: BrokerState, study: Study) -> bool:
    """True if a study may get trials that it does not have yet."""
    return bool(state.may_open(study).any or study.opening_elsewhere or state.count_promised(study))
