"""Suspensions of trials in their process, on the device or in host memory, or on disk. Pure."""

from __future__ import annotations

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core import _event_log
from optuna_hermes.broker._core import _progress as progress
from optuna_hermes.broker._core._broker_state import BrokerState, Lease, Slot
from optuna_hermes.broker._core._ends import Ends
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._core._memory_manager import MemoryManager
from optuna_hermes.broker._core._turn import Turn


class Suspensions:
    """Handles trials that have stopped, or have gone from one tier to another.

    Args:
        state: the broker's state.
        memory: asks trials to leave memory.
        ends: of leases.
    """

    def __init__(self, state: BrokerState, memory: MemoryManager, ends: Ends) -> None:
        self._state = state
        self._memory = memory
        self._ends = ends

    def trial_of(self, connection: int, epoch: int, slot: Slot | None) -> LiveTrial | None:
        """The trial that has this lease, or had it and is parked."""
        if slot is not None and slot.lease is not None:
            return self._state.trial_of(slot.lease) if slot.lease.connection == connection else None
        for study in self._state.studies.values():
            for trial in study.trials.values():
                if (
                    trial.epoch == epoch
                    and trial.connection == connection
                    and trial.state == "parked"
                ):
                    return trial
        return None

    def stands(self, turn: Turn, connection: int, message: wire.Parked) -> None:
        """Handle the message of a trial that waits in a tier."""
        slot = self._state.slot_of(message.epoch)
        trial = self.trial_of(connection, message.epoch, slot)
        if trial is None:
            return
        if message.checkpoint is not None:
            progress.keep(turn, trial, message.checkpoint)
        if slot is None or slot.lease is None:
            _event_log.moved(turn, trial, message.tier)
            self._put(trial, message, turn.now)
        else:
            lease, slots = slot.lease, self._state.slots_of(slot.lease)
            _event_log.suspended(turn, trial, message.tier)
            self._stopped(turn, lease, trial, message)
            self._put(trial, message, turn.now)
            if _came_not_back(lease):
                self._ends.room(turn, slots, trial, "could not come back to")
        turn.save(trial)
        if message.checkpoint is not None:
            kept = wire.Kept(path=message.checkpoint.path)
            turn.send(connection, kept)
        if self._state.studies[trial.study].draining and trial.state == "parked" and trial.stores:
            self._memory.evict(turn, trial, "disk")

    def _stopped(self, turn: Turn, lease: Lease, trial: LiveTrial, message: wire.Parked) -> None:
        """End a lease whose trial is suspended."""
        spent = message.suspend_seconds * len(lease.devices)
        study = self._state.studies[trial.study]
        study.overhead_seconds += spent
        if message.tier == "disk":
            study.measure_leaving(message.suspend_seconds)
        trial.suspensions += 1
        trial.waiting_since = turn.now
        trial.needs(message.held_bytes)
        trial.stores = trial.moves = True  # as far as it says so
        self._ends.lease(turn, lease)

    def _put(self, trial: LiveTrial, message: wire.Parked, now: float) -> None:
        if message.tier == "disk":
            self._memory.leaves(trial, now)
        elif message.tier == "host":
            self._memory.left(trial.devices, now)
        trial.park(message)


def _came_not_back(lease: Lease) -> bool:
    """True if a trial stops that has not started: its device had no room for what it left there."""
    return lease.from_tier == "host" and not lease.training and not lease.yielding
