"""Clients that misuse the broker's socket are disconnected, and other clients notice nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from optuna_hermes.broker import OpenStudy, StudySpec, connect, connect_or_start
from optuna_hermes.broker import _election as election
from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._server import _socket_server
from optuna_hermes.broker._server._server import Server
from optuna_hermes.errors import BrokerConflictError, BrokerError
from optuna_hermes.model import Device
from support import attacks
from support.devices import FakeDevices

ATTACK_SECONDS = 4
DEADLINE = 30.0

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def serve(directory: Path, attack: Callable[[Callable[[], Awaitable[Streams]]], Any]) -> None:
    """Run an attack on a broker in this process, and end both."""

    async def run() -> None:
        source = FakeDevices([Device(id="cpu:0", free=True)])
        server = Server(directory, devices="any", source=source, host="h", idle_seconds=None)
        serving = asyncio.ensure_future(server.serve())
        path = election.socket_path(directory)
        while not path.exists():
            await asyncio.sleep(0)
        try:
            await asyncio.wait_for(attack(lambda: asyncio.open_unix_connection(path)), DEADLINE)
        finally:
            server._stop.set()
            await serving

    asyncio.run(run())


def hello(role: str = "viewer") -> bytes:
    return wire.frame(wire.Hello(version=wire.VERSION, role=role))


async def all_of(reader: asyncio.StreamReader) -> bytes:
    """Read until the broker hangs up, also if it has not read all that it was sent."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(1 << 16):
            data += part
    return data


def warned(caplog: pytest.LogCaptureFixture) -> str:
    """The broker's warning, without whom it is about."""
    assert len(caplog.messages) == 1, caplog.messages
    return re.sub(r"(connection|process) \d+", r"\1 N", caplog.messages[0])


@pytest.mark.parametrize("said", [1, -1])
def test_half_a_frame_is_not_waited_for(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, said: int
) -> None:
    """Whoever begins to say something, and does not end it, is hung up on after a while."""
    monkeypatch.setattr(_socket_server, "FRAME_SECONDS", 0.2)

    async def attack(connect: Callable[[], Awaitable[Streams]]) -> None:
        reader, writer = await connect()
        writer.write(hello() + wire.frame(wire.GetStatus())[:said])
        assert len(await all_of(reader)) > 0, "it was welcome"
        writer.close()

    serve(runtime_dir, attack)
    assert warned(caplog) == (
        "connection N of process N closed: it does not end what it says: if it is stopped "
        "continue it, else end it"
    )


