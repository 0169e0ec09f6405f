"""Finishing of suspended trials at their last reported value."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna_hermes import _optuna
from optuna_hermes.broker._client import _journal
from optuna_hermes.broker._protocol import BrokerStatus
from optuna_hermes.ledger import EventRecord, Ledger, live_hosts
from optuna_hermes.model import LIVE_STATES

_CLOSE = "close it with `optuna-hermes tell --trial-number NUMBER --state fail`"


@dataclass(frozen=True, kw_only=True)
class FinishPlan:
    """A plan to finish suspended trials.

    Args:
        values: each trial that can be set to COMPLETE, with its last reported value.
        refused: each one that cannot, with the reason.
    """

    values: Mapping[int, float]
    refused: Mapping[int, str]


def plan_finish(
    study: _optuna.Study, ledger: Ledger, numbers: Sequence[int] | None, held: Collection[int]
) -> FinishPlan:
    """Decide which suspended trials (None: any) can be set to COMPLETE; refuse ``held`` ones.

    Values of theirs that could not be written when they were reported are written first.
    """
    _write_late_values(study, ledger, held)
    trials = {trial.number: trial for trial in study.get_trials(deepcopy=False)}
    if numbers is None:
        numbers = [number for number, trial in trials.items() if _optuna.ours(trial)]
    values, refused = {}, {}
    for number in numbers:
        reason = _refusal(trials.get(number), held)
        if reason is None:
            reported = trials[number].intermediate_values
            values[number] = reported[max(reported)]
        else:
            refused[number] = reason
    return FinishPlan(values=values, refused=refused)


def _write_late_values(study: _optuna.Study, ledger: Ledger, held: Collection[int]) -> None:
    """Write values into Optuna that are in the journals of suspended trials only."""
    root = _optuna.checkpoint_root(study)
    folders = {
        (row.number, Path(row.checkpoint.path).parent)
        for row in ledger.load_checkpoints(_optuna.study_key(study))
    }
    for trial in study.get_trials(deepcopy=False):
        if not _optuna.ours(trial) or trial.number in held:
            continue
        own = {folder for number, folder in folders if number == trial.number}
        for folder in {root / _optuna.trial_folder(trial.number), *own}:
            if found := _journal.find(folder).unwritten:
                for step, value in found:
                    _optuna.write_value(study, trial, step, value)
                _journal.change(folder, unwritten=())


def _refusal(trial: Any, held: Collection[int]) -> str | None:
    if trial is None:
        return "no such trial, see `optuna-hermes trials`"
    if not _optuna.ours(trial):
        return f"not suspended but {trial.state.name}, so leave it out"
    if trial.number in held:
        return "held by a live process: stop its `optimize` first"
    reported = trial.intermediate_values
    if not reported:
        return f"nothing was reported: {_CLOSE}"
    if math.isnan(reported[max(reported)]):
        return f"the last value is nan: {_CLOSE}"
    return None


def finish(study: _optuna.Study, ledger: Ledger, values: Mapping[int, float]) -> None:
    """Set trials to COMPLETE at these values, in Optuna and in the ledger.

    Raises:
        StorageError: another process has finished one; those before it are done.
    """
    key = _optuna.study_key(study)
    records = {record.number: record for record in ledger.load_trials(key)}
    trials = {trial.number: trial for trial in study.get_trials(deepcopy=False)}
    for number, value in values.items():
        # Optuna first: its state is the one that counts, and refuses a trial that is over.
        _optuna.complete_trial(study, trials[number], value)
        now = time.time()
        if number in records:
            record = records[number]
            done = dataclasses.replace(record, state="done", tier=None, owner=None, updated=now)
            ledger.save_trial(done, by=record.owner)
        detail = {"value": value}
        ledger.add_event(
            EventRecord(study=key, number=number, kind="finished", at=now, detail=detail)
        )


def held_trials(
    status: BrokerStatus | None, study: _optuna.Study, ledger: Ledger
) -> frozenset[int]:
    """The unfinished trials of a study that belong to a live process, on any host."""
    owners = {host.instance for host in live_hosts(ledger)}
    records = ledger.load_trials(_optuna.known_key(study) or "")
    live = (record for record in records if record.state in LIVE_STATES)
    elsewhere = (record.number for record in live if record.owner in owners)
    return _held_here(status, study).union(elsewhere)


def _held_here(status: BrokerStatus | None, study: _optuna.Study) -> frozenset[int]:
    served = None if status is None else status.study(_optuna.known_key(study) or "")
    if served is None:
        return frozenset()
    if served.driver_pid is not None:
        # The driver may resume any of them at any moment.
        trials = study.get_trials(deepcopy=False)
        return frozenset(t.number for t in trials if not t.state.is_finished())
    return frozenset(t.number for t in served.trials if t.state in ("running", "parked"))
