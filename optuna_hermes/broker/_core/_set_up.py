"""Trials that are set up before there is a device for them: created, at their first batch. Pure.

A worker that waits creates such a trial and calls the objective, which comes as far as its first
batch while others train. The trial is pending, with a process: its first lease costs a message.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import replace
from statistics import median

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core import _event_log
from optuna_hermes.broker._core import _progress as progress
from optuna_hermes.broker._core._broker_state import BrokerState
from optuna_hermes.broker._core._policy_runner import PolicyRunner
from optuna_hermes.broker._core._study import Study
from optuna_hermes.broker._core._turn import Turn
from optuna_hermes.model import Snapshot, TrialView

FEW_TRAINING = 8
"""If fewer trials train, each decision asks what is to be set up; of ``n``, one in ``n / 8``."""


def set_up_next(turn: Turn, study: Study, policy_runner: PolicyRunner, spare: int) -> None:
    """Let workers that wait set up the trials that the policy will probably open next.

    The study has ``spare`` processes that it does not need for anything else.
    """
    state = turn.state
    spare = min(spare, len(study.idle_workers))
    if not (spare > 0 and study.sets_up and state.may_open(study).any and _is_suited(state, study)):
        return
    known = len(_set_up_by(state, study))
    if known >= len(state.slots):
        return
    if study.set_up_pause > 0:
        study.set_up_pause -= 1
        return
    most, takes = _next_trials(turn, study, policy_runner)
    missing = max(0, min(spare, most - known))
    # Of many trials that train one reports at any moment: to ask each time keeps a broker busy.
    study.set_up_pause = 0 if missing else len(state.leases_of(study)) // FEW_TRAINING
    # Those first that have read no checkpoint for another trial.
    waiting = sorted(study.idle_workers, key=lambda each: state.clients[each].prepared is not None)
    for connection, take in zip(waiting[:missing], takes or [None] * missing, strict=False):
        if state.may_open(study).any:
            _set_up(turn, study, connection, take)


def created(turn: Turn, connection: int, message: wire.Begin) -> None:
    """Admit a trial that a worker has created, and sets up."""
    client = turn.state.clients[connection]
    study = turn.state.studies.get(client.study or "")
    if study is None:
        return
    if client.creation_names is None:
        # The grant of a lease has crossed this message.
        for lease in turn.state.leases_of(study):
            if lease.connection == connection and lease.creation_names:
                progress.begin(turn, lease, message)
        return
    is_new = message.number not in study.trials
    trial = progress.admit_begun(turn, study, connection, message, anew=True)
    if trial is None:
        client.creation_names = ()
        return
    client.creation_names = None
    if not client.dismissed:
        trial.register(connection, turn.now)
    if is_new:
        _event_log.admitted(turn, trial)
    turn.save(trial)


def dismiss(turn: Turn, study: Study) -> None:
    """Let the workers leave whose trials have not begun."""
    leaving = _set_up_by(turn.state, study)
    for connection in sorted(leaving):
        turn.state.clients[connection].dismissed = "It was sent away before its trial had begun."
        turn.send(connection, wire.Dismiss())
    # Another driver may come before they have left: its leases are not for them.
    for trial in study.trials.values():
        if trial.connection in leaving:
            trial.leave_process()
            turn.save(trial)


def _next_trials(
    turn: Turn, study: Study, policy_runner: PolicyRunner
) -> tuple[int, Sequence[int | None]]:
    """Most new trials that may begin if all devices are decided about one unit from now.

    The next values of the trials that train are not known. So the policy is asked what it would do
    if they were as the last ones, and if those trials had to make room that would fall behind by
    bad ones.

    Returns:
        Their number, and those among them that are listed, the likeliest ones first.
    """
    key = study.spec.key
    slots = [s for s in turn.state.slots.values() if not s.lease or s.lease.study == key]
    training = {slot.lease.number for slot in slots if slot.lease}
    now = policy_runner.snapshot(study, slots, turn.now)
    begun = {trial.number for trial in now.trials if trial.state != "pending"}
    as_before = _one_unit_later(study, now, training)
    first = policy_runner.ask(study, as_before)
    opened = [each.trial for each in first.assignments if each.trial not in begun]
    most = len(opened)
    if most < len(slots) and (worst := _worst(now.trials)) is not None:
        behind = policy_runner.ask(study, _one_unit_later(study, now, training, worst))
        leaving = training - {each.trial for each in behind.assignments}
        left = policy_runner.ask(study, _without(as_before, leaving))
        also = [each.trial for each in left.assignments if each.trial not in begun]
        most = max(most, len(also))
        opened += also
    listed = turn.state.listed(study)
    return most, [number for number in dict.fromkeys(opened) if number in listed]


def _worst(trials: Sequence[TrialView]) -> float | None:
    """The highest of all values, None if there is none."""
    values = [value for trial in trials for value in trial.curve.values if math.isfinite(value)]
    return max(values, default=None)


def _without(snapshot: Snapshot, numbers: Container[int | None]) -> Snapshot:
    """The snapshot in which these trials count as before but are not to be chosen."""
    trials = (
        replace(trial, state="running") if trial.number in numbers else trial
        for trial in snapshot.trials
    )
    return replace(snapshot, trials=tuple(trials))


def _one_unit_later(
    study: Study, snapshot: Snapshot, training: Container[int | None], value: float | None = None
) -> Snapshot:
    """The snapshot once those that train have a further unit, of their last value or of this."""
    values = [trial.curve.values[0] for trial in snapshot.trials if trial.curve.units]
    usual = median(values) if values else 0.0
    live, ended = [], [*snapshot.finished]
    for trial in snapshot.trials:
        if trial.number not in training:
            live.append(trial)
        elif trial.units_left == 1:
            ended.append(trial)
        else:
            last = trial.curve.values[-1] if trial.curve.units else usual
            seconds = study.unit_seconds(study.trials[trial.number])
            live.append(_with_unit(trial, last if value is None else value, seconds))
    return replace(snapshot, trials=tuple(live), finished=tuple(ended))


def _with_unit(trial: TrialView, value: float, seconds: float) -> TrialView:
    """A trial after a further unit of ``seconds``, with its ``value``."""
    curve, units = trial.curve, trial.curve.units
    step = curve.steps[-1] if units else 0
    curve = curve.with_report(units + 1, step + 1, value, curve.seconds + seconds)
    left = None if trial.units_left is None else trial.units_left - 1
    return replace(trial, curve=curve, units_left=left)


def _is_suited(state: BrokerState, study: Study) -> bool:
    """True if a trial of the study can be set up on this host before its device is known."""
    # A process sees the GPU of its lease alone, and of several hosts each counts the leases.
    cpus = all(slot.device.kind == "cpu" for slot in state.slots.values())
    ends = study.draining or study.problem
    return cpus and study.broker is None and not ends and not study.is_elastic


def _set_up(turn: Turn, study: Study, connection: int, listed_number: int | None) -> None:
    state, client = turn.state, turn.state.clients[connection]
    state.n_set_ups += 1
    # No other broker has both: the names of creations are unique in their study.
    name = f"{state.instance}:{state.n_set_ups}"
    lost = study.lost_creations.pop() if study.lost_creations else ()
    client.creation_names, client.listed_number = (name, *lost), listed_number
    client.prepared, client.silent_from = None, turn.now
    study.idle_workers.remove(connection)
    turn.send(connection, wire.SetUp(name=name, lost=lost, listed_number=listed_number))


def _set_up_by(state: BrokerState, study: Study) -> set[int]:
    """The workers that have a trial that has not begun, or are about to create it."""
    found = {each for each in study.workers if state.clients[each].creation_names}
    pending = (trial for trial in study.trials.values() if trial.state == "pending")
    return found | {trial.connection for trial in pending if trial.connection in study.workers}
