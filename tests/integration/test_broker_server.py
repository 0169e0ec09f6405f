"""The loop around the broker's state, in this process, with devices that do what a test says."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

import pytest

from optuna_hermes.broker import _election as election
from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._devices._source import Poll
from optuna_hermes.broker._server import _ledgers, _server
from optuna_hermes.broker._server._ledger_reader import LedgerReader
from optuna_hermes.broker._server._ledgers import Ledgers
from optuna_hermes.broker._server._server import Server
from optuna_hermes.ledger import Ledger, ReportRecord, TrialRecord, open_ledger
from optuna_hermes.model import Device
from support.devices import FakeDevices

PARKED = wire.TierChanged(epoch=1, tier="resident", suspend_seconds=0.0)
ENDED = wire.Ended(epoch=1, state="done")
BEAT = wire.Beat(epoch=1)

Answer = TypeVar("Answer")


async def polls_for(directory: Path, source: FakeDevices, *messages: wire.FromClient) -> int:
    """Count the readings of the devices for these messages of a client."""
    server = Server(directory, devices="any", source=source, host="h", idle_seconds=None)
    serving = asyncio.ensure_future(server.serve())
    while not election.socket_path(directory).exists():
        await asyncio.sleep(0)
    reader, writer = await asyncio.open_unix_connection(election.socket_path(directory))
    before = len(source.polls)
    hello = wire.Hello(version=wire.VERSION, role="plain")
    for message in (hello, *messages, wire.GetStatus()):
        writer.write(wire.frame(message))
    answer: wire.FromBroker | None = None
    while not isinstance(answer, wire.Status):
        length = wire.body_length(await reader.readexactly(wire.HEADER_BYTES))
        answer = wire.decode_from_broker(await reader.readexactly(length))
    seen = len(source.polls) - before
    writer.write(wire.frame(wire.Quit()))
    await serving
    writer.close()
    return seen


def test_memory_is_read_when_it_has_changed(runtime_dir: Path) -> None:
    """Whoever stops or ends has the GPUs read before the broker thinks about it; a beat has not."""
    source = FakeDevices([Device(id="GPU-0", kind="gpu", free=True)])
    assert asyncio.run(polls_for(runtime_dir, source, PARKED, BEAT, ENDED, BEAT)) == 2
    assert os.getpid() in source.polls[-1]


def test_cpu_slots_are_not_read(runtime_dir: Path) -> None:
    """Nothing is read where there is no GPU."""
    source = FakeDevices([Device(id="cpu:0", free=True)])
    assert asyncio.run(polls_for(runtime_dir, source, PARKED, ENDED)) == 0


class BrokenDevices(FakeDevices):
    """Devices that can be read once."""

    def poll(self, own_pids: Collection[int] = ()) -> Poll:
        if self.polls:
            raise RuntimeError("no more")
        return super().poll(own_pids)


def test_a_broker_whose_chore_fails_ends_and_says_so(
    runtime_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not serve on without what a chore does: its clients start another one."""
    source = BrokenDevices([Device(id="GPU-0", kind="gpu", free=True)])
    server = Server(runtime_dir, devices="any", source=source, host="h", idle_seconds=1.0)
    asyncio.run(asyncio.wait_for(server.serve(), 60))
    assert "the broker ends" in caplog.text
    assert "no more" in caplog.text


