"""Trials that wait in processes of other hosts, and would train on this one. Pure.

A policy chooses among the trials of its host. Those of other hosts that it would rather train are
named in the host's presence. Their owner stores them, and leaves them to the host that has asked.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

from optuna_hermes.broker._core._broker_state import Lease, Slot
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._core._memory_manager import MemoryManager
from optuna_hermes.broker._core._policy_runner import PolicyRunner
from optuna_hermes.broker._core._study import Study
from optuna_hermes.broker._core._turn import Turn
from optuna_hermes.ledger._records import HostRecord
from optuna_hermes.model import TrialView

_ANSWER_SECONDS = 60.0
"""Time after which a trial that was asked for and still waits there cannot be stored."""
_MOST_MOVING = 0.1
"""Share of the time in which trials may be on their way here."""


def wanted_elsewhere(
    study: Study, policy_runner: PolicyRunner, slots: Sequence[Slot], now: float
) -> tuple[int, ...]:
    """Trials of other hosts that the policy would train here if they were stored.

    Those are trials that are parked there, and trials that were stored for this host. The
    ``slots`` are decided about before one of them could be here, or soon after.
    """
    theirs = {number for number, trial in study.trials.items() if _is_there(study, trial)}
    for number in study.asked_for:
        study.asked_since.setdefault(number, now)
    study.asked_since = {n: at for n, at in study.asked_since.items() if n in theirs}
    theirs -= {n for n, at in study.asked_since.items() if now - at > _ANSWER_SECONDS}
    theirs -= study.promised | study.retry_at.keys()
    if not (theirs and slots):
        return ()
    if now < study.asks_again_at:
        return tuple(number for number in study.asked_for if number in theirs)
    snapshot = policy_runner.snapshot(study, slots, now)
    views = (
        _as_stored(view, study.cost("disk"), now) if view.number in theirs else view
        for view in snapshot.trials
    )
    decision = policy_runner.ask(study, replace(snapshot, trials=tuple(views)))
    chosen = {assignment.trial for assignment in decision.assignments}
    wanted = tuple(sorted(theirs & chosen))
    if not {*wanted} <= {*study.asked_for}:
        study.asks_again_at = now + (study.cost("disk") + study.leave_seconds) / _MOST_MOVING
    return wanted


def _is_there(study: Study, trial: LiveTrial) -> bool:
    if trial.state == "parked" and study.is_elsewhere(trial):
        return not study.is_held(trial)
    return trial.state == "stored" and trial.owner is None and trial.number in study.asked_for


def soon(slots: Iterable[Slot], key: str, at: float) -> list[Slot]:
    """The slots that a study may be given by a time: idle ones, and its own.

    Not those of trials that have not come to their first batch: how long that takes nobody knows.
    """

    def ends(lease: Lease) -> bool:
        return lease.study == key and lease.training and lease.deadline <= at

    return [slot for slot in slots if slot.lease is None or ends(slot.lease)]


def promised(study: Study, hosts: Iterable[HostRecord], instance: str) -> frozenset[int]:
    """Trials that other hosts have asked for: those are theirs when they are stored.

    Of two that ask for one at the same time the first by name gets it.
    """
    found: set[int] = set()
    for host in hosts:
        asked = {each for each in host.wants if each.startswith(f"{study.spec.key}:")}
        numbers = {int(each.rpartition(":")[2]) for each in asked}
        found |= numbers if host.instance < instance else numbers - {*study.asked_for}
    return frozenset(found)


def give_away(
    turn: Turn, study: Study, memory: MemoryManager, reserved: Container[int | None]
) -> None:
    """Store the parked trials that others ask for, but those that get a device here."""
    for trial in study.parked:
        asked = trial.number in study.promised and study.owns(trial)
        if asked and trial.number not in reserved:
            memory.move(turn, trial, "disk")


def _as_stored(view: TrialView, cost: float, now: float) -> TrialView:
    return replace(
        view,
        state="stored",
        tier="disk",
        device=None,
        devices=(),
        bound_to=(),
        waiting_since=now if view.waiting_since is None else view.waiting_since,
        switch_cost_seconds=cost,
    )
