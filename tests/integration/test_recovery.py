"""Brokers and workers that die, hang or are stopped: real processes, real signals."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import psutil
import pytest

from optuna_hermes import HermesPruner, HermesSampler, _optuna, optimize
from optuna_hermes.broker import Connection, OpenStudy, StudySpec, connect_with_retry
from optuna_hermes.ledger import Ledger, open_ledger

UNITS = 10

BROKER = """
import sys
from optuna_hermes.broker._core import _recovery
from optuna_hermes.broker._core import _watchdog
_watchdog.GRACE_SECONDS = _watchdog.LEAST_GRACE_SECONDS = float(sys.argv[1])
_recovery.RECOVERY_SECONDS = float(sys.argv[2])
from optuna_hermes.broker.__main__ import main
sys.argv = ["broker", "--devices", "cpu:1"]
sys.exit(main())
"""
"""A broker of little patience."""

WORKER = """
import os, signal, sys, time
from optuna_hermes.broker import TrialSession, StudySpec, connect
from optuna_hermes.broker._protocol import Ready
url, number, slice_seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
study = StudySpec(
    key="s", name="s", ledger_url=url, policy="round-robin", slice_seconds=slice_seconds
)
join = lambda: connect("worker")
session = TrialSession(join(), study, Ready(study="s"), reconnect=join)
print("ready", flush=True)
session.wait_for_grant()
print(time.monotonic(), flush=True)
session.begin(number, number)
session.started(can_store=True)
session.report(unit=1, step=1, value=0.5)
"""
"""A worker that gets one lease, says when, and then does what is appended."""

Broker = Callable[..., "subprocess.Popen[bytes]"]
Worker = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start_broker(runtime_dir: Path) -> Iterator[Broker]:
    """``start_broker(grace_seconds=0.5, recovery_seconds=1.0)``: a broker for one CPU slot."""
    started: list[subprocess.Popen[bytes]] = []

    def start(grace_seconds: float = 0.5, recovery_seconds: float = 1.0) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", BROKER, str(grace_seconds), str(recovery_seconds)]
        with (runtime_dir / "broker.log").open("ab") as log:
            started.append(subprocess.Popen(command, stderr=log))
        connect_with_retry("viewer").close()
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[Worker]:
    """``start_worker(number, then, slice_seconds=60)``, back when it waits for its lease."""
    started: list[subprocess.Popen[str]] = []

    def start(number: int, then: str, slice_seconds: float = 60.0) -> subprocess.Popen[str]:
        words = [ledger_url(tmp_path), str(number), str(slice_seconds)]
        command = [sys.executable, "-c", WORKER + then, *words]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert heard(started[-1]) == "ready"
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children():
                child.kill()
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def heard(process: subprocess.Popen[str]) -> str:
    """The next line that a worker says."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def ledger_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'ledger.db'}"


def drive(tmp_path: Path, slice_seconds: float = 60.0) -> Connection:
    """Open the workers' study, as its driver would."""
    study = StudySpec(
        key="s",
        name="s",
        ledger_url=ledger_url(tmp_path),
        policy="round-robin",
        slice_seconds=slice_seconds,
    )
    connection = connect_with_retry("driver")
    connection.send(OpenStudy(study=study, limit=2, max_alive=2))
    connection.ask_status()
    return connection


def broker_pid(runtime_dir: Path) -> int:
    """The broker's process id, 0 while there is none."""
    try:
        return int(json.loads((runtime_dir / "broker.json").read_text())["pid"])
    except (OSError, ValueError):
        return 0


def kill_broker(runtime_dir: Path, wait_for: Callable[..., Any], but: int = 0) -> int:
    """SIGKILL the broker that is there, another one than ``but``."""
    pid: int = wait_for(lambda: broker_pid(runtime_dir) not in (0, but) and broker_pid(runtime_dir))
    wait_for((runtime_dir / "broker.sock").exists)
    os.kill(pid, signal.SIGKILL)
    return pid


