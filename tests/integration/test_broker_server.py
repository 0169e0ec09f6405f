"""The loop around the broker's state, in this process, with devices that do what a test says."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from optuna_hermes.broker import _election as election
from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._server import Server
from optuna_hermes.model import Device
from optuna_hermes.testing import FakeDevices

PARKED = wire.Parked(epoch=1, tier="resident", suspend_seconds=0.0)
ENDED = wire.Ended(epoch=1, state="done")
BEAT = wire.Beat(epoch=1, batches=1)


async def polls_for(directory: Path, source: FakeDevices, *messages: wire.FromClient) -> int:
    """How often the devices are read for these messages of a client."""
    server = Server(directory, devices="any", source=source, host="h", idle_seconds=None)
    serving = asyncio.ensure_future(server.serve())
    while not election.socket_path(directory).exists():
        await asyncio.sleep(0)
    reader, writer = await asyncio.open_unix_connection(election.socket_path(directory))
    before = len(source.polls)
    hello = wire.Hello(version=wire.VERSION, role="run")
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
    """Where there is no GPU there is nothing to read."""
    source = FakeDevices([Device(id="cpu:0", free=True)])
    assert asyncio.run(polls_for(runtime_dir, source, PARKED, ENDED)) == 0
