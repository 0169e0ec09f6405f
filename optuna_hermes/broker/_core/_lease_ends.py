"""Ends of leases: suspensions, processes that are gone, and leases that never began. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core import _event_log
from optuna_hermes.broker._core import _failures as failures
from optuna_hermes.broker._core import _progress as progress
from optuna_hermes.broker._core._broker_state import BrokerState, Lease, Slot, taken_joules
from optuna_hermes.broker._core._events import Withdraw, WritesFailed
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._core._memory_manager import MemoryManager, size
from optuna_hermes.broker._core._study import Study
from optuna_hermes.broker._core._turn import Turn
from optuna_hermes.model import moving_average


class LeaseEnds:
    """Ends leases: by a suspension, by the end of a process, or because one never began."""

    def __init__(self, state: BrokerState, memory: MemoryManager) -> None:
        self._state = state
        self._memory = memory

    def end(self, turn: Turn, lease: Lease) -> None:
        """End a lease on all of its devices, whatever becomes of its trial."""
        held = lease.device_seconds(turn.now)
        study = self._state.studies[lease.study]
        study.spent_seconds += held
        study.turn_seconds += held
        trial = self._state.trial_of(lease)
        slots = self._state.slots_of(lease)
        if trial is not None:
            trial.device_seconds += held
            trial.add_energy(taken_joules(slots, lease, turn.now))
        for slot in slots:
            slot.lease = None
            slot.idle_since = turn.now
        turn.end_lease(lease)

    # -- suspensions ---------------------------------------------------------------------------

    def trial_of(self, connection: int, epoch: int) -> LiveTrial | None:
        """The trial that has this lease, or had it and is parked."""
        lease = self._state.lease(epoch)
        if lease is not None:
            return self._state.trial_of(lease) if lease.connection == connection else None
        parked = (trial for trial in self._state.trials() if trial.state == "parked")
        its = (each for each in parked if (each.connection, each.epoch) == (connection, epoch))
        return next(its, None)

    def parked(self, turn: Turn, connection: int, message: wire.TierChanged) -> None:
        """Handle the message of a trial that waits in a tier."""
        lease = self._state.lease(message.epoch)
        trial = self.trial_of(connection, message.epoch)
        if trial is None:
            return
        if message.checkpoint is not None:
            progress.keep(turn, trial, message.checkpoint)
        if lease is None:
            _event_log.moved(turn, trial, message.tier)
            self._put(trial, message, turn.now)
        else:
            slots = self._state.slots_of(lease)
            _event_log.suspended(turn, trial, message.tier)
            self._stopped(turn, lease, trial, message)
            self._put(trial, message, turn.now)
            if _came_not_back(lease):
                self.out_of_memory(turn, slots, trial, "could not come back to")
        turn.save(trial)
        if message.checkpoint is not None:
            turn.send(connection, wire.CheckpointAck(path=message.checkpoint.path))

    def _stopped(
        self, turn: Turn, lease: Lease, trial: LiveTrial, message: wire.TierChanged
    ) -> None:
        spent = message.suspend_seconds * len(lease.devices)
        study = self._state.studies[trial.study]
        study.add_overhead("suspending", spent)
        if message.tier == "disk":
            study.leave_seconds = moving_average(study.leave_seconds, message.suspend_seconds)
        trial.suspensions += 1
        trial.waiting_since = turn.now
        trial.needs(message.held_bytes)
        trial.can_store = trial.can_offload = True  # as far as it says so
        self.end(turn, lease)

    def _put(self, trial: LiveTrial, message: wire.TierChanged, now: float) -> None:
        if message.tier == "disk":
            self._memory.expect_exit(trial, now)
        elif message.tier == "host":
            self._memory.expect_free_memory(trial.devices, now)
        trial.park(message)
        for id_ in trial.devices:
            if id_ in self._state.slots:
                self._memory.measure_contexts(self._state.slots[id_])

    def out_of_memory(self, turn: Turn, slots: Sequence[Slot], trial: LiveTrial, what: str) -> None:
        """Handle that the memory of a device, or of one of several, did not suffice for its trial.

        It is tried again with the device to itself. If that did not help either it waits until
        a trial has gone that could not be moved; where none is left, its study ends.
        """
        tightest = min(slots, key=self._memory.known_free_bytes)
        need, free = size(trial.need_bytes), size(self._memory.free_bytes(tightest))
        reason = (
            f"Trial {trial.number} {what} {tightest.device.id}: it needs {need} there or more, "
            f"and {free} were free."
        )
        if trial.alone and any(self._memory.shares(slot, trial) for slot in slots):
            trial.waits_for_memory = True
        elif trial.alone:
            study = self._state.studies[trial.study]
            study.problem = f"{reason} It had the device to itself: end what else takes its memory."
        trial.alone = True
        detail = {"device": tightest.device.id, "reason": reason}
        turn.log(trial.study, trial.number, "outgrew its memory", detail)

    # -- processes -----------------------------------------------------------------------------

    def holder_gone(self, turn: Turn, lease: Lease) -> None:
        """Handle the end of the process that held a lease."""
        trial = self._state.trial_of(lease)
        self.end(turn, lease)
        self._memory.expect_free_memory(lease.devices, turn.now)
        study = self._state.studies[lease.study]
        if trial is None:
            if not lease.refused:  # a trial may have been created, or found
                study.lost_creations.append((str(lease.epoch), *lease.lost_creations))
            return
        trial.suspensions += 1
        # Processes that end together, with their fork server, may each be given the same trial
        # until the last of them is gone: that is not the trial's fault.
        had_it = lease.begun or lease.adopted or not lease.from_idle_worker
        self.process_gone(turn, trial, lease.connection, had_it=had_it)

    def process_gone(
        self, turn: Turn, trial: LiveTrial, connection: int, *, had_it: bool = True
    ) -> None:
        """Handle the end of a trial's process that gave no notice; ``had_it`` if it had begun."""
        client = self._state.clients.get(connection)
        # The process of one that is to be finished was to end, and it gets no other.
        if self._state.studies[trial.study].override_of(trial) != "finishing":
            if client is not None and (had_it or client.hung):
                failures.count_loss(self._state, trial, client, turn.now)
            _event_log.lost(turn, trial)
        self.take_back(turn, trial)

    def take_back(self, turn: Turn, trial: LiveTrial) -> None:
        """Take a trial back to its last checkpoint, if there is one: its process is gone."""
        self._memory.expect_exit(trial, turn.now)
        if trial.live:
            trial.leave_process()
            trial.waiting_since = turn.now
            turn.save(trial)

    # -- leases that never began ---------------------------------------------------------------

    def writes_refused(self, turn: Turn, event: WritesFailed) -> None:
        """Undo leases that the ledger refused, and note the problem of their study."""
        for lease in self._state.leases():
            if lease.epoch in event.epochs:
                self.undo(turn, lease, refused=True)
        study = self._state.studies.get(event.study)
        if study is not None:
            study.problem = event.reason

    def withdraw_unsent(self, turn: Turn, study: Study) -> None:
        """Withdraw leases of a study whose grants wait for its database."""
        for lease in self._state.leases_of(study):
            if lease.uncommitted:
                turn.add(Withdraw(epoch=lease.epoch))
                self.undo(turn, lease)

    def undo(self, turn: Turn, lease: Lease, *, refused: bool = False) -> None:
        """Undo a lease: its trial, or the worker that waited for one, is where it came from.

        One that was ``refused`` is not in the ledger, where another broker's may have its epoch.
        """
        study, trial = self._state.studies[lease.study], self._state.trial_of(lease)
        for slot in self._state.slots_of(lease):
            slot.lease = None
        if not refused:
            turn.end_lease(lease)
        if lease.from_idle_worker:
            # This worker still waits for a grant, for it never got this one.
            study.idle_workers.append(lease.connection)
            if lease.lost_creations:
                study.lost_creations.append(lease.lost_creations)  # still to be found
        if trial is None:
            if lease.creation_names:
                self._state.clients[lease.connection].creation_names = lease.creation_names
            return
        trial.undo_start(lease, turn.now, left=lease.from_idle_worker)
        if refused and lease.claimed:
            trial.owner, trial.row = None, lease.claimed  # as before
        else:
            turn.save(trial)


def _came_not_back(lease: Lease) -> bool:
    """True if a trial stops that has not started: its device had no room for what it left there."""
    return lease.from_tier == "host" and not lease.training and not lease.yielding