def test_a_broker_without_a_file_to_open_goes_on(
    runtime_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one would soon be as full: what it measured last holds, until it can measure."""

    def none_left(*_: object) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    for name in ("TRIM_SECONDS", "OBSERVE_SECONDS"):
        monkeypatch.setattr(_server, name, 0.1)
    source = FakeDevices([Device(id="cpu:0", free=True)])
    server = Server(runtime_dir, devices="any", source=source, host="h", idle_seconds=1.0)
    monkeypatch.setattr(_server, "available_bytes", none_left)
    monkeypatch.setattr(server._handler, "silent", lambda now: {1: os.getpid()})
    monkeypatch.setattr(server._activities, "measure", none_left)
    asyncio.run(asyncio.wait_for(server.serve(), 60))
    assert "the host's memory cannot be measured: [Errno 24]" in caplog.text
    assert "silent workers cannot be observed: [Errno 24]" in caplog.text
    assert "the broker ends" not in caplog.text


class HangingDevices(FakeDevices):
    """A driver that answers no call after the first until it is told to."""

    def __init__(self, devices: list[Device]) -> None:
        super().__init__(devices)
        self.answers = threading.Event()

    def poll(self, own_pids: Collection[int] = ()) -> Poll:
        found = super().poll(own_pids)
        if len(self.polls) > 1:
            assert self.answers.wait(60)
        return found


async def devices_of(directory: Path, source: HangingDevices) -> list[list[dict[str, Any]]]:
    """Return a client's view of devices while their driver hangs, late in that, and after it."""
    server = Server(directory, devices="any", source=source, host="h", idle_seconds=0.2)
    serving = asyncio.ensure_future(server.serve())
    while not election.socket_path(directory).exists():
        await asyncio.sleep(0)
    reader, writer = await asyncio.open_unix_connection(election.socket_path(directory))
    writer.write(wire.frame(wire.Hello(version=wire.VERSION, role="driver")))

    async def look() -> list[Any]:
        writer.write(wire.frame(wire.GetStatus()))
        while True:
            length = wire.body_length(await reader.readexactly(wire.HEADER_BYTES))
            answer = wire.decode_from_broker(await reader.readexactly(length))
            if isinstance(answer, wire.Status):
                return list(answer.status.devices)

    while len(source.polls) < 2:
        await asyncio.sleep(0.01)
    seen = [await look()]
    while not (later := await look())[0].problem:
        await asyncio.sleep(0.05)
    seen.append(later)
    source.answers.set()
    while (later := await look())[0].problem:
        await asyncio.sleep(0.05)
    seen.append(later)
    writer.write(wire.frame(wire.Quit()))
    await serving
    writer.close()
    return seen


def test_a_driver_that_hangs_holds_up_nobody(runtime_dir: Path) -> None:
    """Clients are served while a call to the driver does not return; status says that it hangs."""
    source = HangingDevices([Device(id="GPU-0", kind="gpu", free=True)])
    seen = asyncio.run(asyncio.wait_for(devices_of(runtime_dir, source), 30))
    hangs = "the NVIDIA driver has not answered for 1 s: try `nvidia-smi`"
    assert [devices[0].problem for devices in seen] == ["", hangs, ""]
    assert all(devices[0].healthy for devices in seen)


class Guest:
    """A client of a broker in this process."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def say(self, message: wire.FromClient) -> None:
        self._writer.write(wire.frame(message))

    def close(self) -> None:
        self._writer.close()

    async def hear(self, kind: type[Answer]) -> Answer:
        """The next message of a kind; others before it are dropped."""
        while True:
            length = wire.body_length(await self._reader.readexactly(wire.HEADER_BYTES))
            answer = wire.decode_from_broker(await self._reader.readexactly(length))
            if isinstance(answer, kind):
                return answer

    async def status(self) -> wire.BrokerStatus:
        self.say(wire.GetStatus())
        return (await self.hear(wire.Status)).status


Meet = Callable[[str], Awaitable[Guest]]
"""Connects a client of a role."""


def served(
    directory: Path,
    source: FakeDevices,
    visit: Callable[[Meet], Awaitable[Answer]],
    idle_seconds: float | None = None,
    **options: Any,
) -> Answer:
    """Serve until a visit is over, and then until the broker ends; return what was seen."""
    path, guests = election.socket_path(directory), list[Guest]()

    async def meet(role: str) -> Guest:
        while not path.exists():
            await asyncio.sleep(0)
        guests.append(Guest(*await asyncio.open_unix_connection(path)))
        guests[-1].say(wire.Hello(version=wire.VERSION, role=role))
        return guests[-1]

    async def both() -> Answer:
        server = Server(
            directory, devices="any", source=source, host="h", idle_seconds=idle_seconds, **options
        )
        serving = asyncio.ensure_future(server.serve())
        seen = await visit(meet)
        if idle_seconds is None:
            (await meet("viewer")).say(wire.Quit())
        for guest in guests:
            guest.close()
        await serving
        return seen

    return asyncio.run(asyncio.wait_for(both(), 60))


def test_files_of_the_runtime_directory_stay_new(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a study that trains for weeks: a cleaner of /tmp takes what was not touched for days."""
    monkeypatch.setattr(_server, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(_server, "TOUCH_SECONDS", 0.05)
    lock = election.RuntimeLock(runtime_dir, "any")

    async def visit(meet: Meet) -> None:
        await (await meet("viewer")).status()
        paths = (runtime_dir, *runtime_dir.iterdir())
        assert {path.name for path in paths[1:]} >= {"broker.lock", "broker.sock", "broker.json"}
        for path in paths:
            os.utime(path, (1.0, 1.0))
        while any(path.stat().st_mtime == 1.0 for path in paths):
            await asyncio.sleep(0.01)

    served(runtime_dir, FakeDevices([Device(id="cpu:0", free=True)]), visit, lock=lock)
    lock.release()


def test_the_host_budget_follows_what_is_free(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker may live for months: what was free when it began says nothing then."""
    free = [1000]
    monkeypatch.setattr(_server, "available_bytes", lambda: free[0])
    monkeypatch.setattr(_server, "TRIM_SECONDS", 0.01)

    async def visit(meet: Meet) -> int:
        guest = await meet("viewer")
        assert (await guest.status()).host_memory.budget_bytes == 400
        free[0] = 100
        while (await guest.status()).host_memory.budget_bytes == 400:
            await asyncio.sleep(0.01)
        return (await guest.status()).host_memory.budget_bytes

    assert served(runtime_dir, FakeDevices([Device(id="cpu:0", free=True)]), visit) == 40


def test_a_broker_that_is_to_end_reads_no_more_often_while_it_is_needed(runtime_dir: Path) -> None:
    """That may be for hours; it ends soon after its last client has left."""
    source = FakeDevices([Device(id="cpu:0", free=True)])

    async def visit(meet: Meet) -> int:
        guest = await meet("driver")
        await guest.status()
        before, end = len(source.polls), time.monotonic() + 0.5
        while time.monotonic() < end:
            await guest.status()
        return len(source.polls) - before

    assert served(runtime_dir, source, visit, idle_seconds=0.0) <= 1


def test_times_are_those_of_the_clock_after_the_machine_has_slept(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The monotonic clock stands still meanwhile: what is written later is of later."""
    source = FakeDevices([Device(id="cpu:0", free=True)])
    url, before = f"sqlite:///{tmp_path}/ledger.db", time.time

    async def visit(meet: Meet) -> None:
        while len(source.polls) < 2:
            await asyncio.sleep(0.01)
        monkeypatch.setattr(time, "time", lambda: before() + 8 * 3600)
        polls = len(source.polls)
        while len(source.polls) < polls + 2:
            await asyncio.sleep(0.01)
        guest = await meet("plain")
        study = wire.StudySpec(key="s", name="s", ledger_url=url)
        guest.say(wire.Register(study=study, number=0, trial_id=0))
        await guest.hear(wire.Grant)

    served(runtime_dir, source, visit, idle_seconds=0.0)
    ledger = open_ledger(url)
    times = [each.at for each in ledger.load_events("s")]
    ledger.close()
    assert min(times) > before() + 7 * 3600


def test_a_study_that_is_served_stays_locked(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ledger without a study at work is closed now and then, also just before one is admitted."""
    look, read, unlocked = Ledgers.close_idle, LedgerReader._read, list[str]()
    looked = asyncio.Event()

    def close_idle(self: Ledgers, served: Collection[str]) -> None:
        look(self, served)
        looked.set()

    async def late(self: LedgerReader, spec: wire.StudySpec) -> dict[str, Any]:
        known = await read(self, spec)
        looked.clear()
        await looked.wait()
        return known

    monkeypatch.setattr(Ledgers, "close_idle", close_idle)
    monkeypatch.setattr(LedgerReader, "_read", late)
    monkeypatch.setattr(Ledger, "unlock_study", lambda self, study: unlocked.append(study))

    async def visit(meet: Meet) -> list[str]:
        guest = await meet("plain")
        study = wire.StudySpec(key="s", name="s", ledger_url=f"sqlite:///{tmp_path}/ledger.db")
        guest.say(wire.Register(study=study, number=0, trial_id=0))
        await guest.hear(wire.Grant)
        return list(unlocked)

    source = FakeDevices([Device(id="cpu:0", free=True)])
    assert served(runtime_dir, source, visit, idle_seconds=0.0) == []


def test_the_curves_of_a_study_are_read_in_parts(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records of other studies wait for one part, not for all that a large study has."""
    load, read = Ledger.load_curves, list[Collection[int] | None]()

    def spied(self: Ledger, study: str, numbers: Collection[int] | None = None) -> Any:
        read.append(numbers)
        return load(self, study, numbers)

    monkeypatch.setattr(Ledger, "load_curves", spied)
    monkeypatch.setattr(_ledgers, "PART_UNITS", 4)
    url = f"sqlite:///{tmp_path}/ledger.db"
    ledger = open_ledger(url)
    for number in range(3):
        ledger.save_trial(
            TrialRecord(study="s", number=number, trial_id=number, state="done", units=1)
        )
        ledger.add_report(
            ReportRecord(
                study="s", number=number, unit=1, step=1, value=0.5, device_seconds=1.0, at=0.0
            )
        )
    ledger.close()

    async def visit(meet: Meet) -> list[int]:
        guest = await meet("plain")
        study = wire.StudySpec(key="s", name="s", ledger_url=url)
        guest.say(wire.Register(study=study, number=3, trial_id=3))
        await guest.hear(wire.Grant)
        (seen,) = (await guest.status()).studies
        return [trial.units for trial in seen.trials]

    source = FakeDevices([Device(id="cpu:0", free=True)])
    assert served(runtime_dir, source, visit, idle_seconds=0.0) == [1, 1, 1, 0]
    assert read == [[0, 1], [2]]


def test_a_message_that_cannot_be_sent_ends_its_connection_only(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason is in the log, and others are told."""
    frame, odd = wire.frame, [True]

    def broken(message: Any) -> bytes:
        if isinstance(message, wire.Status) and odd[0]:
            raise TypeError("Encoding objects of type numpy.float64 is unsupported")
        return frame(message)

    monkeypatch.setattr(wire, "frame", broken)

    async def visit(meet: Meet) -> str:
        guest = await meet("viewer")
        with pytest.raises(EOFError):
            await guest.status()
        odd[0] = False
        return (await (await meet("viewer")).status()).host

    assert served(runtime_dir, FakeDevices([Device(id="cpu:0", free=True)]), visit) == "h"
    assert "closed: Encoding objects" in caplog.text