def dead(pid: int) -> bool:
    """True if a process has ended, reaped or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def check_leases(ledger: Ledger) -> None:
    """No device was ever held by two, and no lease is left over."""
    by_device: dict[str, list[Any]] = {}
    for lease in ledger.load_leases():
        assert lease.ended is not None
        by_device.setdefault(lease.devices[0], []).append(lease)
    for held in by_device.values():
        for before, after in itertools.pairwise(held):
            assert before.ended <= after.started, f"{before} and {after} overlap"


# -- brokers -----------------------------------------------------------------------------------


class Trace:
    """A file to which every unit that is trained is added, with the process that did."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, number: int, unit: int) -> None:
        with self.path.open("a") as file:
            file.write(f"{number} {unit} {os.getpid()}\n")

    def rows(self) -> list[tuple[int, ...]]:
        text = self.path.read_text() if self.path.exists() else ""
        return [tuple(map(int, line.split())) for line in text.splitlines()]


def objective_with(trace: Trace, gauge: Any = None) -> Callable[[optuna.Trial], float]:
    """A loop that can only wait in the memory of its process."""

    def objective(trial: optuna.Trial) -> float:
        x = trial.suggest_float("x", -1, 1)
        for unit in range(1, UNITS + 1):
            with gauge or contextlib.nullcontext():
                end = time.monotonic() + 0.1
                while time.monotonic() < end:
                    sum(range(1000))
                trace.add(trial.number, unit)
            trial.report(x * x + 1 / unit, unit)
            if trial.should_prune():
                raise optuna.TrialPruned
        return x * x + 1 / UNITS

    return objective


def check_study(study: optuna.Study, trace: Trace, n_trials: int) -> None:
    """Every unit was trained once, and its value is in the study and in the ledger."""
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * n_trials
    done = sorted(row[:2] for row in trace.rows())
    assert done == [(n, unit) for n in range(n_trials) for unit in range(1, UNITS + 1)]
    ledger = open_ledger(_optuna.ledger_url(study))
    curves = ledger.load_curves(_optuna.study_key(study))
    for trial in study.trials:
        reported = tuple(trial.intermediate_values.values())
        assert len(reported) == UNITS
        assert curves[trial.number].values == reported
    assert {run.units for run in ledger.load_trials(_optuna.study_key(study))} == {UNITS}
    check_leases(ledger)
    ledger.close()


def test_four_holders_and_four_parked_trials_outlive_three_brokers(
    storage_url: str, tmp_path: Path, runtime_dir: Path, wait_for: Callable[..., Any]
) -> None:
    """No process ends for it and no unit is trained twice, also when two die in a row."""
    trace = Trace(tmp_path / "trace")
    study = optuna.create_study(storage=storage_url, sampler=HermesSampler(), pruner=HermesPruner())
    for number in range(8):
        study.enqueue_trial({"x": number / 8})
    results: list[Any] = []

    def run() -> None:
        results.append(
            optimize(
                study,
                objective_with(trace),
                n_trials=8,
                devices="cpu:4",
                policy="round-robin",
                slice_seconds=0.1,
                show_progress=False,
            )
        )

    thread = threading.Thread(target=run)
    thread.start()
    wait_for(lambda: len({row[0] for row in trace.rows()}) == 8, 120)
    first = kill_broker(runtime_dir, wait_for)
    second = kill_broker(runtime_dir, wait_for, but=first)
    wait_for(lambda: broker_pid(runtime_dir) not in (0, first, second))
    count = len(trace.rows())
    wait_for(lambda: len(trace.rows()) > count + 8 or results)
    kill_broker(runtime_dir, wait_for, but=second)
    thread.join(120)
    assert results[0].problem is None
    check_study(study, trace, 8)
    homes = {(number, pid) for number, _, pid in trace.rows()}
    assert len(homes) == 8, "every trial stayed in its process"
    assert results[0].switches > 0
    assert results[0].device_seconds >= 8 * UNITS * 0.1


class Gauge:
    """Counts how many train at once, in threads of this process."""

    def __init__(self) -> None:
        self.peak = self._busy = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self._busy += 1
            self.peak = max(self.peak, self._busy)

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._busy -= 1


