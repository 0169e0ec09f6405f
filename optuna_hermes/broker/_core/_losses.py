"""Runs that lose their process again and again without a new unit: they are given up. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from optuna_hermes.broker._core import _event_log
from optuna_hermes.broker._core._broker_state import BrokerState, Client
from optuna_hermes.broker._core._live_trial import MOST_LOSSES, LiveTrial
from optuna_hermes.broker._core._study import Study
from optuna_hermes.broker._core._turn import Turn
from optuna_hermes.broker._protocol import Ended, GiveUp

TOGETHER_SECONDS = 5.0
"""Processes that end so shortly before their driver have ended with it."""


def count(state: BrokerState, trial: LiveTrial, client: Client, now: float) -> None:
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


def forget(turn: Turn, study: Study) -> None:
    """Take back recent losses: a driver that ends may have ended its workers too."""
    for trial in study.trials.values():
        if (
            trial.live
            and trial.lost_at is not None
            and turn.now - trial.lost_at <= TOGETHER_SECONDS
        ):
            trial.losses, trial.lost_at = trial.losses - 1, None
            turn.save(trial)


def shown(study: Study) -> Iterator[dict[str, Any]]:
    """Runs that have lost processes in the driver's time, as the status shows them to it."""
    for trial in study.trials.values():
        if trial.live and trial.losses:
            yield {
                "trial": trial.number,
                "trial_id": trial.trial_id,
                "losses": trial.losses,
                "most_losses": MOST_LOSSES,
                "pid": trial.lost_pid,
                "hung": trial.hung,
                "given_up": trial.given_up and trial.connection is None,
            }


def give_up(turn: Turn, message: GiveUp) -> LiveTrial | None:
    """Close a trial that is given up, as its driver has told Optuna.

    Returns:
        The trial, None if it was not given up, or is over.
    """
    study = turn.state.studies.get(message.study)
    trial = None if study is None else study.trials.get(message.number)
    if study is None or trial is None or not trial.live or trial.connection is not None:
        return None
    if not trial.given_up or study.is_elsewhere(trial):
        return None
    trial.end(message.state)
    turn.save(trial)
    ended = Ended(epoch=trial.epoch, state=message.state, error=message.reason)
    _event_log.ended(turn, trial, ended)
    return trial
