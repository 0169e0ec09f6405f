"""Signals that are sent to all processes of a job: nothing that was trained is lost."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import psutil
import pytest

Cli = Callable[..., subprocess.CompletedProcess[str]]
StartCli = Callable[..., Any]

N_TRIALS = 4
EPOCHS = 12

LOADING = f"""
import sys
sys.path.append({str(Path(__file__).parent)!r})
import signal
import lightning as L
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch.utils.data import DataLoader, TensorDataset
from optuna_hermes.lightning import HermesCallback
from tiny import Net

def own(number, frame):
    raise SystemExit(9)

def objective(trial):
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, own)
    hermes = HermesCallback(trial, monitor="val_loss")
    trainer = L.Trainer(
        max_epochs={EPOCHS}, callbacks=[hermes], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, plugins=[SLURMEnvironment()],
    )
    data = TensorDataset(torch.randn(32, 4), torch.zeros(32, dtype=torch.long))
    loader = DataLoader(data, batch_size=2, num_workers=1, persistent_workers=True)
    model = Net(trial.suggest_float("lr", 1e-4, 1e-1, log=True), 0.0)
    trainer.fit(model, loader, DataLoader(data, batch_size=32))
    return hermes.value
"""


def command(storage: str, target: object) -> list[object]:
    return [
        *("optimize", target, "--storage", storage, "--study-name", "s", "--json"),
        *("--n-trials", N_TRIALS, "--devices", "cpu:2", "--seed", 0, "--slice-seconds", 0.3),
    ]


@pytest.fixture
def target(tmp_path: Path) -> str:
    file = tmp_path / "loading.py"
    file.write_text(LOADING)
    return f"{file}:objective"


def reports(storage: str) -> int:
    with contextlib.suppress(Exception):
        study = optuna.load_study(study_name="s", storage=storage)
        return sum(len(trial.intermediate_values) for trial in study.trials)
    return 0


def begun(storage: str) -> int:
    study = optuna.load_study(study_name="s", storage=storage)
    return sum(bool(trial.intermediate_values) for trial in study.trials)


def tree(process: psutil.Process | subprocess.Popen[bytes]) -> list[psutil.Process]:
    top = psutil.Process(process.pid)
    return [top, *top.children(recursive=True)]


def send_to_all(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def broker(runtime_dir: Path) -> psutil.Process:
    return psutil.Process(json.loads((runtime_dir / "broker.json").read_text())["pid"])


def check_that_nothing_was_lost(
    stopped: subprocess.CompletedProcess[str],
    cli: Cli,
    storage: str,
    target: str,
    status: int = 75,
) -> None:
    assert "Traceback" not in stopped.stderr
    assert stopped.returncode == status, stopped.stderr
    states = {trial["state"] for trial in json.loads(stopped.stdout)["trials"]}
    assert "STORED" in states
    assert states <= {"COMPLETE", "STORED"}
    done = cli(*command(storage, target))
    assert done.returncode == 0, done.stderr
    trials = json.loads(done.stdout)["trials"]
    assert [trial["state"] for trial in trials] == ["COMPLETE"] * N_TRIALS
    assert [trial["units"] for trial in trials] == [EPOCHS] * N_TRIALS  # none was trained again


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param([signal.SIGTERM, signal.SIGTERM, signal.SIGCONT], id="SIGTERM"),
        pytest.param([signal.SIGUSR1], id="SIGUSR1", marks=pytest.mark.slow),
        pytest.param([signal.SIGHUP, signal.SIGHUP], id="SIGHUP", marks=pytest.mark.slow),
        pytest.param([signal.SIGUSR2], id="SIGUSR2", marks=pytest.mark.slow),
        pytest.param([signal.SIGINT], id="SIGINT", marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_every_process_suspends_the_study(
    start_cli: StartCli,
    cli: Cli,
    storage_url: str,
    target: str,
    runtime_dir: Path,
    wait_for: Callable[..., Any],
    numbers: list[signal.Signals],
) -> None:
    """Loader processes, handlers of Lightning and of the user, and the broker: all go on."""
    running = start_cli(*command(storage_url, target))
    # Each has something to lose.
    wait_for(lambda: reports(storage_url) > 10 and begun(storage_url) == N_TRIALS, 90)
    everybody = [*tree(running.process), broker(runtime_dir)]
    for number in numbers:
        send_to_all(everybody, number)
    stopped = running.wait(20)
    if signal.SIGTERM in numbers:  # a service that is stopped need not wait for the broker
        wait_for(lambda: not everybody[-1].is_running(), 10)
    status = 130 if signal.SIGINT in numbers else 75
    check_that_nothing_was_lost(stopped, cli, storage_url, target, status)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2], ids=["SIGUSR1", "SIGUSR2"])
def test_a_signal_to_the_driver_alone_suspends_the_study(
    start_cli: StartCli,
    cli: Cli,
    storage_url: str,
    target: str,
    wait_for: Callable[..., Any],
    number: signal.Signals,
) -> None:
    """SLURM's ``--signal`` and submitit send one shortly before a job's time is over."""
    running = start_cli(*command(storage_url, target))
    wait_for(lambda: reports(storage_url) > 10, 90)
    running.process.send_signal(number)
    stopped = running.wait(30)
    assert f"{number.name}: suspending every live trial, within 10 s." in stopped.stderr
    check_that_nothing_was_lost(stopped, cli, storage_url, target)


@pytest.mark.slow
def test_a_job_that_timeout_ends_is_suspended(
    cli: Cli, storage_url: str, target: str, tmp_path: Path, wait_for: Callable[..., Any]
) -> None:
    """coreutils' ``timeout`` sends SIGTERM to its child, and then to the whole group.

    It does so when it is sent SIGTERM itself, too: here once the study trains.
    """
    words = map(str, command(storage_url, target))
    running = subprocess.Popen(
        ["timeout", "--preserve-status", "600", sys.executable, "-m", "optuna_hermes", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for(lambda: reports(storage_url) > 10, 90)
    finally:
        running.terminate()
        out, err = running.communicate(timeout=60)
    stopped = subprocess.CompletedProcess(running.args, running.returncode, out, err)
    check_that_nothing_was_lost(stopped, cli, storage_url, target)


@pytest.mark.slow
def test_what_is_stopped_for_a_while_loses_nothing(
    start_cli: StartCli, storage_url: str, target: str, wait_for: Callable[..., Any]
) -> None:
    """While the driver's group is stopped, as by Ctrl-Z, workers train on."""
    running = start_cli(*command(storage_url, target))
    wait_for(lambda: reports(storage_url) > 4, 90)
    running.send(signal.SIGSTOP)
    before = reports(storage_url)
    wait_for(lambda: reports(storage_url) > before + 5, 60)
    running.send(signal.SIGCONT)
    done = running.wait()
    assert done.returncode == 0, done.stderr
    assert [trial["units"] for trial in json.loads(done.stdout)["trials"]] == [EPOCHS] * N_TRIALS


