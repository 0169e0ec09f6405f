"""The stand-in driver tells what processes on the simulated accelerator do, as NVML tells of CUDA.

As a script, this file is such a process: ``test_host.py MIB`` takes memory, and waits for its end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from optuna_hermes.model import Device
from support import nvml
from support.nvml import EXCLUSIVE, GPUS, NEEDS_RESET, PROHIBITED, SLICES, SimulatedHost

pytestmark = pytest.mark.accelerator

MIB = 1 << 20
SIZE, CONTEXT = 128 * MIB, 16 * MIB


class Computing:
    """A process that has used a device, or has tried to."""

    def __init__(self, host: SimulatedHost, library: Path, mib: int, shown: str) -> None:
        folders = [str(Path(__file__).parents[1]), *sys.path]
        variables = {"PYTHONPATH": os.pathsep.join(folders), "CUDA_VISIBLE_DEVICES": shown}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(mib)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **host.variables(library), **variables},
            text=True,
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        self.said = self._process.stdout.readline().strip()

    def again(self) -> str:
        """Let it take as much once more; what it says of that."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("again\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def host(tmp_path: Path) -> SimulatedHost:
    return SimulatedHost(tmp_path / "host", memory_bytes=SIZE, linger_seconds=0.5)


@pytest.fixture
def compute(host: SimulatedHost, library: Path) -> Iterator[Callable[..., Computing]]:
    """``compute(mib, shown)`` starts a process that takes memory of the first shown device."""
    started: list[Computing] = []

    def start(mib: int, shown: str = GPUS[0]) -> Computing:
        started.append(Computing(host, library, mib, shown))
        return started[-1]

    yield start
    for each in started:
        each.end()


@pytest.fixture
def poll(host: SimulatedHost, library: Path) -> Iterator[Callable[..., tuple[Device, ...]]]:
    """``poll(*own_pids)`` reads both GPUs as the broker does."""
    source = nvml.RemoteSource(GPUS, library, host.variables(library))
    yield lambda *own_pids: source.poll(own_pids).devices
    source.close()


def test_two_processes_beside_each_other(
    compute: Callable[..., Computing], poll: Callable[..., tuple[Device, ...]]
) -> None:
    """Each is listed with its context and what its allocator has reserved; the sum is in use."""
    first, second = compute(20), compute(40)
    device, other = poll(first.pid, second.pid)
    assert dict(device.processes) == {
        first.pid: CONTEXT + 20 * MIB,
        second.pid: CONTEXT + 40 * MIB,
    }
    assert device.memory_free_bytes == SIZE - 2 * CONTEXT - 60 * MIB
    assert (device.free, device.problem) == (True, "")
    assert (other.processes, other.memory_free_bytes) == ((), SIZE)


def test_a_third_finds_what_two_have_left(
    host: SimulatedHost, compute: Callable[..., Computing]
) -> None:
    """Memory is refused as by CUDA: by another error for the context than for tensors."""
    compute(42)
    assert compute(42).said == "ok"
    assert host.refused() == 0
    assert compute(8).said.startswith("RuntimeError: CUDA error: out of memory")
    assert compute(42, GPUS[1]).again() == "ok"
    assert compute(14, GPUS[1]).said.startswith("OutOfMemoryError")
    assert host.refused() == 2
    assert host.most_bytes(GPUS[0]) == 2 * (CONTEXT + 42 * MIB)


def test_memory_of_a_dead_process_is_free_a_little_later(
    host: SimulatedHost,
    compute: Callable[..., Computing],
    poll: Callable[..., tuple[Device, ...]],
    wait_for: Callable[..., Any],
) -> None:
    """Until then it shows as in use, and nobody gets it: who is quicker is refused."""
    process = compute(80)
    begin = time.monotonic()
    process.end()
    device = poll()[0]
    assert (device.processes, device.memory_free_bytes) == ((), SIZE - CONTEXT - 80 * MIB)
    wait_for(lambda: poll()[0].memory_free_bytes == SIZE)
    assert time.monotonic() - begin >= 0.5
    assert compute(80).said == "ok"


