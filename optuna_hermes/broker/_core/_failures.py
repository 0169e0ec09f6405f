"""Trials that fail or lose their processes again and again, and studies that only fail. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from optuna_hermes.broker._core import _event_log
from optuna_hermes.broker._core._broker_state import BrokerState, Client
from optuna_hermes.broker._core._live_trial import MOST_LOSSES, LiveTrial
from optuna_hermes.broker._core._study import Failures, Study
from optuna_hermes.broker._core._turn import Turn
from optuna_hermes.broker._protocol import Ended, FailureSummary, GiveUp, TrialLoss

MOST_ALIKE = 10
"""Equal failures in a row, with nothing else, after which a study ends."""

TOGETHER_SECONDS = 5.0
"""Processes that end so shortly before their driver have ended with it."""

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


def shown(failures: Failures) -> FailureSummary:
    return FailureSummary(
        first=failures.first,
        error=failures.first_error,
        alike=failures.alike,
        hopeless=failures.hopeless,
    )


def _promises(state: BrokerState, study: Study, now: float) -> bool:
    """True if any trial has succeeded, or has come further than those that failed alike."""
    held = {lease.number: lease.device_seconds(now) for lease in state.leases_of(study)}
    known = study.failures
    return any(
        trial.state == "done"
        or trial.furthest > known.units
        or (trial.live and trial.device_seconds + held.get(trial.number, 0.0) > known.seconds)
        for trial in study.trials.values()
    )


def count_loss(state: BrokerState, trial: LiveTrial, client: Client, now: float) -> None:
    """Count the loss of a worker that was training this trial, or waiting with it.

    It does not count where its device has failed, or its driver is gone. A plain
    trial's process is its user's: no other one is started.
    """
    study = state.studies[trial.study]
    failed = (slot for id_, slot in state.slots.items() if id_ in trial.devices)
    if client.role != "worker" or study.driver is None:
        return
    if all(slot.device.healthy for slot in failed):
        trial.losses += 1
        trial.lost_at, trial.lost_pid, trial.hung = now, client.pid, client.hung


def forget_losses(turn: Turn, study: Study) -> None:
    """Take back recent losses: a driver that ends may have ended its workers too."""
    for trial in study.trials.values():
        lost_at = trial.lost_at
        if trial.live and lost_at is not None and turn.now - lost_at <= TOGETHER_SECONDS:
            trial.losses, trial.lost_at = trial.losses - 1, None
            turn.save(trial)


def losses_shown(study: Study) -> Iterator[TrialLoss]:
    """Trials that have lost processes in the driver's time, as the status shows them to it."""
    for trial in study.trials.values():
        if trial.live and trial.losses:
            yield TrialLoss(
                trial=trial.number,
                trial_id=trial.trial_id,
                losses=trial.losses,
                most_losses=MOST_LOSSES,
                pid=trial.lost_pid,
                hung=trial.hung,
                given_up=trial.given_up and trial.connection is None,
                stored=bool(trial.checkpoints),
            )


def give_up(turn: Turn, message: GiveUp) -> LiveTrial | None:
    """Close a trial that was given up, now that its driver has told Optuna, and return it.

    Returns:
        None if it was not given up, or is over.
    """
    study = turn.state.studies[message.study]
    trial = study.trials.get(message.number)
    if trial is None or not trial.live or trial.connection is not None:
        return None
    if not trial.given_up or study.is_elsewhere(trial):
        return None
    trial.end(message.state)
    turn.save(trial)
    ended = Ended(epoch=trial.epoch, state=message.state, error=message.reason)
    _event_log.ended(turn, trial, ended)
    return trial
