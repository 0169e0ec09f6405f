"""Ends of leases, processes and reservations, written into the ``BrokerState``. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from optuna_hermes.broker._core import _energy as energy
from optuna_hermes.broker._core import _event_log
from optuna_hermes.broker._core import _losses as losses
from optuna_hermes.broker._core._broker_state import BrokerState, Lease, Slot
from optuna_hermes.broker._core._events import Command, EndLease, Withdraw, WritesFailed
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._core._memory_manager import MemoryManager, size
from optuna_hermes.broker._core._rows import save
from optuna_hermes.broker._core._study import Study


class Ends:
    """Ends leases, processes and reservations."""

    def __init__(self, state: BrokerState, memory: MemoryManager) -> None:
        self._state = state
        self._memory = memory

    def lease(self, lease: Lease, now: float, out: list[Command]) -> None:
        """End a lease on all of its devices, whatever becomes of its trial."""
        held = lease.device_seconds(now)
        self._state.studies[lease.study].spent_seconds += held
        trial = self._state.trial_of(lease)
        slots = self._state.slots_of(lease)
        if trial is not None:
            trial.device_seconds += held
            energy.add(trial, energy.taken_joules(slots, lease, now))
        for slot in slots:
            slot.lease = None
            slot.empty_since = now if slot.reservation else None
        ended = now + self._state.wall_offset
        out.append(EndLease(study=lease.study, epoch=lease.epoch, ended=ended))

    def holder(self, lease: Lease, now: float, out: list[Command]) -> None:
        """Handle the end of the process that held a lease."""
        trial = self._state.trial_of(lease)
        self.lease(lease, now, out)
        self._memory.left(lease.devices, now)
        study = self._state.studies[lease.study]
        if trial is None:
            if study.unstarted is not None:
                study.unstarted += 1
            if not lease.refused:  # a trial may have been created, or found
                study.lost.append((lease.epoch, *lease.lost))
            return
        trial.suspensions += 1
        self.lost(trial, lease.connection, now, out)

    def lost(self, trial: LiveTrial, connection: int, now: float, out: list[Command]) -> None:
        """Handle the end of a trial's process that gave no notice."""
        client = self._state.clients.get(connection)
        if client is not None:
            losses.count(self._state, trial, client, now)
        out.append(_event_log.lost(self._state, trial, now))
        self.process(trial, now, out)

    def process(self, trial: LiveTrial, now: float, out: list[Command]) -> None:
        """Take a trial back to its last checkpoint, if there is one: its process is gone."""
        self._memory.leaves(trial, now)
        if trial.live:
            trial.leave_process()
            trial.waiting_since = now
            save(self._state, trial, now, out)

    def reservations(self, study: Study, *, only_impossible: bool = False) -> None:
        """Cancel the reservations of a study, or only those that cannot be granted."""
        for reservation in self._state.reserved(study.spec.key):
            trial = self._state.trial_of(reservation)
            possible = study.driver is not None if trial is None else study.can_begin(trial)
            if not (only_impossible and possible):
                self._state.unreserve(reservation)

    def unwritten(self, event: WritesFailed, now: float, out: list[Command]) -> None:
        """Undo leases that the ledger refused, and note the problem of their studies."""
        failed = {event.study} if event.study else set()
        for lease in self._state.leases():
            if lease.epoch in event.epochs:
                failed.add(lease.study)
                self.undo(lease, now, out, refused=True)
        for key in failed & self._state.studies.keys():
            self._state.studies[key].problem = event.reason

    def withdrawn(self, study: Study, now: float, out: list[Command]) -> None:
        """Withdraw leases of a study whose grants wait for its database."""
        for lease in self._state.leases():
            if lease.held and lease.study == study.spec.key:
                out.append(Withdraw(epoch=lease.epoch))
                self.undo(lease, now, out)

    def undo(self, lease: Lease, now: float, out: list[Command], *, refused: bool = False) -> None:
        """Undo a lease: its trial, or the worker that waited for one, is where it came from.

        One that was ``refused`` is not in the ledger, where another broker's may have its epoch.
        """
        study, trial = self._state.studies[lease.study], self._state.trial_of(lease)
        client = self._state.clients.get(lease.connection)
        for slot in self._state.slots_of(lease):
            slot.lease = None
        if not refused:
            ended = now + self._state.wall_offset
            out.append(EndLease(study=lease.study, epoch=lease.epoch, ended=ended))
        if trial is None and study.unstarted is not None:
            study.unstarted += 1
        if lease.lost:
            study.lost.append(lease.lost)  # still to be found
        waited = trial is None or lease.from_tier in (None, "disk")
        if waited and client is not None and client.role == "worker":
            # This worker still waits for a grant, for it never got this one.
            study.idle.append(lease.connection)
        if trial is None:
            return
        left = lease.from_tier == "disk" or lease.connection in study.idle
        trial.undo_start(lease, now, left=left)
        if refused and lease.claimed:
            trial.owner, trial.row = None, lease.claimed  # as before
        else:
            save(self._state, trial, now, out)

    def room(
        self, slots: Sequence[Slot], trial: LiveTrial, what: str, now: float, out: list[Command]
    ) -> None:
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
            trial.stranded = True
        elif trial.alone:
            study = self._state.studies[trial.study]
            study.problem = f"{reason} It had the device to itself: end what else takes its memory."
        trial.alone = True
        detail = {"device": tightest.device.id, "reason": reason}
        out.append(self._state.event(trial.study, trial.number, "outgrew its memory", detail, now))
