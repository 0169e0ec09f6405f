"""Studies on two devices of a simulated host: real processes, a real broker, a real binding."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

from optuna_hermes.broker import Connection, connect
from support import nvml
from support.events import WRONG, events_of, of_kind
from support.nvml import EXCLUSIVE, GPUS, NEEDS_RESET, SLICES, SimulatedHost

pytestmark = [pytest.mark.accelerator, pytest.mark.timeout(600)]

Cli = Callable[..., subprocess.CompletedProcess[str]]

TESTS = Path(__file__).parents[1]
MIB = 1 << 20
SIZE, CONTEXT = 128 * MIB, 16 * MIB

OBJECTIVE = """
import os
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from optuna_hermes.pytorch import suspendable
from support.accelerator import KIND, install

DEVICE = f"{KIND}:0"

def objective(trial):
    install()
    x = trial.suggest_float("x", 0.1, 1.0)
    net = nn.Linear(8, 1).to(DEVICE)
    # Most of what it has; it is moved and stored with the rest.
    net.register_buffer("table", torch.full((MIB_EACH << 18,), x, device=DEVICE))
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    loader = DataLoader(TensorDataset(torch.rand(32, 8)), 8, shuffle=True)
    weights = torch.rand(256, 256, device=DEVICE)
    run = suspendable(trial, net=net, optimizer=optimizer)
    for epoch in run.epochs(EPOCHS):
        for (inputs,) in run.batches(loader):
            loss = ((net(inputs.to(DEVICE)) - x) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for _ in range(4):  # so that a unit takes a while
                weights = torch.softmax(weights @ weights, 1)
        run.report(loss.item())
    # In parts: what all of it takes at once is more than the broker has seen the trial need.
    same = [bool((part == x).all()) for part in net.table.split(1 << 18)]
    assert all(same), "memory of another trial"
    return run.value
"""
PLAIN = """
import torch
from support.accelerator import KIND, install

def objective(trial):
    install()
    total = torch.full((256, 256), trial.suggest_float("x", 0.1, 1.0), device=f"{KIND}:0")
    for unit in range(1, 40):
        for _ in range(10):
            total = torch.softmax(total @ total, 1)
        trial.report(total.sum().item(), unit)
        trial.should_prune()
    return total.sum().item()
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def host(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedHost:
    """The host of all processes that a test starts; its own process is not on it."""
    host = SimulatedHost(tmp_path / "host", memory_bytes=SIZE, linger_seconds=0.5)
    for name, value in host.variables(library).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(TESTS), before])))
    return host


def command(url: str, file: Path, **options: Any) -> list[Any]:
    """A study in turns of less than a second, on both GPUs unless told otherwise."""
    known = {
        "storage": url,
        "study_name": "s",
        "devices": ",".join(GPUS),
        "policy": "round-robin",
        "slice_seconds": 0.7,
        "seed": 1,
    }
    words: list[Any] = ["optimize", f"{file}:objective"]
    for name, value in (known | options).items():
        words += [f"--{name.replace('_', '-')}", value]
    return words


def written(folder: Path, *, mib: int = 40, epochs: int = 30, text: str = OBJECTIVE) -> Path:
    file = folder / "trials.py"
    file.write_text(text.replace("MIB_EACH", str(mib)).replace("EPOCHS", str(epochs)))
    return file


def states(url: str) -> list[str]:
    trials = optuna.load_study(study_name="s", storage=url).trials
    return [trial.state.name for trial in trials]


def test_twelve_live_trials_on_two_devices(
    cli: Cli, host: SimulatedHost, storage_url: str, tmp_path: Path
) -> None:
    """No two fit beside each other: they are evicted, and no allocation of any of them fails.

    There are fewer processes than trials, so most of them wait on disk. The memory of a process
    stays in use for half a second after its end, so a device that was granted before its memory was
    seen to be free would refuse the next trial.
    """
    done = cli(*command(storage_url, written(tmp_path), n_trials=12), deadline_seconds=400)
    assert done.returncode == 0, done.stderr
    assert states(storage_url) == ["COMPLETE"] * 12
    events = events_of(storage_url)
    admitted = [event.at for event in events if event.kind == "admitted"]
    finished = [event.at for event in events if event.kind == "finished"]
    assert (len(admitted), len(finished)) == (12, 12)
    assert max(admitted) < min(finished), "all are live at once"
    left = [detail["tier"] for detail in of_kind(events, "suspended", "evicted")]
    assert left.count("host") + left.count("disk") >= 10
    assert of_kind(events, *WRONG) == []
    granted = of_kind(events, "admitted", "granted")
    assert {detail["device"] for detail in granted} == set(GPUS)
    assert host.refused() == 0
    for gpu in GPUS:
        assert CONTEXT + 40 * MIB < host.most_bytes(gpu) <= SIZE


