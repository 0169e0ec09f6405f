"""Studies on a real SLURM: limits, preemption, signals, and a node that goes down."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optuna_hermes.ledger import open_ledger
from support.engines import BATCHES, NODES, Cluster, Training, finished, make

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

Cli = Callable[..., Any]
NEEDED = ("--policy", "round-robin", "--slice-seconds", "2", "--seed", "0")


@pytest.fixture
def env(cluster: Cluster, runtime_dir: Path, tmp_path: Path) -> dict[str, str]:
    """Environment of a user's shell: no runtime directory, for that is each job's own."""
    return {
        **cluster.env,
        "OPTUNA_HERMES_RUNTIME_DIR": "",
        "OPTUNA_HERMES_BROKER_IDLE_SECONDS": "1",
        "TMPDIR": str(runtime_dir),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "OMP_NUM_THREADS": "1",
    }


def script(training: Training, url: str, n_trials: int, *more: str) -> str:
    """A batch script of one's own, whose shell the driver takes the place of."""
    words = [
        *(sys.executable, "-m", "optuna_hermes", "optimize", training.target),
        *("--storage", f"'{url}'", "--study-name", "s", "--n-trials", str(n_trials)),
        *("--devices", "cpu:1", "--checkpoint-dir", str(training.folder / "checkpoints")),
        *NEEDED,
        *more,
    ]
    return f"#!/bin/bash\nexec {' '.join(words)}\n"


def launch_words(
    training: Training, url: str, hosts: int, n_trials: int, *options: object
) -> tuple[object, ...]:
    """The command that launches a study on hosts of one slot each."""
    return (
        *("launch", "slurm", "--hosts", hosts, "--cpus", 1, *options, "--"),
        *(training.target, "--storage", url, "--study-name", "s", "--n-trials", n_trials),
        *("--checkpoint-dir", training.folder / "checkpoints", *NEEDED),
    )


def logs(training: Training) -> str:
    return "\n".join(file.read_text() for file in sorted(training.folder.glob("*.log")))


def is_over(cluster: Cluster, job: str) -> bool:
    return set(cluster.states(job)) <= {"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL"}


def test_an_array_over_two_limits_and_a_preemption(
    cluster: Cluster,
    cli: Cli,
    env: dict[str, str],
    postgres_url: str,
    training: Training,
    wait_for: Callable[..., Any],
) -> None:
    """Three nodes, 24 trials: all complete, and no batch is trained twice."""
    make(postgres_url)
    words = launch_words(
        *(training, postgres_url, 3, 24, "--time", 2, "--grace", 20),
        "--sbatch=--exclusive",  # a node each
    )
    launched = cli(*words, cwd=training.folder, env={**env, "TEST_UNITS": "8"})
    assert launched.returncode == 0, launched.stderr
    job = re.search(r"\b\d+\b", launched.stdout + launched.stderr)
    assert job is not None
    wait_for(lambda: len(training.batches()) > 30, 120)
    high = "#!/bin/bash\nsleep 5\n"
    first = cluster.submit(high, "-p", "high", "-N3", "--exclusive", "-o", "/dev/null")
    wait_for(lambda: "COMPLETED" in cluster.states(first), 180)
    wait_for(lambda: is_over(cluster, job[0]), 1200, message=logs(training)[-3000:])
    assert cluster.states(job[0]) == ["COMPLETED"] * 3, logs(training)[-5000:]
    assert finished(postgres_url) == {"COMPLETE": 24}
    assert training.repeated() == {}
    text = logs(training)
    assert text.count("Asking SLURM to begin job") >= 6  # twice each
    assert training.hosts() == {*NODES}


def test_two_tasks_share_a_node(
    cluster: Cluster,
    cli: Cli,
    env: dict[str, str],
    postgres_url: str,
    training: Training,
    wait_for: Callable[..., Any],
) -> None:
    """They are two hosts, each with a broker."""
    make(postgres_url)
    words = launch_words(training, postgres_url, 2, 8, "--sbatch=--nodelist=n1")
    launched = cli(*words, cwd=training.folder, env=env)
    assert launched.returncode == 0, launched.stderr
    wait_for(lambda: finished(postgres_url) == {"COMPLETE": 8}, 300, message=logs(training))
    assert training.repeated() == {}
    with contextlib.closing(open_ledger(postgres_url)) as ledger:
        hosts = {lease.host for lease in ledger.load_leases()}
    assert len(hosts) == 2
    assert training.hosts() == {"n1"}


@pytest.mark.parametrize("option", ["--signal=B:USR1@20", "--signal=B:TERM@20", ""])
def test_a_script_of_ones_own_goes_on_after_its_limit(
    option: str,
    cluster: Cluster,
    env: dict[str, str],
    postgres_url: str,
    training: Training,
    wait_for: Callable[..., Any],
) -> None:
    """With a signal before the limit, or without one: then the driver asks for the job's end."""
    make(postgres_url)
    options = ["--time=2", "--requeue", "--open-mode=append", "-o", f"{training.folder}/job.log"]
    job = cluster.submit(
        script(training, postgres_url, 6, "--requeue", "--grace", "15"),
        *options,
        *([option] if option else []),
        env=env,
    )
    wait_for(lambda: is_over(cluster, job), 900, message=logs(training)[-3000:])
    assert cluster.states(job) == ["COMPLETED"], logs(training)
    assert finished(postgres_url) == {"COMPLETE": 6}
    assert training.repeated() == {}
    assert "Asking SLURM to begin job" in logs(training)


def test_a_node_goes_down(
    cluster: Cluster,
    cli: Cli,
    env: dict[str, str],
    postgres_url: str,
    training: Training,
    wait_for: Callable[..., Any],
) -> None:
    """No signal comes: the batches of one unit of the trial that trained there are repeated."""
    make(postgres_url)
    words = launch_words(training, postgres_url, 3, 12, "--sbatch=--exclusive")
    launched = cli(*words, cwd=training.folder, env=env)
    assert launched.returncode == 0, launched.stderr
    wait_for(lambda: training.hosts() == {*NODES}, 180, message=logs(training))
    begin = time.monotonic()
    cluster.cut_power_of("n2")
    assert time.monotonic() - begin < 20
    wait_for(lambda: finished(postgres_url) == {"COMPLETE": 12}, 600, message=logs(training))
    repeated = training.repeated()
    assert len(repeated) <= 2, repeated
    assert all(count <= BATCHES for count in repeated.values())


def test_a_launch_is_stopped_and_begun_again(
    cluster: Cluster,
    cli: Cli,
    env: dict[str, str],
    postgres_url: str,
    training: Training,
    wait_for: Callable[..., Any],
) -> None:
    """``launch stop`` suspends, ``launch status`` says so, and the same launch goes on."""
    make(postgres_url)
    words = launch_words(training, postgres_url, 2, 4, "--grace", 20)
    at = {"cwd": training.folder, "env": env}
    assert cli(*words, **at).returncode == 0
    wait_for(lambda: len(training.batches()) > 10, 120, message=logs(training))
    assert cli("launch", "stop", "s", **at).returncode == 0
    wait_for(lambda: "running" not in cli("launch", "status", "s", **at).stdout, 60)
    assert "suspended" in cli("launch", "status", "s", **at).stdout
    before = len(training.batches())
    assert os.listdir(training.folder / "checkpoints")
    assert cli(*words, **at).returncode == 0
    wait_for(lambda: finished(postgres_url) == {"COMPLETE": 4}, 300, message=logs(training))
    assert len(training.batches()) > before
    assert training.repeated() == {}
