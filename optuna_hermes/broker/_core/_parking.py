"""Suspensions of runs in their process, on the device or in host memory, or on disk. Pure."""

from __future__ import annotations

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core import _event_log
from optuna_hermes.broker._core import _progress as progress
from optuna_hermes.broker._core._book import Book, Lease, Slot
from optuna_hermes.broker._core._ends import Ends
from optuna_hermes.broker._core._events import Command, Send
from optuna_hermes.broker._core._memory import Memory
from optuna_hermes.broker._core._rows import save
from optuna_hermes.broker._core._run import LiveTrial


class Suspensions:
    """Handles runs that have stopped, or have gone from one tier to another.

    Args:
        book: the broker's state.
        memory: asks runs to leave memory.
        ends: of leases.
    """

    def __init__(self, book: Book, memory: Memory, ends: Ends) -> None:
        self._book = book
        self._memory = memory
        self._ends = ends

    def run_of(self, connection: int, epoch: int, slot: Slot | None) -> LiveTrial | None:
        """The run that has this lease, or had it and is parked."""
        if slot is not None and slot.lease is not None:
            return self._book.run_of(slot.lease) if slot.lease.connection == connection else None
        for study in self._book.studies.values():
            for run in study.runs.values():
                if run.epoch == epoch and run.connection == connection and run.state == "parked":
                    return run
        return None

    def stands(self, connection: int, message: wire.Parked, now: float, out: list[Command]) -> None:
        """Handle the message of a run that waits in a tier."""
        slot = self._book.slot_of(message.epoch)
        run = self.run_of(connection, message.epoch, slot)
        if run is None:
            return
        if message.checkpoint is not None:
            progress.keep(self._book, run, message.checkpoint, now, out)
        if slot is None or slot.lease is None:
            out.extend(_event_log.moved(self._book, run, message.tier, now))
            self._put(run, message, now)
        else:
            lease, slots = slot.lease, self._book.slots_of(slot.lease)
            out.append(_event_log.suspended(self._book, run, message.tier, now))
            self._stopped(lease, run, message, now, out)
            self._put(run, message, now)
            if _came_not_back(lease):
                self._ends.room(slots, run, "could not come back to", now, out)
        save(self._book, run, now, out)
        if message.checkpoint is not None:
            kept = wire.Kept(path=message.checkpoint.path)
            out.append(Send(connection=connection, message=kept))
        if self._book.studies[run.study].draining and run.state == "parked" and run.stores:
            self._memory.evict(run, "disk", now, out)

    def _stopped(
        self, lease: Lease, run: LiveTrial, message: wire.Parked, now: float, out: list[Command]
    ) -> None:
        """End a lease whose run is suspended."""
        spent = message.suspend_seconds * len(lease.devices)
        study = self._book.studies[run.study]
        study.overhead_seconds += spent
        if message.tier == "disk":
            study.measure_leaving(message.suspend_seconds)
        run.suspensions += 1
        run.waiting_since = now
        run.needs(message.held_bytes)
        run.stores = run.moves = True  # as far as it says so
        self._ends.lease(lease, now, out)

    def _put(self, run: LiveTrial, message: wire.Parked, now: float) -> None:
        """Put a run into a tier; a request that it did not carry out is not made again there."""
        asked, run.asked = run.asked, None
        run.state, run.tier = "parked", message.tier
        run.held_bytes, run.host_bytes = message.held_bytes, message.host_bytes
        stays = asked == "host" and message.tier == "resident"
        # Its checkpoint could not be written now: it is tried again when the study drains.
        run.unwritten = message.stores and asked == "disk" and message.tier != "disk"
        run.stores = run.stores and message.stores and asked != "disk"
        run.moves = run.moves and message.moves and not stays
        if message.tier == "disk":
            self._memory.leaves(run, now)
            run.forget_process()
        elif message.tier == "host":
            self._memory.left(run.devices, now)


def _came_not_back(lease: Lease) -> bool:
    """True if a run stops that has not started: its device had no room for what it left there."""
    return lease.from_tier == "host" and not lease.training and not lease.yielding