def test_trials_that_do_not_fit_wait_in_host_memory(
    cli: Cli, host: SimulatedHost, storage_url: str, tmp_path: Path
) -> None:
    """Their processes stay, and their contexts are beside the one that trains."""
    file = written(tmp_path)
    done = cli(*command(storage_url, file, n_trials=3, devices=GPUS[0]), deadline_seconds=200)
    assert done.returncode == 0, done.stderr
    assert states(storage_url) == ["COMPLETE"] * 3
    events = events_of(storage_url)
    left = {detail["tier"] for detail in of_kind(events, "suspended", "evicted")}
    assert "host" in left
    assert "host" in {detail["from"] for detail in of_kind(events, "granted")}
    assert of_kind(events, *WRONG) == []
    assert host.refused() == 0
    assert 3 * CONTEXT + 40 * MIB < host.most_bytes(GPUS[0]) <= SIZE


def test_trials_that_fit_stay_beside_each_other(
    cli: Cli, host: SimulatedHost, storage_url: str, tmp_path: Path
) -> None:
    """Small ones are parked in the memory of their device, and nobody is evicted."""
    file = written(tmp_path, mib=2)
    done = cli(*command(storage_url, file, n_trials=3, devices=GPUS[0]), deadline_seconds=200)
    assert done.returncode == 0, done.stderr
    assert states(storage_url) == ["COMPLETE"] * 3
    events = events_of(storage_url)
    assert {detail["tier"] for detail in of_kind(events, "suspended")} == {"resident"}
    assert of_kind(events, "evicted") == []
    assert host.refused() == 0
    assert host.most_bytes(GPUS[0]) > 3 * CONTEXT
    assert host.most_bytes(GPUS[1]) == 0


def test_status_says_who_holds_what(
    start_cli: Callable[..., Any],
    cli: Cli,
    host: SimulatedHost,
    storage_url: str,
    tmp_path: Path,
    wait_for: Callable[..., Any],
) -> None:
    """Of each process the part of the trial, and the measured rest, which is its context."""
    file = written(tmp_path, mib=8, epochs=100_000)
    running = start_cli(*command(storage_url, file, n_trials=3, devices=GPUS[0]))

    def measured() -> Any:
        viewer = watching()
        if viewer is None:
            return None
        (device,) = viewer.ask_status().devices
        viewer.close()
        parked = [each for each in device.residents if each.measured]
        return (device, parked) if len(parked) == 2 else None

    device, parked = wait_for(measured, 120)
    for each in parked:
        assert (each.tier, each.process_bytes) == ("resident", CONTEXT)
        assert 8 * MIB <= each.held_bytes <= 16 * MIB
        assert host.held(GPUS[0])[each.pid] == each.held_bytes + CONTEXT
    assert device.memory_bytes == SIZE
    shown = cli("status", "--storage", storage_url, "--study-name", "s").stdout
    assert "Memory of GPU-aaaa" in shown
    assert shown.count("16.0 MiB") >= 2
    running.send(2)
    running.wait()


def watching() -> Connection | None:
    try:
        return connect("viewer")
    except Exception:  # there is none yet
        return None


def test_an_exclusive_device_is_handed_on(
    cli: Cli, host: SimulatedHost, storage_url: str, tmp_path: Path
) -> None:
    """Each process has left before the next one comes, though there was room for both."""
    host.set_mode(GPUS[0], EXCLUSIVE)
    file = written(tmp_path, mib=2)
    done = cli(*command(storage_url, file, n_trials=3, devices=GPUS[0]), deadline_seconds=200)
    assert done.returncode == 0, done.stderr
    assert states(storage_url) == ["COMPLETE"] * 3
    events = events_of(storage_url)
    came_from = {detail["from"] for detail in of_kind(events, "granted")}
    assert came_from == {"disk"}, "nobody else's process was there"
    assert of_kind(events, *WRONG) == []


def test_trials_that_cannot_leave_an_exclusive_device_follow_each_other(
    cli: Cli, host: SimulatedHost, storage_url: str, tmp_path: Path
) -> None:
    """An objective that is not suspended to disk keeps the device until its end."""
    host.set_mode(GPUS[0], EXCLUSIVE)
    file = written(tmp_path, text=PLAIN)
    done = cli(*command(storage_url, file, n_trials=3, devices=GPUS[0]), deadline_seconds=200)
    assert done.returncode == 0, done.stderr
    assert states(storage_url) == ["COMPLETE"] * 3


