"""The loop around the broker's state, in this process, with devices that do what a test says."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from optuna_hermes.broker import _election as election
from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._server._server import Server
from optuna_hermes.model import Device
from support.devices import FakeDevices

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
    """Where there is no GPU there is nothing to read."""
    source = FakeDevices([Device(id="cpu:0", free=True)])
    assert asyncio.run(polls_for(runtime_dir, source, PARKED, ENDED)) == 0


class BrokenDevices(FakeDevices):
    """Devices that can be read once."""

    def poll(self, own_pids: Collection[int] = ()) -> tuple[Device, ...]:
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


class HangingDevices(FakeDevices):
    """A driver that answers no call after the first until it is told to."""

    def __init__(self, devices: list[Device]) -> None:
        super().__init__(devices)
        self.answers = threading.Event()

    def poll(self, own_pids: Collection[int] = ()) -> tuple[Device, ...]:
        found = super().poll(own_pids)
        if len(self.polls) > 1:
            assert self.answers.wait(60)
        return found


async def devices_of(directory: Path, source: HangingDevices) -> list[list[dict[str, Any]]]:
    """What a client sees of the devices while their driver hangs, late in that, and after it."""
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
