"""The broker's mind: an event in, commands out. No clock, no I/O.

``handle`` changes the book and says what has to be done. Times are seconds of one monotonic
clock; what goes into the ledger is turned into wall clock seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._admission import (
    KEPT_CHECKPOINTS,
    admit_run,
    admit_study,
    take_charge,
)
from optuna_hermes.broker._book import (
    Book,
    Client,
    Lease,
    Run,
    Slot,
    Study,
    with_report,
)
from optuna_hermes.broker._dispatch import Dispatcher
from optuna_hermes.broker._events import (
    Command,
    Connected,
    DevicesPolled,
    Disconnected,
    DropCheckpoint,
    EndLease,
    Event,
    Kill,
    NameLease,
    Received,
    Send,
    StudyRead,
    Tick,
    WritesFailed,
)
from optuna_hermes.broker._status import document
from optuna_hermes.ledger._base import CheckpointRecord, EventRecord, ReportRecord
from optuna_hermes.model import Device

GRACE_SECONDS = 300.0
"""A worker that was asked to yield and shows no progress for this long is killed."""


class State:
    """Everything a broker knows, and the rules by which it changes.

    Args:
        host: this host's name.
        devices: the devices it owns.
        wall_offset: wall clock minus monotonic clock, in seconds.
        grace_seconds: see ``GRACE_SECONDS``.
    """

    def __init__(
        self,
        *,
        host: str,
        devices: Sequence[Device],
        wall_offset: float = 0.0,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        self.book = Book(host=host, wall_offset=wall_offset)
        self.book.slots = {device.id: Slot(device=device) for device in devices}
        self._dispatcher = Dispatcher(self.book)
        self._grace_seconds = grace_seconds

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take an event in and say what to do, in order."""
        out: list[Command] = []
        if isinstance(event, Received):
            self._receive(event.connection, event.message, now, out)
        elif isinstance(event, StudyRead):
            self._study_read(event, now, out)
        elif isinstance(event, Connected):
            self.book.clients[event.connection] = Client(pid=event.pid, role=event.role)
        elif isinstance(event, Disconnected):
            self._disconnected(event.connection, now, out)
        elif isinstance(event, DevicesPolled):
            self._polled(event.devices)
            self._dispatcher.schedule(now, out)
        elif isinstance(event, WritesFailed):
            self._writes_failed(event, now)
        elif isinstance(event, Tick):
            self._kill_the_silent(now, out)
            self._dispatcher.schedule(now, out)
        for study in self.book.studies.values():
            if study.problem and not study.draining:
                self._drain(study.spec.key, now, out)
        return out

    def next_wakeup(self, now: float) -> float | None:
        """When a ``Tick`` is due; None if only a message can change anything."""
        times: list[float] = []
        for slot in self.book.slots.values():
            lease = slot.lease
            if lease and lease.yielding:
                times.append(lease.last_progress + self._grace_seconds)
            elif lease and lease.deadline > now:
                times.append(lease.deadline)
        return min(times, default=None)

    @property
    def idle(self) -> bool:
        """Whether nothing would be lost if the broker ended now."""
        return not self.book.clients

    def status(self, now: float, *, runs: bool = True) -> dict[str, Any]:
        """What ``status`` shows, as plain JSON."""
        return document(self.book, now, runs=runs)

    # -- messages ------------------------------------------------------------------------------

    def _receive(
        self, connection: int, message: wire.FromClient, now: float, out: list[Command]
    ) -> None:
        if isinstance(message, wire.Ready):
            self._ready(connection, message, now, out)
        elif isinstance(message, wire.Drain):
            self._drain(message.study, now, out)
        elif isinstance(message, wire.GetStatus):
            status = wire.Status(document=self.status(now, runs=message.runs))
            out.append(Send(connection=connection, message=status))
        elif isinstance(message, wire.Parked):
            self._parked(connection, message, now, out)
        elif hasattr(message, "epoch"):
            self._about_lease(connection, message, now, out)

    def _about_lease(
        self, connection: int, message: wire.FromClient, now: float, out: list[Command]
    ) -> None:
        slot = self.book.slot_of(getattr(message, "epoch", 0))
        if slot is None or slot.lease is None or slot.lease.connection != connection:
            return  # a lease that is over: the message is late
        lease = slot.lease
        lease.last_progress = now
        if isinstance(message, wire.Begin):
            self._begin(lease, message, now, out)
            return
        run = self.book.run_of(lease)
        if run is None:
            return
        if isinstance(message, wire.Training):
            self._training(lease, run, message, now)
        elif isinstance(message, wire.Report):
            self._report(slot, run, message, now, out)
        elif isinstance(message, wire.Saved):
            self._save(run, message.checkpoint, now, out)
            out.append(self.book.record(run, now))
            kept = wire.Kept(path=message.checkpoint.path)
            out.append(Send(connection=connection, message=kept))
        elif isinstance(message, wire.Ended):
            self._ended(slot, run, message, now, out)
        elif isinstance(message, wire.Released):
            self._released(slot, run, message, now, out)

    def _ready(self, connection: int, message: wire.Ready, now: float, out: list[Command]) -> None:
        study = self.book.studies.get(message.study)
        if study is None or study.draining:
            out.append(Send(connection=connection, message=wire.Dismiss()))
            return
        self.book.clients[connection].study = message.study
        study.workers.add(connection)
        study.idle.append(connection)
        self._dispatcher.schedule(now, out)

    def _begin(self, lease: Lease, message: wire.Begin, now: float, out: list[Command]) -> None:
        study = self.book.studies[lease.study]
        run = admit_run(study, message.number, message.trial_id, now)
        run.state, run.device, run.epoch = "running", lease.device, lease.epoch
        run.connection = lease.connection
        if lease.number is None:
            lease.number = message.number
            run.slices += 1
            out.append(NameLease(study=lease.study, epoch=lease.epoch, number=run.number))
        out.append(self.book.record(run, now))

    def _training(self, lease: Lease, run: Run, message: wire.Training, now: float) -> None:
        run.stores = message.stores
        if lease.training:
            return
        lease.training = True
        if lease.from_tier is not None:
            study = self.book.studies[lease.study]
            study.measure(lease.from_tier, now - lease.started)
            study.overhead_seconds += now - lease.started
            study.switches += 1

    def _report(
        self, slot: Slot, run: Run, message: wire.Report, now: float, out: list[Command]
    ) -> None:
        lease = slot.lease
        assert lease is not None
        seconds = run.device_seconds + now - lease.started
        run.units += 1
        run.curve = with_report(run.curve, message.unit, message.step, message.value, seconds)
        out.append(
            ReportRecord(
                study=run.study,
                number=run.number,
                unit=message.unit,
                step=message.step,
                value=message.value,
                device_seconds=seconds,
                at=now + self.book.wall_offset,
            )
        )

    def _save(
        self, run: Run, checkpoint: wire.SavedCheckpoint, now: float, out: list[Command]
    ) -> None:
        for old in run.checkpoints[: 1 - KEPT_CHECKPOINTS]:
            out.append(DropCheckpoint(study=run.study, path=old.path))
        run.checkpoints = [*run.checkpoints[1 - KEPT_CHECKPOINTS :], checkpoint]
        out.append(
            CheckpointRecord(
                study=run.study,
                number=run.number,
                path=checkpoint.path,
                units=checkpoint.units,
                size_bytes=checkpoint.size_bytes,
                sha256=checkpoint.sha256,
                at=now + self.book.wall_offset,
            )
        )

    def _parked(
        self, connection: int, message: wire.Parked, now: float, out: list[Command]
    ) -> None:
        slot = self.book.slot_of(message.epoch)
        run = self._run_parking(connection, message.epoch, slot)
        if run is None:
            return
        if message.checkpoint is not None:
            self._save(run, message.checkpoint, now, out)
        study = self.book.studies[run.study]
        if slot is not None:
            study.overhead_seconds += message.suspend_seconds
            run.suspensions += 1
            run.waiting_since = now
            self._end_lease(slot, run, now, out)
        run.held_bytes = message.held_bytes if message.tier == "resident" else run.held_bytes
        run.tier, run.evicting = message.tier, False
        run.state = "stored" if message.tier == "disk" else "parked"
        if message.tier == "disk":
            run.connection = None
        out.append(self.book.record(run, now))
        if study.draining:
            self._dispatcher.evict(run, out)
        self._dispatcher.schedule(now, out)

    def _run_parking(self, connection: int, epoch: int, slot: Slot | None) -> Run | None:
        """The run that says it has parked: it holds the lease, or was parked and is evicted."""
        if slot is not None and slot.lease is not None:
            return self.book.run_of(slot.lease) if slot.lease.connection == connection else None
        for study in self.book.studies.values():
            for run in study.runs.values():
                if run.epoch == epoch and run.connection == connection and run.state == "parked":
                    return run
        return None

    def _ended(
        self, slot: Slot, run: Run, message: wire.Ended, now: float, out: list[Command]
    ) -> None:
        self._end_lease(slot, run, now, out)
        run.state = "failed" if message.state == "failed" else "done"
        run.tier, run.connection, run.device = None, None, None
        out.append(self.book.record(run, now))
        if message.error:
            out.append(self._event(run, "failed", {"error": message.error}, now))
        self._dispatcher.schedule(now, out)

    def _released(
        self, slot: Slot, run: Run, message: wire.Released, now: float, out: list[Command]
    ) -> None:
        self._end_lease(slot, run, now, out)
        self._lose_process(run, now, out)
        self.book.studies[run.study].problem = message.reason
        out.append(self._event(run, "released", {"reason": message.reason}, now))

    def _drain(self, key: str, now: float, out: list[Command]) -> None:
        study = self.book.studies.get(key)
        if study is None:
            return
        study.draining = True
        self._clear_wants(study)
        for slot in self.book.slots.values():
            if slot.lease and slot.lease.study == key:
                slot.lease.deadline = now
                self._dispatcher.ask_to_yield(slot, now, out)
        for run in study.parked:
            self._dispatcher.evict(run, out)
        for connection in study.idle:
            out.append(Send(connection=connection, message=wire.Dismiss()))
        study.idle.clear()

    # -- studies -------------------------------------------------------------------------------

    def _study_read(self, event: StudyRead, now: float, out: list[Command]) -> None:
        study = admit_study(self.book, event, now)
        connection, message = event.connection, event.message
        if isinstance(message, wire.Register):
            run = admit_run(study, message.number, message.trial_id, now)
            run.connection, run.waiting_since, run.state = connection, now, "pending"
            out.append(self.book.record(run, now))
        elif study.driver is not None and study.driver != connection:
            refused = wire.Refused(reason=self._already_driven(study))
            out.append(Send(connection=connection, message=refused))
            return
        else:
            changed = take_charge(study, connection, message, now)
            out.extend(self.book.record(run, now) for run in changed)
        self.book.clients[connection].study = study.spec.key
        self._dispatcher.schedule(now, out)

    def _already_driven(self, study: Study) -> str:
        pid = self.book.clients[study.driver].pid if study.driver is not None else None
        return (
            f"Study {study.spec.name!r} is already being optimized by process {pid} on this "
            "host: wait for it, or end it with Ctrl-C."
        )

    # -- ends ----------------------------------------------------------------------------------

    def _disconnected(self, connection: int, now: float, out: list[Command]) -> None:
        client = self.book.clients.pop(connection, None)
        for slot in self.book.slots.values():
            lease = slot.lease
            if lease and lease.connection == connection:
                self._holder_died(slot, lease, now, out)
        study = self.book.studies.get(client.study or "") if client else None
        if study is None:
            return
        study.workers.discard(connection)
        if connection in study.idle:
            study.idle.remove(connection)
        for run in study.runs.values():
            if run.connection == connection:
                self._lose_process(run, now, out)
        if study.driver == connection:
            study.driver, study.unstarted = None, 0
        self._clear_wants(study, only_impossible=True)
        if not study.attended:
            del self.book.studies[study.spec.key]
        self._dispatcher.schedule(now, out)

    def _holder_died(self, slot: Slot, lease: Lease, now: float, out: list[Command]) -> None:
        run = self.book.run_of(lease)
        self._end_lease(slot, run, now, out)
        study = self.book.studies[lease.study]
        if run is None:
            if study.unstarted is not None:
                study.unstarted += 1  # the trial was never created
            return
        run.suspensions += 1
        self._lose_process(run, now, out)
        out.append(self._event(run, "process lost", {}, now))

    def _lose_process(self, run: Run, now: float, out: list[Command]) -> None:
        """What is left of a run is its last checkpoint, if there is one."""
        if run.live:
            run.forget_process()
            run.waiting_since = now
            out.append(self.book.record(run, now))

    def _clear_wants(self, study: Study, *, only_impossible: bool = False) -> None:
        for slot in self.book.slots.values():
            want = slot.next
            if want is None or want.study != study.spec.key:
                continue
            run = None if want.number is None else study.runs[want.number]
            possible = study.driver is not None if run is None else study.can_run(run)
            if only_impossible and possible:
                continue
            slot.next = None
            if run is None and study.unstarted is not None:
                study.unstarted += 1

    def _end_lease(self, slot: Slot, run: Run | None, now: float, out: list[Command]) -> None:
        lease = slot.lease
        assert lease is not None
        held = now - lease.started
        self.book.studies[lease.study].spent_seconds += held
        if run is not None:
            run.device_seconds += held
        slot.lease = None
        slot.empty_since = now if slot.next else None
        ended = now + self.book.wall_offset
        out.append(EndLease(study=lease.study, epoch=lease.epoch, ended=ended))

    # -- the rest ------------------------------------------------------------------------------

    def _polled(self, devices: Sequence[Device]) -> None:
        for device in devices:
            if device.id in self.book.slots:
                self.book.slots[device.id].device = device

    def _writes_failed(self, event: WritesFailed, now: float) -> None:
        for slot in self.book.slots.values():
            lease = slot.lease
            if lease is None or lease.epoch not in event.epochs:
                continue
            study = self.book.studies[lease.study]
            study.problem = event.reason
            run = self.book.run_of(lease)
            slot.lease = None
            if run is None:
                study.idle.append(lease.connection)
            else:
                run.state = "parked" if run.curve.units or run.suspensions else "pending"
                run.waiting_since = now

    def _kill_the_silent(self, now: float, out: list[Command]) -> None:
        for slot in self.book.slots.values():
            lease = slot.lease
            if lease is None or not lease.yielding:
                continue
            if now - lease.last_progress < self._grace_seconds:
                continue
            lease.last_progress = now  # another grace period, also for those that may not be killed
            client = self.book.clients.get(lease.connection)
            if client is not None and client.role == "worker":
                out.append(Kill(connection=lease.connection, pid=client.pid))

    def _event(self, run: Run, kind: str, detail: dict[str, Any], now: float) -> EventRecord:
        return EventRecord(
            study=run.study,
            number=run.number,
            kind=kind,
            at=now + self.book.wall_offset,
            detail=detail,
        )