def test_a_stranger_takes_a_device(
    compute: Callable[..., Computing], poll: Callable[..., tuple[Device, ...]]
) -> None:
    """Its process is named, and the device is free when it is gone."""
    stranger = compute(8)
    device, other = poll()
    assert (device.free, other.free) == (False, True)
    assert device.problem.startswith(f"process {stranger.pid} (")
    assert poll(stranger.pid)[0].free
    stranger.end()
    assert poll()[0].free


def test_an_exclusive_device_is_for_one_process(
    host: SimulatedHost,
    compute: Callable[..., Computing],
    poll: Callable[..., tuple[Device, ...]],
) -> None:
    """The second one cannot make a context while the first one has one, whatever is free."""
    host.set_mode(GPUS[0], EXCLUSIVE)
    first = compute(8)
    assert first.said == "ok"
    refused = compute(8).said
    assert refused.startswith("RuntimeError: CUDA error: all CUDA-capable devices are busy")
    assert [device.exclusive for device in poll(first.pid)] == [True, False]
    first.end()
    assert compute(8).said == "ok"


def test_a_prohibited_device_is_for_nobody(
    host: SimulatedHost,
    compute: Callable[..., Computing],
    poll: Callable[..., tuple[Device, ...]],
) -> None:
    """It is healthy, and not granted."""
    host.set_mode(GPUS[0], PROHIBITED)
    assert "busy or unavailable" in compute(8).said
    device = poll()[0]
    assert (device.healthy, device.free) == (True, False)
    assert "compute mode is Prohibited" in device.problem


def test_processes_share_an_exclusive_device_through_mps(
    host: SimulatedHost,
    compute: Callable[..., Computing],
    poll: Callable[..., tuple[Device, ...]],
    tmp_path: Path,
) -> None:
    """The server is listed as the one process; its clients are those that count."""
    program = tmp_path / "nvidia-cuda-mps-server"
    shutil.copy(shutil.which("cat") or "/bin/cat", program)
    with subprocess.Popen([program], stdin=subprocess.PIPE) as server:
        host.set_mode(GPUS[0], EXCLUSIVE)
        host.serve_mps(GPUS[0], server.pid)
        first, second = compute(8), compute(16)
        assert (first.said, second.said) == ("ok", "ok")
        device = poll(first.pid, second.pid)[0]
        assert (device.free, device.exclusive) == (True, False)
        assert dict(device.processes) == {
            first.pid: CONTEXT + 8 * MIB,
            second.pid: CONTEXT + 16 * MIB,
        }
        device = poll(first.pid)[0]
        assert (device.free, device.problem.split(" (")[0]) == (False, f"process {second.pid}")
        server.communicate()


def test_a_process_uses_one_slice_only(
    host: SimulatedHost, compute: Callable[..., Computing], library: Path
) -> None:
    """Of several that are shown it sees the first one, and takes memory of that one."""
    host.cut()
    process = compute(8, ",".join(SLICES))
    assert process.said == "ok"
    source = nvml.RemoteSource(SLICES, library, host.variables(library))
    first, second = source.poll((process.pid,)).devices
    source.close()
    assert dict(first.processes) == {process.pid: CONTEXT + 8 * MIB}
    assert (second.processes, second.memory_free_bytes) == ((), SIZE // 3)
    assert first.part
    assert second.part


def test_a_device_falls_off_the_bus(
    host: SimulatedHost,
    compute: Callable[..., Computing],
    poll: Callable[..., tuple[Device, ...]],
) -> None:
    """Whoever computes there is told so, its driver reports it, and it is back after a reset."""
    process = compute(8)
    assert poll(process.pid)[0].free
    host.report(GPUS[0], 79, NEEDS_RESET)
    host.lose(GPUS[0])
    device, other = poll(process.pid)
    assert (device.healthy, device.lost, other.healthy) == (False, True, True)
    assert process.again().startswith("RuntimeError: CUDA error: GPU is lost")
    process.end()
    host.lose(GPUS[0], lost=False)
    assert poll()[0].healthy


def compute_until_the_end(mib: int) -> None:
    import torch

    from support.accelerator import KIND, install

    install()
    kept = []
    while True:
        try:
            kept.append(torch.zeros(mib * MIB, dtype=torch.uint8, device=f"{KIND}:0"))
            words = "ok"
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            words = f"{type(error).__name__}: {first}"
        print(words, flush=True)
        if not sys.stdin.readline():
            return


if __name__ == "__main__":
    compute_until_the_end(int(sys.argv[1]))