def test_who_says_no_hello_is_not_waited_for(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that stays silent is closed, and so is one that says half a hello."""
    monkeypatch.setattr(_socket_server, "HELLO_SECONDS", 0.2)

    async def attack(connect: Callable[[], Awaitable[Streams]]) -> None:
        for start in (b"", hello()[:-1]):
            reader, writer = await connect()
            writer.write(start)
            assert await all_of(reader) == b""
            writer.close()

    serve(runtime_dir, attack)


def test_connections_without_hello_are_not_piled_up(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One too many is closed at once; those who have said hello do not count."""
    monkeypatch.setattr(_socket_server, "MAX_STRANGERS", 2)

    async def attack(connect: Callable[[], Awaitable[Streams]]) -> None:
        known = [await connect() for _ in range(2)]
        for reader, writer in known:
            writer.write(hello())
            assert len(await reader.readexactly(wire.HEADER_BYTES)) > 0
        silent = [await connect() for _ in range(2)]
        reader, writer = await connect()
        assert await all_of(reader) == b""
        for _, each in [*known, *silent, (reader, writer)]:
            each.close()

    serve(runtime_dir, attack)
    assert warned(caplog) == (
        "process N was turned away: too many connections have said no hello, so end who opens them"
    )


def test_who_reads_nothing_is_hung_up_on(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Messages that a client does not read fill the broker's memory up to a limit only."""
    monkeypatch.setattr(_socket_server, "MAX_UNREAD_BYTES", 1 << 16)

    async def attack(connect: Callable[[], Awaitable[Streams]]) -> None:
        _, writer = await connect()
        writer.write(hello())
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(wire.frame(wire.GetStatus()) * 100)
                await writer.drain()
        writer.close()

    serve(runtime_dir, attack)
    assert warned(caplog) == (
        "connection N of process N closed: it does not read what it is sent: if it is stopped "
        "continue it, else end it"
    )


def test_what_was_said_by_who_is_gone_is_read(runtime_dir: Path) -> None:
    """A broker that was stopped meanwhile answers nobody, and reads to the end."""

    async def run() -> list[wire.FromClient]:
        heard, left = list[wire.FromClient](), asyncio.Event()

        async def talk(connection: int, pid: int) -> None:
            while True:
                heard.append(await sockets.read(connection))
                sockets.send(connection, wire.LeaseEndAck(epoch=1))
                await asyncio.sleep(0)

        async def gone(connection: int, pid: int) -> None:
            left.set()

        nobody: Any = SimpleNamespace(clients={}, holds=lambda connection: False)
        sockets = _socket_server.SocketServer(nobody, talk, gone)
        await sockets.open(runtime_dir)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(election.socket_path(runtime_dir)))
            client.sendall(b"".join(map(wire.frame, said)))
        await asyncio.wait_for(left.wait(), DEADLINE)
        await sockets.close()
        return heard

    said = [wire.Beat(epoch=1), wire.Beat(epoch=2), wire.Ended(epoch=1, state="done")]
    assert asyncio.run(run()) == said


def test_who_is_accepted_at_the_end_is_not_served(runtime_dir: Path) -> None:
    """The broker listens no more: workers of a driver that it served would find none."""

    async def run() -> list[int]:
        served, aborted = list[int](), asyncio.Event()

        async def talk(connection: int, pid: int) -> None:
            served.append(connection)

        nobody: Any = SimpleNamespace(clients={}, holds=lambda connection: False)
        sockets = _socket_server.SocketServer(nobody, talk, talk)
        await sockets.open(runtime_dir)
        await sockets.close()
        ours, theirs = socket.socketpair()
        with theirs:
            transport = SimpleNamespace(abort=aborted.set)
            late: Any = SimpleNamespace(transport=transport, get_extra_info=lambda name: ours)
            with ours:
                await sockets._enter(asyncio.StreamReader(), late)
        assert aborted.is_set()
        return served

    assert asyncio.run(run()) == []


def test_a_process_that_the_broker_cannot_see_is_refused(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of another container could not be killed when it hangs; who only looks is served."""
    monkeypatch.setattr(_socket_server, "peer", lambda sock: (0, os.getuid()))

    async def attack(_: Callable[[], Awaitable[Streams]]) -> None:
        for role in ("driver", "worker", "plain"):
            with pytest.raises(BrokerConflictError) as error:
                await asyncio.to_thread(connect, role)
            assert str(error.value) == (
                "This process is in another container than the broker, which cannot see it: set "
                "shareProcessNamespace, or give it an OPTUNA_HERMES_RUNTIME_DIR of its own."
            )
        (await asyncio.to_thread(connect, "viewer")).close()

    serve(runtime_dir, attack)


def test_what_was_said_instead_of_a_message_is_logged(
    runtime_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever looks after the host reads what a process said, and what to do with it."""

    async def attack(connect: Callable[[], Awaitable[Streams]]) -> None:
        reader, writer = await connect()
        writer.write(hello() + bytes(4))
        await all_of(reader)
        writer.close()

    serve(runtime_dir, attack)
    assert warned(caplog) == (
        f"connection N of process N closed: A frame holds 1 to {wire.MAX_FRAME_BYTES} bytes but "
        "announces 0: the other end is of another version, or no part of optuna-hermes: end it."
    )


def test_an_attack_disturbs_nobody_else(
    runtime_dir: Path, tmp_path: Path, wait_for: Callable[..., Any]
) -> None:
    """A worker keeps its device and its reports, and the broker neither grows nor complains."""
    driver = connect_or_start("driver", "cpu:4")
    broker = psutil.Process(driver.welcome.pid)
    spec = StudySpec(key="honest", name="honest", ledger_url=f"sqlite:///{tmp_path / 'l.db'}")
    driver.send(OpenStudy(study=spec, limit=1, max_alive=1))
    driver.ask_status()
    worker = connect("worker")
    worker.send(wire.Ready(study="honest"))
    grant = worker.receive()
    assert isinstance(grant, wire.Grant)
    worker.send(wire.Begin(epoch=grant.epoch, number=0, trial_id=0))
    worker.send(wire.FirstBatch(epoch=grant.epoch, can_store=False))
    driver.ask_status()
    handles, memory = broker.num_fds(), broker.memory_info().rss
    command = [sys.executable, attacks.__file__, "--seconds"]
    command += [str(ATTACK_SECONDS), "--socket", str(runtime_dir / "broker.sock")]
    attacker = subprocess.Popen([*command, "--folder", str(tmp_path)], stdout=subprocess.PIPE)
    sent = 0
    while attacker.poll() is None:
        sent += 1
        report = wire.Report(epoch=grant.epoch, unit=sent, step=sent, value=0.5)
        worker.send(report)
        driver.ask_status()
    attacker.communicate()
    assert sent > 10
    shown = driver.ask_status()
    mine = next(study for study in shown.studies if study.key == "honest")
    assert mine.problem is None
    wait_for(lambda: _units(driver.ask_status()) == sent)
    wait_for(lambda: broker.num_fds() <= handles + 8)
    assert broker.memory_info().rss < memory + 64_000_000
    assert "Traceback" not in election.log_path(runtime_dir).read_text()
    worker.close()
    driver.close()
    with pytest.raises(BrokerError):
        worker.send(wire.Ready(study="honest"))


def _units(document: Any) -> int:
    mine = next(study for study in document.studies if study.key == "honest")
    return sum(trial.units for trial in mine.trials)
