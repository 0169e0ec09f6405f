"""Rules of the broker: an event in, commands out. No clock, no I/O.

``handle`` changes the ``Book`` and returns commands. Times are seconds of one monotonic
clock; what goes into the ledger is turned into wall clock seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core import _event_log
from optuna_hermes.broker._core import _failures as failures
from optuna_hermes.broker._core import _losses as losses
from optuna_hermes.broker._core import _progress as progress
from optuna_hermes.broker._core._admission import (
    admit_study,
    admit_trial,
    misplaced,
    other_driver,
    refusal,
    take_charge,
)
from optuna_hermes.broker._core._book import Book, Client, Lease, Slot
from optuna_hermes.broker._core._dispatch import Dispatcher
from optuna_hermes.broker._core._ends import Ends
from optuna_hermes.broker._core._events import (
    Command,
    Connected,
    DevicesPolled,
    Disconnected,
    Event,
    Expected,
    Kill,
    LedgerAway,
    LedgerBack,
    Observed,
    Outrun,
    PowerSwitched,
    Received,
    Refreshed,
    Send,
    StudyRead,
    Tick,
    WritesFailed,
)
from optuna_hermes.broker._core._faults import Faults
from optuna_hermes.broker._core._memory import Memory
from optuna_hermes.broker._core._outage import Outage
from optuna_hermes.broker._core._parking import Suspensions
from optuna_hermes.broker._core._policy_runner import PolicyRunner
from optuna_hermes.broker._core._power import Power
from optuna_hermes.broker._core._prefetch import Prefetch
from optuna_hermes.broker._core._recovery import RECOVERY_SECONDS, Recovery
from optuna_hermes.broker._core._rows import save
from optuna_hermes.broker._core._run import LiveTrial
from optuna_hermes.broker._core._shape import Shape, shape_of
from optuna_hermes.broker._core._sharing import Sharing, recount
from optuna_hermes.broker._core._status import document
from optuna_hermes.broker._core._study import Study
from optuna_hermes.broker._core._watchdog import GRACE_SECONDS, Watchdog, record_heartbeat
from optuna_hermes.broker._core._wishes import Heard, Overrides
from optuna_hermes.ledger._base import HostRecord
from optuna_hermes.model import Device

if TYPE_CHECKING:
    from optuna_hermes.curves import CurveCache

_OfTraining = wire.Beat | wire.Report | wire.Stretches | wire.FirstBatch | wire.Begin
"""Messages of a trial that trains: most messages by far."""
_CHANGES_NO_PLAN = (wire.Beat, wire.Report, wire.Stretches)
"""Messages after which nothing is due earlier."""

STALL_SECONDS = 1.0
"""Delay of a wake-up from which on the broker was stopped, or starved."""


class State:
    """Everything a broker knows, and the rules by which it changes.

    Args:
        host: this host's name.
        devices: the devices it owns.
        instance: this broker, as other hosts know it: no other ever had this name.
        wall_offset: wall clock minus monotonic clock, in seconds.
        host_budget_bytes: host memory that trials may take for what they move off their devices.
        grace_seconds: see ``GRACE_SECONDS``.
        recovery_seconds: see ``RECOVERY_SECONDS``.
        powers: whether there are commands that power devices up and down.
        unpowered: devices that the broker before this one may have powered down.
    """

    def __init__(
        self,
        *,
        host: str,
        devices: Sequence[Device],
        instance: str = "",
        wall_offset: float = 0.0,
        host_budget_bytes: int = 0,
        grace_seconds: float = GRACE_SECONDS,
        recovery_seconds: float = RECOVERY_SECONDS,
        powers: bool = False,
        unpowered: Collection[str] = (),
    ) -> None:
        self.book = Book(
            host=host,
            instance=instance,
            wall_offset=wall_offset,
            host_budget_bytes=host_budget_bytes,
            powers=powers,
        )
        self.book.slots = {device.id: Slot(device=device) for device in devices}
        counsel = PolicyRunner(self.book)
        self._memory = Memory(self.book, counsel.wanted_last)
        self._dispatcher = Dispatcher(self.book, counsel, self._memory)
        self._prefetch = Prefetch(self.book, counsel, self._memory)
        self._ends = Ends(self.book, self._memory)
        self._parking = Suspensions(self.book, self._memory, self._ends)
        self._outage = Outage(self.book, self._ends)
        self._sharing = Sharing(self.book, counsel, self._memory, self._ends)
        self._faults = Faults(self.book, self._memory, self._dispatcher)
        self._watchdog = Watchdog(self.book, grace_seconds)
        self._wakeup: float | None = None
        self._wakeup_known = True
        self._owes_decision = False
        self._recovery = Recovery(self.book, recovery_seconds)
        self._wishes = Overrides(self.book, self._memory, self._dispatcher)
        self._power = Power(self.book)
        self._power.expect_off(unpowered)

    def handle(self, event: Event, now: float) -> list[Command]:
        """Handle an event and return the commands, in order."""
        out: list[Command] = []
        # Most messages do not change the next wake-up: it is not searched again for each.
        self._wakeup_known = self._wakeup_known and (
            isinstance(event, Received) and isinstance(event.message, _CHANGES_NO_PLAN)
        )
        if isinstance(event, (Received, StudyRead)) and self._is_misplaced(event, out):
            pass
        elif isinstance(event, Received):
            self._receive(event.connection, event.message, now, out)
        elif isinstance(event, StudyRead):
            self._study_read(event, now, out)
        elif isinstance(event, Connected):
            self._connected(event)
        elif isinstance(event, Expected):
            self._recovery.expect(event, now)
        elif isinstance(event, Disconnected):
            self._disconnected(event, now, out)
        elif isinstance(event, DevicesPolled):
            self._faults.reported(event.heard, now, out)
            self._faults.polled(event.devices, now, out)
            self._dispatcher.schedule(now, out)
        elif isinstance(event, WritesFailed):
            self._ends.unwritten(event, now, out)
            for study in self.book.studies.values():
                if study.draining:  # what waited for a lease is to leave, or go to disk
                    self._drain(study.spec.key, now, out)
        elif isinstance(event, Refreshed):
            self._sharing.refreshed(event, now, out)
            self._wishes.refreshed(event, now, out)
            self._dispatcher.schedule(now, out)
        elif isinstance(event, Outrun):
            self._sharing.outrun(event, now, out)
            self._dispatcher.schedule(now, out)
        elif isinstance(event, LedgerAway):
            self._outage.begin(event, now)
        elif isinstance(event, LedgerBack):
            self._outage.end(event, now)
            self._dispatcher.schedule(now, out)
        elif isinstance(event, PowerSwitched):
            self._power.switched(event, now, out)
        elif isinstance(event, Observed):
            self._watchdog.observed(event, now)
        elif isinstance(event, Tick):
            self._forgive(now)
            self._outage.look(now)
            self._watchdog.end(now, out)
            self._recovery.end(now, out)
            self._prefetch.look(now, out)
            self._dispatcher.schedule(now, out)
        for study in self.book.studies.values():
            if study.problem and not study.draining:
                self._drain(study.spec.key, now, out)
        self._wishes.heed(now, out)
        self._power.look(now, out)
        return out

    def next_wakeup(self, now: float) -> float | None:
        """Time at which a ``Tick`` is due; None if only a message can change anything."""
        if not self._wakeup_known:
            self._wakeup, self._wakeup_known = self._next_wakeup(now), True
        return self._wakeup

    def _next_wakeup(self, now: float) -> float | None:
        times = [*self._watchdog.wakeups(), *self._outage.wakeups(), *self._recovery.wakeups()]
        for slot in self.book.slots.values():
            if slot.lease is None and slot.reservation and slot.settles_at > now:
                times.append(slot.settles_at)
        for lease in self.book.leases():
            if not lease.yielding and lease.deadline > now and not lease.held:
                due = self._prefetch.due(lease)
                times.append(lease.deadline if due is None else due)
        return min(times, default=None)

    def _forgive(self, now: float) -> None:
        """Begin silences anew after the broker was stopped: its clients were not silent."""
        if self._wakeup is not None and now - self._wakeup > STALL_SECONDS:
            self._watchdog.begin_anew(now)
            self._recovery.begin_anew(now)

    def silent(self, now: float) -> dict[int, int]:
        """Processes of workers that are silent, by their connections."""
        found = {each: self.book.clients.get(each) for each in self._watchdog.watched(now)}
        return {key: each.pid for key, each in found.items() if each and each.role == "worker"}

    @property
    def idle(self) -> bool:
        """True if nothing would be lost if the broker ended now."""
        if self.book.needed or self.book.awaited:
            return False
        return not any(s.power in ("going", "coming") for s in self.book.slots.values())

    def presence(self) -> HostRecord:
        """Presence of this broker, for those of other hosts."""
        return self._sharing.presence()

    @cached_property
    def _shapes(self) -> CurveCache[Shape]:
        from optuna_hermes.curves import CurveCache  # imports NumPy; few ask for shapes

        return CurveCache(shape_of)

    def status(self, now: float, *, trials: bool = True, curves: bool = False) -> dict[str, Any]:
        """Status as plain JSON."""
        problems = {id_: self._memory.problem(slot) for id_, slot in self.book.slots.items()}
        shapes = self._shapes if curves else None
        return document(self.book, now, problems=problems, trials=trials, shapes=shapes)

    # -- messages ------------------------------------------------------------------------------

    def _is_misplaced(self, event: Received | StudyRead, out: list[Command]) -> bool:
        """True if a message is ignored: its client is gone, or may not send it now."""
        client = self.book.clients.get(event.connection)
        if client is None:
            return True
        reason = misplaced(client, event.message)
        if reason is not None:
            out.append(Send(connection=event.connection, message=wire.Refused(reason=reason)))
        return reason is not None

    def _receive(
        self, connection: int, message: wire.FromClient, now: float, out: list[Command]
    ) -> None:
        if isinstance(message, _OfTraining):
            self._about_lease(connection, message, now, out)
        elif isinstance(message, wire.Ready):
            self._ready(connection, message, now, out)
        elif isinstance(message, wire.Drain):
            self._drain(message.study, now, out)
        elif isinstance(message, wire.GiveUp):
            self._give_up(message, now, out)
        elif isinstance(message, wire.Describe):
            described = self.book.clients[connection].described
            described.setdefault(message.study, {}).update(message.params)
        elif isinstance(message, Heard):
            self._wishes.hear(connection, message, now, out)
        elif isinstance(message, wire.GetStatus):
            told = self.status(now, trials=message.trials, curves=message.curves)
            status = wire.Status(document=told)
            out.append(Send(connection=connection, message=status))
        elif isinstance(message, wire.Parked):
            self._parking.stands(connection, message, now, out)
            self._dispatcher.schedule(now, out)
        elif isinstance(message, wire.Saved):
            self._saved(connection, message, now, out)
        elif isinstance(message, (wire.Ended, wire.Released)):  # late or not
            # Answered also if the lease is over: its process waits for this before it leaves.
            out.append(Send(connection=connection, message=wire.Noted(epoch=message.epoch)))
            self._about_lease(connection, message, now, out)

    def _about_lease(
        self,
        connection: int,
        message: _OfTraining | wire.Ended | wire.Released,
        now: float,
        out: list[Command],
    ) -> None:
        slot = self.book.slot_of(message.epoch)
        if slot is None or slot.lease is None or slot.lease.connection != connection:
            return  # a lease that is over: the message is late
        lease = slot.lease
        trial = self.book.trial_of(lease)
        record_heartbeat(lease, trial, now)
        if isinstance(message, wire.Begin):
            progress.begin(self.book, lease, message, now, out)
        elif trial is None:
            return
        elif isinstance(message, wire.FirstBatch):
            progress.training(self.book, lease, trial, message, now)
        elif isinstance(message, wire.Report):
            progress.report(self.book, lease, trial, message, now, out)
        elif isinstance(message, wire.Beat):
            trial.needs(message.memory_bytes)
        elif isinstance(message, wire.Stretches):
            progress.stretches(self.book, trial, message, now, out)
        elif isinstance(message, wire.Ended):
            self._ended(lease, trial, message, now, out)
        elif isinstance(message, wire.Released):
            self._released(lease, trial, message, now, out)

    def _ready(self, connection: int, message: wire.Ready, now: float, out: list[Command]) -> None:
        self._recovery.empty_handed(self.book.clients[connection].pid, now, out)
        study = self.book.studies.get(message.study)
        self.book.clients[connection].study = message.study
        if study is None:  # its driver comes back too, perhaps later than its workers
            self.book.early.setdefault(message.study, []).append(connection)
            return
        if study.draining:
            out.append(Send(connection=connection, message=wire.Dismiss()))
            return
        study.workers.add(connection)
        study.idle.append(connection)
        self._dispatcher.schedule(now, out)

    def _saved(self, connection: int, message: wire.Saved, now: float, out: list[Command]) -> None:
        """Handle a safe checkpoint; its trial may have been parked while it was written."""
        slot = self.book.slot_of(message.epoch)
        trial = self._parking.trial_of(connection, message.epoch, slot)
        if trial is None:
            return
        if slot is not None and slot.lease is not None:
            record_heartbeat(slot.lease, trial, now)
        progress.saved(self.book, connection, trial, message, now, out)

    def _ended(
        self, lease: Lease, trial: LiveTrial, message: wire.Ended, now: float, out: list[Command]
    ) -> None:
        self._ends.lease(lease, now, out)
        self._memory.leaves(trial, now)
        trial.forget_process()
        trial.state, trial.tier = "failed" if message.state == "failed" else "done", None
        save(self.book, trial, now, out)
        out.append(_event_log.ended(self.book, trial, message, now))
        if message.state == "failed":
            failures.failed(self.book, trial, message.error or "", now)
        self._ends.reservations(self.book.studies[trial.study], only_impossible=True)
        self._dispatcher.schedule(now, out)

    def _give_up(self, message: wire.GiveUp, now: float, out: list[Command]) -> None:
        trial = losses.give_up(self.book, message, now, out)
        if trial is not None:
            if trial.state == "failed":
                failures.failed(self.book, trial, message.reason, now)
            self._ends.reservations(self.book.studies[trial.study], only_impossible=True)
            self._dispatcher.schedule(now, out)

    def _released(
        self, lease: Lease, trial: LiveTrial, message: wire.Released, now: float, out: list[Command]
    ) -> None:
        slots = self.book.slots_of(lease)
        self._ends.lease(lease, now, out)
        self._ends.process(trial, now, out)
        if message.outgrown:
            self._ends.room(slots, trial, "outgrew its memory on", now, out)
        else:
            self.book.studies[trial.study].problem = message.reason
            detail = {"reason": message.reason}
            out.append(self.book.event(trial.study, trial.number, "released", detail, now))
        self._dispatcher.schedule(now, out)

    def _drain(self, key: str, now: float, out: list[Command]) -> None:
        study = self.book.studies.get(key)
        if study is None:
            return
        study.draining = True
        self._ends.reservations(study)
        self._ends.withdrawn(study, now, out)
        for lease in self.book.leases():
            if lease.study == key:
                lease.deadline = now
                self._dispatcher.ask_to_yield(lease, now, out)
        for trial in study.trials.values():
            trial.stores = trial.stores or trial.unwritten  # its folder may be there again
        for trial in study.parked:
            self._memory.evict(trial, "disk", now, out)
        for connection in study.idle:
            out.append(Send(connection=connection, message=wire.Dismiss()))
        study.idle.clear()

    # -- studies -------------------------------------------------------------------------------

    def _study_read(self, event: StudyRead, now: float, out: list[Command]) -> None:
        study = admit_study(self.book, event, now, out)
        connection, message = event.connection, event.message
        if isinstance(message, wire.Resume):
            self._resume(study, connection, message, now, out)
            return
        reason = refusal(self.book, study, event)
        if reason is not None:
            pid = other_driver(self.book, study, event)
            refused = wire.Refused(reason=reason, driver_pid=pid)
            out.append(Send(connection=connection, message=refused))
            self._forget_unattended(study)
            return
        if isinstance(message, wire.Register):
            is_new = message.number not in study.trials
            pid, key = self.book.clients[connection].pid, study.spec.key
            self._recovery.empty_handed(pid, now, out, study=key, number=message.number)
            trial = admit_trial(study, message.number, message.trial_id, now)
            trial.connection, trial.waiting_since = connection, now
            trial.state, trial.tier = "pending", None
            if is_new:
                out.append(_event_log.admitted(self.book, trial, now))
            save(self.book, trial, now, out)
        else:
            known = set(study.trials)
            changed = take_charge(self.book, study, connection, message, now)
            new = [trial for trial in changed if trial.number not in known]
            out.extend(_event_log.admitted(self.book, trial, now) for trial in new)
            described = self.book.clients[connection].described.pop(study.spec.key, {})
            for number, params in described.items():
                if number in study.trials:
                    study.trials[number].params = params
            for trial in changed:
                save(self.book, trial, now, out)
            recount(self.book, study)
        self.book.clients[connection].study = study.spec.key
        for ready in self.book.early.pop(study.spec.key, []):
            self._ready(ready, wire.Ready(study=study.spec.key), now, out)
        self._dispatcher.schedule(now, out)

    def _resume(
        self, study: Study, connection: int, message: wire.Resume, now: float, out: list[Command]
    ) -> None:
        """Let a process go on with what an earlier broker gave it, or refuse it."""
        client, key = self.book.clients[connection], study.spec.key
        problem = self._recovery.resume(study, connection, message, now, out)
        if problem is None:
            client.study = key
            if client.role == "worker":
                study.workers.add(connection)
            if message.parked is not None:
                self._parking.stands(connection, message.parked, now, out)
                trial = study.trials[message.number or 0]
                if (
                    message.asked is not None
                    and trial.asked is None
                    and trial.connection is not None
                ):
                    trial.asked, trial.asked_at = message.asked, now
            if study.draining:
                self._drain(key, now, out)
        else:
            reason = f"{problem} Ask for another lease, or end."
            out.append(Send(connection=connection, message=wire.Refused(reason=reason)))
            if client.role == "worker":
                out.append(Kill(connection=connection, pid=client.pid, reason=problem))
            self._forget_unattended(study)
        self._dispatcher.schedule(now, out)

    def _forget_unattended(self, study: Study) -> None:
        if not study.attended:
            del self.book.studies[study.spec.key]

    # -- ends ----------------------------------------------------------------------------------

    def _connected(self, event: Connected) -> None:
        client = Client(pid=event.pid, role=event.role, started=event.started)
        self.book.clients[event.connection] = client
        if client.role in ("worker", "plain"):
            self._recovery.met(client.pid)

    def _disconnected(self, event: Disconnected, now: float, out: list[Command]) -> None:
        # Of clients that leave together only the last one leads to a decision.
        self._owes_decision |= self._gone(event.connection, now, out)
        if self._owes_decision and not event.more:
            self._owes_decision = False
            self._dispatcher.schedule(now, out)

    def _gone(self, connection: int, now: float, out: list[Command]) -> bool:
        """Remove a client; True if devices may have to be decided about."""
        if connection in self.book.awaited:
            self._recovery.gone(connection, now, out)
            return True
        client = self.book.clients.get(connection)
        if client is not None:
            self._lose_trials(connection, now, out)
            del self.book.clients[connection]
            self._recovery.lost(client.pid, now, out)
            self._wishes.gone(client, now, out)
        for key, waiting in list(self.book.early.items()):
            if connection in waiting:
                waiting.remove(connection)
            if not waiting:
                del self.book.early[key]
        study = self.book.studies.get(client.study or "") if client else None
        if study is None:
            return False
        study.workers.discard(connection)
        if connection in study.idle:
            study.idle.remove(connection)
        if study.driver == connection:
            study.driver, study.unstarted = None, 0
            losses.forget(self.book, study, now, out)
        self._ends.reservations(study, only_impossible=True)
        self._forget_unattended(study)
        return True

    def _lose_trials(self, connection: int, now: float, out: list[Command]) -> None:
        """Handle the end of the process that trained a trial, or waited with one."""
        for lease in self.book.leases():
            if lease.connection == connection:
                self._ends.holder(lease, now, out)
        for trial in self.book.trials():
            if trial.connection == connection:
                self._ends.lost(trial, connection, now, out)
