"""Suspension of a whole study: what is most expensive to repeat is saved first. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core._broker_state import BrokerState
from optuna_hermes.broker._core._lease_ends import LeaseEnds
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._core._memory_manager import MemoryManager
from optuna_hermes.broker._core._scheduler import Scheduler
from optuna_hermes.broker._core._study import Study
from optuna_hermes.broker._core._turn import Turn

LEAST_AT_ONCE = 4
AT_ONCE_PER_DEVICE = 2
"""Parked trials that go to disk at the same time: more would only share the disk, and the first
would be safe later."""


def at_once(n_devices: int) -> int:
    """Number of parked trials that go to disk at the same time."""
    return max(LEAST_AT_ONCE, AT_ONCE_PER_DEVICE * n_devices)


def most_to_lose_first(trials: Iterable[LiveTrial]) -> list[LiveTrial]:
    """Order trials by their device time since their last checkpoint, the longest first."""
    return sorted(trials, key=lambda trial: (-trial.unsaved_seconds, trial.number))


class Drains:
    """Suspends all trials of studies whose drivers leave.

    Trials that train are asked at once: each stops at its next clean point. Of those that are
    parked a few go to disk at a time, in order, since there may be no time for all.
    """

    def __init__(
        self, state: BrokerState, memory: MemoryManager, ends: LeaseEnds, scheduler: Scheduler
    ) -> None:
        self._state = state
        self._memory = memory
        self._ends = ends
        self._scheduler = scheduler

    def begin(self, turn: Turn, study: Study) -> None:
        """Suspend every trial of a study, and start none; twice is no error."""
        study.draining = True
        self._state.cancel_reservations(study)
        self._ends.withdraw_unsent(turn, study)
        for lease in self._state.leases_of(study):
            lease.deadline = turn.now
            self._scheduler.ask_to_yield(turn, lease)
        for trial in study.trials.values():
            # Its folder may be there again.
            trial.can_store = trial.can_store or trial.last_store_failed
        for connection in study.idle_workers:
            turn.send(connection, wire.Dismiss())
        study.idle_workers.clear()
        if study.sets_up:
            from optuna_hermes.broker._core._set_up import dismiss  # as in the scheduler

            dismiss(turn, study)

    def go_on(self, turn: Turn, study: Study) -> None:
        """Let the next parked trials go to disk, as others have arrived there."""
        if study.problem and study.is_plain:
            self._send_away(turn, study, study.problem)
        parked = study.parked
        if not parked:
            return
        trials = study.trials.values()
        going = sum(trial.state == "parked" and trial.requested_tier == "disk" for trial in trials)
        room = max(0, at_once(len(self._state.slots)) - going)
        for trial in most_to_lose_first(parked)[:room]:
            self._memory.move(turn, trial, "disk")

    def _send_away(self, turn: Turn, study: Study, problem: str) -> None:
        """Refuse waiting trials of plain Optuna: no driver is there to tell of a problem."""
        for trial in study.trials.values():
            client = self._state.client_of(trial.connection)
            if client is not None and trial.state != "running" and not client.dismissed:
                client.dismissed = problem
                turn.send(trial.connection or 0, wire.Refused(reason=problem))