def test_plain_trials_outlive_two_brokers(
    storage_url: str, tmp_path: Path, runtime_dir: Path, wait_for: Callable[..., Any]
) -> None:
    """Threads of a plain study start the next broker, and never more train than there are slots."""
    trace, gauge = Trace(tmp_path / "trace"), Gauge()
    study = optuna.create_study(
        storage=storage_url,
        sampler=HermesSampler(devices="cpu:2", slice_seconds=0.1, policy="round-robin"),
        pruner=HermesPruner(),
    )
    objective = objective_with(trace, gauge)
    thread = threading.Thread(target=lambda: study.optimize(objective, n_trials=6, n_jobs=4))
    thread.start()
    wait_for(lambda: len(trace.rows()) > 8, 60)
    first = kill_broker(runtime_dir, wait_for)
    count = len(trace.rows())
    wait_for(lambda: len(trace.rows()) > count + 8, 60)
    kill_broker(runtime_dir, wait_for, but=first)
    thread.join(120)
    assert gauge.peak == 2
    check_study(study, trace, 6)


def test_a_process_whose_plain_trials_are_over_has_no_device(
    storage_url: str, runtime_dir: Path, wait_for: Callable[..., Any]
) -> None:
    """As a notebook in whose pause the broker has died: the next cell does not wait for ever."""
    sampler = HermesSampler(devices="cpu:1")
    study = optuna.create_study(storage=storage_url, sampler=sampler, pruner=HermesPruner())

    def run() -> None:
        study.optimize(lambda trial: trial.suggest_float("x", 0.0, 1.0), n_trials=2)

    run()
    kill_broker(runtime_dir, wait_for)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 4


def test_a_broker_that_is_asked_to_end_leaves_its_holders_to_the_next(
    tmp_path: Path, start_broker: Broker, start_worker: Worker, wait_for: Callable[..., Any]
) -> None:
    """SIGTERM, as a restart of a service does: the lease goes on under its epoch."""
    broker = start_broker()
    driver = drive(tmp_path)
    worker = start_worker(0, "signal.pause()")
    heard(worker)
    broker.terminate()
    broker.wait()
    driver.close()
    start_broker()
    holder = wait_for(lambda: shown_holder("cpu:0"))
    assert (holder.pid, holder.epoch, holder.trial) == (worker.pid, 1, 0)


def test_a_new_trial_is_known_to_the_next_broker(
    tmp_path: Path, start_broker: Broker, start_worker: Worker, wait_for: Callable[..., Any]
) -> None:
    """No other process or host may take it, and what it has reported counts once."""
    broker = start_broker()
    driver = drive(tmp_path)
    again = "time.sleep(0.5)\nsession.report(unit=2, step=2, value=0.4)\nsignal.pause()"
    worker = start_worker(0, again)
    heard(worker)
    with contextlib.closing(open_ledger(ledger_url(tmp_path))) as ledger:
        wait_for(lambda: [each.units for each in ledger.load_curves("s").values()] == [2])
        worker.send_signal(signal.SIGSTOP)
        broker.kill()
        broker.wait()
        driver.close()
        start_broker(recovery_seconds=60.0)
        driver = drive(tmp_path)
        worker.send_signal(signal.SIGCONT)
        wait_for(lambda: "reattached" in [each.kind for each in ledger.load_events("s")])
        (trial,) = ledger.load_trials("s")
        assert (trial.state, trial.device_seconds) == ("running", 0.0)
    driver.close()


def shown_holder(device: str) -> Any:
    """Return the holder of a device, as the broker's status shows it."""
    viewer = connect_with_retry("viewer")
    status = viewer.ask_status()
    viewer.close()
    return next(each.holder for each in status.devices if each.id == device)


def test_values_that_a_broker_has_heard_but_not_written_are_told_to_the_next(
    tmp_path: Path, start_broker: Broker, start_worker: Worker, wait_for: Callable[..., Any]
) -> None:
    """The database is locked when a trial ends; its device is given on, and the broker dies."""
    # On a slow machine the first answers late, and comes back late: it is not to be killed.
    broker = start_broker(grace_seconds=60.0)
    driver = drive(tmp_path)
    go = tmp_path / "go"
    ends = (
        f"import pathlib\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\n"
        "session.report(unit=2, step=2, value=0.25, units_left=0)\n"
        "session.end('done')\nsession.close()\nprint('noted', flush=True)\n"
    )
    first = start_worker(0, ends)
    heard(first)
    wait_for(lambda: shown_holder("cpu:0").trial == 0)
    second = start_worker(1, "signal.pause()")
    ledger = open_ledger(ledger_url(tmp_path))
    wait_for(lambda: 0 in ledger.load_curves("s"))
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.db")) as lock:
        lock.execute("BEGIN IMMEDIATE")
        go.touch()
        wait_for(lambda: shown_holder("cpu:0").pid == second.pid)
        broker.kill()
        broker.wait()
    driver.close()
    start_broker(grace_seconds=60.0, recovery_seconds=60.0)
    driver = drive(tmp_path)
    assert heard(first) == "noted"
    assert heard(second)
    wait_for(lambda: ledger.load_curves("s")[0].values == (0.5, 0.25))
    assert ledger.load_trials("s")[0].state == "done"
    ledger.close()
    driver.close()


