"""A broker without a process: its state, a clock moved by tests, and lists of messages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core._broker_state import BrokerState
from optuna_hermes.broker._core._event_handler import EventHandler
from optuna_hermes.broker._core._events import (
    ClaimConflict,
    Command,
    Connected,
    DevicesPolled,
    Disconnected,
    Effect,
    Event,
    Kill,
    Observed,
    ProcessExpected,
    Received,
    Send,
    StudyRead,
    Tick,
    Write,
)
from optuna_hermes.broker._core._shared_studies import rows_of_others
from optuna_hermes.broker._served_process import ServedProcess
from optuna_hermes.broker._server._apply_writes import WriterTerms, is_race, write
from optuna_hermes.broker._server._ledgers import study_facts
from optuna_hermes.broker._server._peer_sync import Seen, read_changes, split_conflict
from optuna_hermes.broker._server._succession import holders
from optuna_hermes.ledger._records import LeaseRecord
from optuna_hermes.model import Device
from support.memory_ledger import MemoryLedger


class FakeBroker:
    """Feeds events to an ``EventHandler`` and keeps its commands.

    Args:
        devices: its devices, or a number of CPU slots.
        host_budget_bytes: as in ``BrokerState``.
        context_bytes: as in ``BrokerState``; processes take no memory unless a test says so.
        grace_seconds: as for ``EventHandler``.
        ledger: the ledger that it writes to and reads studies from; a new one if None.
        host: its host's name, and its own name where the ledger is shared.
        powers: whether devices can be powered down; the test reports when that is done.

    Example:
        >>> broker = FakeBroker(devices=1)
        >>> driver = broker.driver(unstarted=2)
        >>> worker = broker.worker()
        >>> grant = broker.last(worker, "Grant")
        >>> grant.devices
        ('cpu:0',)
    """

    def __init__(
        self,
        *,
        devices: int | Sequence[Device] = 2,
        host_budget_bytes: int = 0,
        context_bytes: int = 0,
        grace_seconds: float = 300.0,
        ledger: MemoryLedger | None = None,
        host: str = "h",
        powers: bool = False,
    ) -> None:
        if isinstance(devices, int):
            devices = [Device(id=f"cpu:{i}", free=True) for i in range(devices)]
        state = BrokerState(
            host=host,
            instance=host,
            host_budget_bytes=host_budget_bytes,
            context_bytes=context_bytes,
        )
        self.handler = EventHandler(state, devices, grace_seconds=grace_seconds, powers=powers)
        self.ledger = ledger or MemoryLedger()
        self.terms = WriterTerms(host=host, instance=host)
        self.writes = True
        """Switch for writing to the ledger; False for the last decisions before it dies."""
        self.now = 0.0
        self.log: list[Command] = []
        self.races = 0
        """Number of claim conflicts: another broker was faster."""
        self._connections = 0
        self._seen: dict[str, Seen] = {}

    def apply(self, event: Event) -> list[Command]:
        """Feed one event and keep the commands."""
        commands = self.handler.handle(event, self.now)
        races: list[ClaimConflict] = []
        if self.writes:
            self._write([c for c in commands if not isinstance(c, Effect)], races)
        never = {epoch for race in races for epoch in race.epochs}
        self.log += (command for command in commands if not _is_grant(command, never))
        self.races += len(races)
        for race in races:
            self.apply(race)
        return commands

    def _write(self, records: Sequence[Write], races: list[ClaimConflict]) -> None:
        """Write records as the writer does: together, or the rest after a claim conflict."""
        try:
            with self.ledger.batch():
                for record in records:
                    write(self.ledger, record, self.terms)
        except Exception as error:
            if not is_race(self.ledger, error):
                raise
            race, rest = split_conflict(records[0].study, records, error, self.ledger.last_epoch())
            races.append(race)
            self._write(rest, races)

    def refresh(self, late: float = 0.0) -> None:
        """Read the changes of other hosts, with a heartbeat; they are taken in ``late``."""
        for key, study in list(self.handler.state.studies.items()):
            if study.broker is not None:
                seen = self._seen.get(key, Seen())
                ask = (key, self.handler.presence(self.now), rows_of_others(study), seen, True)
                news, self._seen[key] = read_changes(*ask, self.ledger)
                self.advance(late)
                self.apply(news)

    def advance(self, seconds: float) -> None:
        """Advance the clock, with a tick at each wake-up that the state asks for."""
        end = self.now + seconds
        while True:
            due = self.handler.next_wakeup(self.now)
            if due is None or due > end:
                break
            self.now = max(self.now, due)
            self.apply(Tick())
        self.now = end

    def advance_with_driver(self, seconds: float, answer_seconds: float) -> None:
        """Advance the clock as with GPUs: they are read every 2 s, and before each tick."""
        end = self.now + seconds
        while self.now < end:
            due, polled = self.handler.next_wakeup(self.now), self.now + 2.0
            ticks = due is not None and due <= polled
            self.now = max(self.now, due if due is not None and ticks else polled) + answer_seconds
            devices = tuple(slot.device for slot in self.handler.state.slots.values())
            self.apply(DevicesPolled(devices=devices))
            if ticks:
                self.apply(Tick())
            silent = self.handler.silent(self.now)
            if silent:
                self.apply(Observed(activities=dict.fromkeys(silent, "idle")))

    def poll(self, device: str, **fields: Any) -> list[Command]:
        """Poll a device with changed fields."""
        seen = replace(self.handler.state.slots[device].device, **fields)
        return self.apply(DevicesPolled(devices=(seen,)))

    def connect(self, role: str, *, pid: int | None = None) -> int:
        """Open a connection, of a process whose id is its number unless another is given."""
        self._connections += 1
        connection = self._connections
        self.apply(Connected(connection=connection, pid=pid or connection, role=role))
        return connection

    def driver(
        self,
        *,
        key: str = "s",
        unstarted: int | None = 4,
        max_alive: int = 4,
        params: Mapping[int, dict[str, Any]] | None = None,
        **fields: Any,
    ) -> int:
        """Connect a driver and open a study; ``fields`` are of the message, or of its study.

        Unless a limit is given it is ``unstarted`` beside the trials that there are.
        ``params`` are told before, by the numbers of trials.
        """
        connection = self.connect("driver")
        if params is not None:
            self.say(connection, wire.Describe(study=key, params=dict(params)))
        opens = set(wire.OpenStudy.__struct_fields__)
        opening = {name: value for name, value in fields.items() if name in opens}
        spec = {name: value for name, value in fields.items() if name not in opens}
        study = wire.StudySpec(key=key, name=key, ledger_url="memory:", **spec)
        there = {trial.number for trial in self.ledger.load_trials(key)}
        there.update(opening.get("adopted", ()), opening.get("foreign", ()))
        opening.setdefault("limit", None if unstarted is None else unstarted + len(there))
        message = wire.OpenStudy(study=study, max_alive=max_alive, **opening)
        self.read(connection, message)
        return connection

    def plain(self, number: int, *, key: str = "s", pid: int | None = None, **spec: Any) -> int:
        """Connect and register a trial of a plain Optuna study."""
        connection = self.connect("plain", pid=pid)
        self.register(connection, number, key=key, **spec)
        return connection

    def register(self, connection: int, number: int, *, key: str = "s", **spec: Any) -> None:
        """Register a trial of a plain Optuna study on a given connection."""
        study = wire.StudySpec(key=key, name=key, ledger_url="memory:", **spec)
        self.read(connection, wire.Register(study=study, number=number, trial_id=number))

    def worker(self, *, key: str = "s", pid: int | None = None) -> int:
        """Connect a worker that waits for a trial."""
        connection = self.connect("worker", pid=pid)
        self.say(connection, wire.Ready(study=key))
        return connection

    def resume(self, pid: int, message: wire.Reattach, *, role: str = "worker") -> int:
        """Connect a process of an earlier broker, which sends its lease state."""
        connection = self.connect(role, pid=pid)
        self.read(connection, message)
        return connection

    def read(
        self, connection: int, message: wire.OpenStudy | wire.Register | wire.Reattach
    ) -> list[Command]:
        """Feed a client's message for which its study is read from the ledger."""
        key, ledger = message.study.key, self.ledger
        event = StudyRead(
            connection=connection,
            message=message,
            curves=ledger.load_curves(key),
            **study_facts(key, self.handler.presence(self.now) if ledger.shared else None, ledger),
        )
        return self.apply(event)

    def successor(
        self,
        *,
        known: Sequence[ServedProcess] | None = None,
        devices: Sequence[Device] | None = None,
    ) -> FakeBroker:
        """The next broker after this one is killed.

        Args:
            known: the processes that it expects; all that this one served if None.
            devices: that it owns; those of this one if None.
        """
        if devices is None:
            devices = [slot.device for slot in self.handler.state.slots.values()]
        after = FakeBroker(devices=devices, ledger=self.ledger, host=self.handler.state.host)
        after._connections = 100 + self._connections  # its clients are new connections
        for number, holder in enumerate(holders(self.handler.state) if known is None else known):
            after.apply(ProcessExpected(connection=-1 - number, holder=holder))
        return after

    def end_of(self, pid: int) -> None:
        """Feed the end of a process that the recovering broker expects."""
        recovering = self.handler.state.recovering.items()
        for connection in [key for key, each in recovering if each.holder.pid == pid]:
            self.hang_up(connection)

    def connection_of(self, pid: int) -> int:
        """The connection of a process."""
        clients = self.handler.state.clients.items()
        return next(connection for connection, client in clients if client.pid == pid)

    def say(self, connection: int, message: wire.FromClient) -> list[Command]:
        """Feed a message of a client."""
        return self.apply(Received(connection=connection, message=message))

    def hang_up(self, connection: int) -> list[Command]:
        """Feed the end of a client's connection."""
        return self.apply(Disconnected(connections=(connection,)))

    def sent(self, connection: int) -> list[wire.FromBroker]:
        """All messages sent to a client."""
        sends = (c for c in self.log if isinstance(c, Send))
        return [c.message for c in sends if c.connection == connection]

    def last(self, connection: int, kind: str) -> Any:
        """The last message of a kind sent to a client, None if there was none."""
        of_kind = [m for m in self.sent(connection) if type(m).__name__ == kind]
        return of_kind[-1] if of_kind else None

    def unstarted(self) -> int | None:
        """How many trials of the study may still be created."""
        return self.handler.state.may_open(self.handler.state.studies["s"]).count

    def leases(self) -> list[LeaseRecord]:
        """The leases that it granted."""
        return [c for c in self.log if isinstance(c, LeaseRecord)]

    def killed(self) -> list[int]:
        """Process ids that it ordered to be killed."""
        return [c.pid for c in self.log if isinstance(c, Kill)]

    def check(self) -> None:
        """Check the invariants that hold after any events; raise AssertionError if one fails."""
        epochs = [c.epoch for c in self.log if isinstance(c, LeaseRecord)]
        assert epochs == sorted(set(epochs)), "epochs only grow"
        holders = [lease.number for lease in self.handler.state.leases()]
        named = [number for number in holders if number is not None]
        assert len(named) == len(set(named)), "no trial on two devices"
        state = self.handler.state
        assert state.host_used_bytes <= state.host_budget_bytes, "no more host memory than there is"
        _check_grants(self.log)


def _is_grant(command: Command, epochs: Collection[int]) -> bool:
    """True if a command sends the grant of one of these leases."""
    grant = command.message if isinstance(command, Send) else None
    return isinstance(grant, wire.Grant) and grant.epoch in epochs


def _check_grants(log: Sequence[Command]) -> None:
    committed: set[int] = set()
    for command in log:
        if isinstance(command, LeaseRecord):
            committed.add(command.epoch)
        elif isinstance(command, Send) and isinstance(command.message, wire.Grant):
            assert command.message.epoch in committed, "a grant follows its lease"
