"""Finishing of suspended trials at their last reported value."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from optuna_hermes import _optuna
from optuna_hermes.broker._client import _journal
from optuna_hermes.broker._protocol import BrokerStatus, StudyStatus
from optuna_hermes.ledger import EventRecord, Ledger, is_other_file, live_hosts
from optuna_hermes.ledger._locks import UNLOCK_SECONDS
from optuna_hermes.model import LIVE_STATES
from optuna_hermes.suspend._tiers._disk import moved_file

_CLOSE = "close it with `optuna-hermes tell --trial-number NUMBER --state fail`"
_HELD = "held by a live process, or another user's: stop its `optimize` first, as that user"
_NO_CONSTRAINTS = f"its constraints are not known, so that it would count as feasible: {_CLOSE}"
_NO_SINGLE_VALUE = (
    "a study of several objectives has no single last value: give all with `optuna-hermes tell "
    "--trial-number NUMBER --values V1 V2`"
)

Unwritten = tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class FinishPlan:
    """A plan to finish suspended trials."""

    values: Mapping[int, float]  # each that can be set to COMPLETE, with its last reported value
    refused: Mapping[int, str]  # each one that cannot, with the reason
    # Steps and values that Optuna lacks of each trial that can, by their journals' folders.
    unwritten: Mapping[int, Mapping[Path, Unwritten]]


def plan_finish(
    study: _optuna.Study,
    ledger: Ledger,
    numbers: Sequence[int] | None,
    held: Collection[int],
    folders: Collection[Path] = (),
) -> FinishPlan:
    """Decide which suspended trials (None: any) can be set to COMPLETE; refuse ``held`` ones.

    It changes nothing. Values that could not be written when they were reported count too: they are
    looked for in these folders of the study's checkpoints, and in its own one.
    """
    trials = {trial.number: trial for trial in study.get_trials(deepcopy=False)}
    constraints = _optuna.known_constraints([*trials.values()])
    if numbers is None:
        numbers = [number for number, trial in trials.items() if _optuna.ours(trial)]
    places = _places(study, ledger, numbers, folders)
    trained = ledger.load_step_values(_optuna.study_key(study), trials.keys() & numbers)
    sign = _optuna.sign(study)
    values, refused, unwritten = {}, {}, {}
    for number in numbers:
        trial = trials.get(number)
        if trial is None:
            refused[number] = "no such trial, see `optuna-hermes trials`"
        elif not _optuna.ours(trial):
            refused[number] = f"not suspended but {trial.state.name}, so leave it out"
        elif number in held:
            refused[number] = _HELD
        elif len(study.directions) > 1:
            refused[number] = _NO_SINGLE_VALUE
        elif not constraints <= _optuna.constraint_names(trial):
            refused[number] = _NO_CONSTRAINTS
        else:
            journals = {each: _journal.find(each).unwritten for each in sorted(places[number])}
            found = {folder: lines for folder, lines in journals.items() if lines}
            reported = dict(trial.intermediate_values)
            # Optuna keeps what an earlier life of a trial has reported, whose weights are no more.
            for step, value in trained.get(number, {}).items():
                if value is None:
                    reported.pop(step, None)
                else:
                    reported[step] = sign * value
            reported.update(_late(found))
            if not reported:
                refused[number] = f"nothing was reported: {_CLOSE}"
            elif math.isnan(reported[max(reported)]):
                refused[number] = f"the last value is nan: {_CLOSE}"
            else:
                values[number], unwritten[number] = reported[max(reported)], found
    return FinishPlan(values=values, refused=refused, unwritten=unwritten)


def _places(
    study: _optuna.Study, ledger: Ledger, numbers: Sequence[int], folders: Collection[Path]
) -> dict[int, set[Path]]:
    """The folders in which a journal of each of these trials may be."""
    roots = {_optuna.checkpoint_root(study), *folders}
    own = {number: {root / _optuna.trial_folder(number) for root in roots} for number in numbers}
    named, before = defaultdict[int, set[Path]](set), set[Path]()
    for row in ledger.load_checkpoints(_optuna.study_key(study)):
        path = row.checkpoint.path
        named[row.number].add(Path(path).parent)
        # Of a study that was copied the original may go on with what lies where it was written.
        if any(moved_file(folder, path) for folder in own.get(row.number, ())):
            before.add(Path(path).parent)
    return {number: own[number] | named[number] - before for number in own}


def _late(unwritten: Mapping[Path, Unwritten]) -> dict[int, float]:
    return dict(chain.from_iterable(unwritten.values()))


def finish(study: _optuna.Study, ledger: Ledger, plan: FinishPlan) -> None:
    """Set trials to COMPLETE as planned, in Optuna and in the ledger.

    Raises:
        StorageError: another process has finished one; those before it are done.
    """
    key = _optuna.study_key(study)
    records = {record.number: record for record in ledger.load_trials(key)}
    trials = {trial.number: trial for trial in study.get_trials(deepcopy=False)}
    for number, value in plan.values.items():
        # Optuna first: its state is the one that counts, and refuses a trial that is over.
        complete(study, trials[number], plan)
        now = time.time()
        if number in records:
            record = records[number]
            done = dataclasses.replace(record, state="done", tier=None, owner=None, updated=now)
            ledger.save_trial(done, by=record.owner)
        detail = {"value": value}
        ledger.add_event(
            EventRecord(study=key, number=number, kind="finished", at=now, detail=detail)
        )


def complete(study: _optuna.Study, trial: Any, plan: FinishPlan) -> None:
    """Set a trial to COMPLETE in Optuna as planned, with the values that Optuna lacks.

    Raises:
        StorageError: another process has finished it.
    """
    found = plan.unwritten[trial.number]
    for step, value in _late(found).items():
        try:
            _optuna.write_value(study, trial, step, value)
        except RuntimeError:  # which Optuna's error of a finished trial is
            if _optuna.end_of(study, _optuna.trial_id(trial)) is None:
                raise
    _optuna.complete_trial(study, trial, plan.values[trial.number])
    # Last: if another process has just begun to write there, nothing of a finished trial is lost.
    for folder in found:
        _journal.change(folder, unwritten=())


def held_trials(
    status: BrokerStatus | None, study: _optuna.Study, ledger: Ledger, *, waiting: bool = False
) -> frozenset[int]:
    """The unfinished trials of a study that belong to a live process, on any host.

    With ``waiting`` also those that wait for one, if another host trains the study.
    """
    owners = {host.instance for host in live_hosts(ledger)}
    records = ledger.load_trials(_optuna.known_key(study) or "")
    live = (record for record in records if record.state in LIVE_STATES)
    here = _held_here(status, study, ledger)
    elsewhere = {record.number for record in live if record.owner in owners} - here
    return _unfinished(study) if waiting and elsewhere else here | elsewhere


def served(status: BrokerStatus | None, study: _optuna.Study) -> StudyStatus | None:
    """The study as a broker serves it; None if it does not, or only a copy of it."""
    key = _optuna.known_key(study)
    found = None if status is None or key is None else status.study(key)
    if found is None or is_other_file(found.ledger_url, _optuna.ledger_url(study)):
        return None
    return found


def _held_here(status: BrokerStatus | None, study: _optuna.Study, ledger: Ledger) -> frozenset[int]:
    here = served(status, study)
    if here is not None and here.driver_pid is None:
        return frozenset(t.number for t in here.trials if t.state in ("running", "parked"))
    # This user's other jobs have runtime directories, and so brokers, of their own.
    if here is None and not ledger.is_locked(_optuna.known_key(study) or "", UNLOCK_SECONDS):
        return frozenset()
    # The driver may resume any of them at any moment.
    return _unfinished(study)


def _unfinished(study: _optuna.Study) -> frozenset[int]:
    trials = study.get_trials(deepcopy=False)
    return frozenset(t.number for t in trials if not t.state.is_finished())