def test_a_worker_that_is_stopped_when_its_broker_dies_loses_its_device_with_its_life(
    tmp_path: Path, start_broker: Broker, start_worker: Worker, wait_for: Callable[..., Any]
) -> None:
    """It cannot come back, so it is killed before anyone else gets what it has."""
    broker = start_broker()
    driver = drive(tmp_path)
    holder = start_worker(0, "signal.pause()")
    heard(holder)
    wait_for(lambda: shown_holder("cpu:0").trial == 0)
    other = start_worker(1, "signal.pause()")
    holder.send_signal(signal.SIGSTOP)
    broker.kill()
    broker.wait()
    driver.close()
    start_broker()
    driver = drive(tmp_path)
    assert heard(other)
    assert dead(holder.pid)
    driver.close()


def test_a_broker_that_was_stopped_goes_on(
    tmp_path: Path, start_broker: Broker, start_worker: Worker, wait_for: Callable[..., Any]
) -> None:
    """Nobody took its lock meanwhile, and nobody is killed for having been silent to it."""
    broker = start_broker(grace_seconds=3.0)
    driver = drive(tmp_path, slice_seconds=0.1)
    lives = (
        "for unit in range(2, 10000):\n"
        "    time.sleep(0.05)\n"
        "    session.report(unit=unit, step=unit, value=0.5)\n"
    )
    holder = start_worker(0, lives, 0.1)
    heard(holder)
    start_worker(1, "signal.pause()", 0.1)
    wait_for(lambda: shown_holder("cpu:0").state == "yielding")
    broker.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    wait_for(lambda: time.monotonic() > stopped + 4.5)  # longer than its patience
    broker.send_signal(signal.SIGCONT)
    assert shown_holder("cpu:0").pid == holder.pid
    assert not dead(holder.pid)
    driver.close()


# -- workers -----------------------------------------------------------------------------------


def test_the_device_of_a_dead_worker_is_given_on_within_a_second(
    tmp_path: Path, start_broker: Broker, start_worker: Worker, wait_for: Callable[..., Any]
) -> None:
    """From SIGKILL to the next grant, though a child of the dead one holds its socket open."""
    start_broker()
    driver = drive(tmp_path)
    holder = start_worker(0, "os.fork()\nsignal.pause()")
    heard(holder)
    child = wait_for(lambda: psutil.Process(holder.pid).children())[0]
    other = start_worker(1, "signal.pause()")
    wait_for(lambda: shown_holder("cpu:0").trial == 0)
    killed = time.monotonic()
    holder.kill()
    granted = float(heard(other))
    assert granted - killed < 1.0
    assert not dead(child.pid)
    child.kill()
    driver.close()


@pytest.mark.parametrize("hangs", ["stopped", "in a loop"])
def test_a_hung_worker_is_killed_and_its_device_given_on(
    tmp_path: Path,
    start_broker: Broker,
    start_worker: Worker,
    wait_for: Callable[..., Any],
    hangs: str,
) -> None:
    """It was asked to yield and makes no progress: after the grace period it is dead first."""
    start_broker()
    driver = drive(tmp_path, slice_seconds=0.1)
    holder = start_worker(0, "while True: pass", 0.1)
    heard(holder)
    wait_for(lambda: shown_holder("cpu:0").trial == 0)
    if hangs == "stopped":
        holder.send_signal(signal.SIGSTOP)
    other = start_worker(1, "signal.pause()", 0.1)
    heard(other)
    assert dead(holder.pid)
    assert holder.wait() == -signal.SIGKILL
    driver.close()