def test_trials_share_a_device_through_mps(
    cli: Cli, host: SimulatedHost, storage_url: str, tmp_path: Path
) -> None:
    """Its server is no stranger, and several processes use an exclusive device through it."""
    program = tmp_path / "nvidia-cuda-mps-server"
    shutil.copy(shutil.which("cat") or "/bin/cat", program)
    with subprocess.Popen([program], stdin=subprocess.PIPE) as server:
        host.set_mode(GPUS[0], EXCLUSIVE)
        host.serve_mps(GPUS[0], server.pid)
        file = written(tmp_path, mib=2)
        done = cli(*command(storage_url, file, n_trials=3, devices=GPUS[0]), deadline_seconds=200)
        server.communicate()
    assert done.returncode == 0, done.stderr
    assert states(storage_url) == ["COMPLETE"] * 3
    events = events_of(storage_url)
    assert {detail["from"] for detail in of_kind(events, "granted")} == {"resident"}
    assert of_kind(events, "evicted", *WRONG) == []
    assert host.most_bytes(GPUS[0]) > 3 * CONTEXT


def test_trials_on_slices_have_one_each(
    cli: Cli, host: SimulatedHost, storage_url: str, tmp_path: Path
) -> None:
    """Slices are devices with memory of their own."""
    host.cut()
    file = written(tmp_path, mib=4)
    done = cli(*command(storage_url, file, n_trials=4, devices=",".join(SLICES)))
    assert done.returncode == 0, done.stderr
    assert states(storage_url) == ["COMPLETE"] * 4
    granted = of_kind(events_of(storage_url), "admitted", "granted")
    assert {detail["device"] for detail in granted} == set(SLICES)
    assert all(host.most_bytes(each) >= CONTEXT + 4 * MIB for each in SLICES)
    assert host.refused() == 0


@pytest.fixture
def stranger() -> Iterator[int]:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.communicate()


def test_a_stranger_is_waited_for(
    start_cli: Callable[..., Any],
    host: SimulatedHost,
    stranger: int,
    storage_url: str,
    tmp_path: Path,
    wait_for: Callable[..., Any],
) -> None:
    """Nobody gets its device, the other one is used, and both are once it is gone."""
    host.take(GPUS[0], stranger, 50 * MIB)
    file = written(tmp_path, mib=8, epochs=60)
    running = start_cli(*command(storage_url, file, n_trials=6))
    wait_for(lambda: host.most_bytes(GPUS[1]) > 0, 120)
    viewer = wait_for(watching)
    problems = {each.id: each.problem for each in viewer.ask_status().devices}
    assert problems[GPUS[0]].startswith(f"process {stranger} (cat of ")
    assert set(host.held(GPUS[0])) == {stranger}
    host.take(GPUS[0], stranger, 0)
    os.kill(stranger, 9)
    wait_for(lambda: len(host.held(GPUS[0])) > 1 or set(host.held(GPUS[0])) - {stranger}, 120)
    viewer.close()
    done = running.wait(400)
    assert done.returncode == 0, done.stderr
    assert states(storage_url) == ["COMPLETE"] * 6
    granted = of_kind(events_of(storage_url), "admitted", "granted")
    assert {detail["device"] for detail in granted} == set(GPUS)


def test_a_device_that_falls_off_the_bus_costs_no_trial(
    start_cli: Callable[..., Any],
    host: SimulatedHost,
    storage_url: str,
    tmp_path: Path,
    wait_for: Callable[..., Any],
) -> None:
    """Its trials go on on the other one, from their checkpoints; it is used again when back."""
    file = written(tmp_path, mib=8, epochs=60)
    running = start_cli(*command(storage_url, file, n_trials=6))
    wait_for(lambda: all(host.most_bytes(gpu) > CONTEXT for gpu in GPUS), 120)
    host.report(GPUS[1], 79, NEEDS_RESET)
    host.lose(GPUS[1])
    viewer = wait_for(watching)
    wait_for(lambda: not viewer.ask_status().devices[1].healthy)
    there = set(host.held(GPUS[1]))
    host.lose(GPUS[1], lost=False)
    wait_for(lambda: viewer.ask_status().devices[1].healthy)
    wait_for(lambda: set(host.held(GPUS[1])) - there, 120)
    viewer.close()
    done = running.wait(400)
    assert done.returncode == 0, done.stderr
    assert states(storage_url) == ["COMPLETE"] * 6
    events = events_of(storage_url)
    assert [event.detail["device"] for event in events if event.kind == "device lost"] == [GPUS[1]]
    assert of_kind(events, "failed") == []
