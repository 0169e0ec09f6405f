"""Rows of trials in the ledger, with their owner where several hosts share a study. Pure."""

from __future__ import annotations

from dataclasses import replace

from optuna_hermes.broker._core._broker_state import BrokerState
from optuna_hermes.broker._core._events import Claim, Command
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.ledger._base import TrialRecord


def save(state: BrokerState, trial: LiveTrial, now: float, out: list[Command]) -> None:
    """Write a trial as it is now, unless it is another host's.

    A trial that is in no process's memory has no owner: any host may carry it on.
    """
    study = state.studies[trial.study]
    if study.is_elsewhere(trial):
        return
    claim(state, trial, out)
    if study.broker is not None:
        trial.owner = study.broker if trial.held else None
    trial.row = replace(state.record(trial, now), owner=trial.owner)
    out.append(trial.row)


def claim(state: BrokerState, trial: LiveTrial, out: list[Command]) -> TrialRecord | None:
    """Claim a trial for this broker before it is written, if it has no owner.

    Returns:
        Its row if it had to be claimed.
    """
    study = state.studies[trial.study]
    if study.broker is None or study.owns(trial) or trial.row is None:
        return None
    out.append(Claim(study=trial.study, number=trial.number, slices=trial.row.slices))
    trial.owner = study.broker
    return trial.row


def give_back(state: BrokerState, trial: LiveTrial, now: float, out: list[Command]) -> None:
    """Free an earlier broker's trial of this host if no process has it any more."""
    if state.studies[trial.study].owns(trial) and trial.live and not trial.held:
        save(state, trial, now, out)
