"""Checkpoints that this host cannot read at this moment: their trials wait. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from optuna_hermes.broker._core._broker_state import BrokerState
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._core._turn import Turn

RETRY_SECONDS = 60.0
"""Time after which a checkpoint is read again; another host may take its trial at once."""

MOST_FAILED = 3
"""Failed reads in a row, each a minute after the one before, that end the study on this host."""


def released(turn: Turn, trial: LiveTrial, reason: str) -> None:
    """Let a trial wait whose checkpoint is away, or end its study here if others are too."""
    study = turn.state.studies[trial.study]
    turn.log(trial.study, trial.number, "released", {"reason": reason})
    study.retry_at[trial.number] = turn.now + RETRY_SECONDS
    # A disk that is away for a moment is so for the trials of all devices: that counts once.
    if turn.now >= study.failed_read_at + RETRY_SECONDS:
        study.failed_reads, study.failed_read_at = study.failed_reads + 1, turn.now
    if study.failed_reads >= MOST_FAILED and not study.problem:
        study.problem_may_pass = True
        study.problem = (
            f"No checkpoint could be read on this host, {MOST_FAILED} times in a row, so every "
            "trial was suspended: bring the disk or store back, or remove a checkpoint that stays "
            f"unreadable, then run the same command again. {reason}"
        )


def end_waits(turn: Turn) -> None:
    """Let trials begin again that have waited for long enough."""
    for study in turn.state.studies.values():
        study.retry_at = {number: at for number, at in study.retry_at.items() if at > turn.now}


def wakeups(state: BrokerState) -> Iterator[float]:
    """Times at which a checkpoint is read again."""
    for study in state.studies.values():
        if not study.draining:
            yield from (at for at in study.retry_at.values() if at < math.inf)