@pytest.mark.slow
def test_a_signal_ends_a_study_whose_broker_is_stopped(
    start_cli: StartCli,
    cli: Cli,
    storage_url: str,
    target: str,
    runtime_dir: Path,
    wait_for: Callable[..., Any],
) -> None:
    """Within the grace period; trials go on from their checkpoints once the broker goes on."""
    running = start_cli(*command(storage_url, target), "--grace", 6)
    wait_for(lambda: reports(storage_url) > 10, 90)
    stopped = broker(runtime_dir)
    stopped.suspend()
    try:
        running.process.terminate()
        ended = running.wait(15.0)
    finally:
        stopped.resume()
    assert ended.returncode == 75, ended.stderr
    assert "The broker has not answered for" in ended.stderr
    assert "Traceback" not in ended.stderr
    done = cli(*command(storage_url, target))
    assert done.returncode == 0, done.stderr
    assert [trial["state"] for trial in json.loads(done.stdout)["trials"]] == [
        "COMPLETE"
    ] * N_TRIALS


def test_a_driver_that_is_killed_leaves_no_process_behind(
    start_cli: StartCli, storage_url: str, target: str, wait_for: Callable[..., Any]
) -> None:
    """Fork server, workers and their loader processes notice that it has gone."""
    running = start_cli(*command(storage_url, target))
    wait_for(lambda: reports(storage_url) > 4, 90)
    others = tree(running.process)[1:]
    assert len(others) > 2
    running.process.kill()
    running.process.wait()
    _, alive = psutil.wait_procs(others, timeout=15)
    assert alive == []


@pytest.mark.slow
def test_a_terminal_that_is_closed_suspends_the_study(
    cli: Cli, storage_url: str, target: str, tmp_path: Path, wait_for: Callable[..., Any]
) -> None:
    """The kernel sends SIGHUP, and whatever is printed after that is an error: status 75."""
    words = [sys.executable, "-m", "optuna_hermes", *map(str, command(storage_url, target))]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execv(words[0], words)
    os.set_blocking(terminal, False)

    def trains() -> bool:
        with contextlib.suppress(OSError):
            os.read(terminal, 65536)
        return reports(storage_url) > 10

    wait_for(trains, 90)
    os.close(terminal)
    _, ended = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(ended) == 75
    done = cli(*command(storage_url, target))
    assert done.returncode == 0, done.stderr
    assert [trial["units"] for trial in json.loads(done.stdout)["trials"]] == [EPOCHS] * N_TRIALS


@pytest.mark.slow
def test_a_pool_in_an_objective_can_be_terminated(
    cli: Cli, storage_url: str, tmp_path: Path
) -> None:
    """A process that ignores signals to all heeds its parent's, even after a Lightning training."""
    file = tmp_path / "pooled.py"
    file.write_text(
        "import multiprocessing, signal, subprocess\n"
        "def objective(trial):\n"
        "    before = signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "    signal.signal(signal.SIGTERM, before)\n"
        "    with multiprocessing.get_context('fork').Pool(2) as pool:\n"
        "        total = sum(pool.map(abs, range(3)))\n"
        "    sleeper = subprocess.Popen(['sleep', '60'])\n"
        "    sleeper.terminate()\n"
        "    assert sleeper.wait(20) == -signal.SIGTERM\n"
        "    return float(total)\n"
    )
    words = ("--storage", storage_url, "--study-name", "s", "--n-trials", 1, "--devices", "cpu:1")
    done = cli("optimize", f"{file}:objective", *words, deadline_seconds=60)
    assert done.returncode == 0, done.stderr
    study = optuna.load_study(study_name="s", storage=storage_url)
    assert study.best_value == 3.0


@pytest.mark.slow
def test_a_broker_in_the_foreground_ends_and_the_study_is_suspended(
    start_cli: StartCli,
    cli: Cli,
    storage_url: str,
    target: str,
    wait_for: Callable[..., Any],
) -> None:
    """In a container all are sent SIGTERM: the driver suspends with a broker of its own."""
    broker = start_cli("broker", "--devices", "cpu:2")
    running = start_cli(*command(storage_url, target))
    wait_for(lambda: reports(storage_url) > 10, 90)
    send_to_all([psutil.Process(broker.process.pid), *tree(running.process)], signal.SIGTERM)
    assert broker.wait(10).returncode == 0
    check_that_nothing_was_lost(running.wait(30), cli, storage_url, target)
