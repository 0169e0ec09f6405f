"""A host under a manager: jobs of SLURM that end, are begun again, and share a node."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optuna_hermes.ledger import open_ledger
from support.objectives import loop

Cli = Callable[..., subprocess.CompletedProcess[str]]
StartCli = Callable[..., Any]

N_TRIALS, UNITS = 4, 12

OBJECTIVE = loop(UNITS, noted="os.environ.get('SLURM_JOB_ID'), trial.number, epoch")


@pytest.fixture
def target(tmp_path: Path) -> str:
    file = tmp_path / "slow.py"
    file.write_text(OBJECTIVE)
    return f"{file}:objective"


@pytest.fixture
def slurm(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """``slurm(squeue=, scontrol=)``: an environment with these scripts as SLURM's programs."""

    def make(**programs: str) -> dict[str, str]:
        folder = tmp_path / "slurm"
        folder.mkdir(exist_ok=True)
        for name, script in programs.items():
            (folder / name).write_text(f'#!/bin/sh\necho "$@" >> {folder}/{name}.told\n{script}\n')
            (folder / name).chmod(0o755)
        return {"PATH": f"{folder}:{os.environ['PATH']}"}

    return make


def command(storage: str, target: str, *more: object) -> list[object]:
    return [
        *("optimize", target, "--storage", storage, "--study-name", "s", "--json"),
        *("--n-trials", N_TRIALS, "--devices", "cpu:2", "--seed", 0, "--slice-seconds", 0.3),
        *("--policy", "round-robin", *more),
    ]


def trained(tmp_path: Path) -> list[tuple[str, str, str]]:
    """Job, trial and epoch of each unit, in the order in which they were trained."""
    file = tmp_path / "trained"
    lines = file.read_text().splitlines() if file.exists() else []
    return [tuple(line.split()) for line in lines]  # type: ignore[misc]


def check_finished(tmp_path: Path, *documents: str) -> None:
    """Every trial is complete, and no unit of any was trained twice."""
    for document in documents:
        states = [trial["state"] for trial in json.loads(document)["trials"]]
        assert states == ["COMPLETE"] * N_TRIALS
    units = Counter((trial, epoch) for _, trial, epoch in trained(tmp_path))
    assert set(units.values()) == {1}
    assert len(units) == N_TRIALS * UNITS


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_that_ends_is_suspended_before_and_begun_again(
    start_cli: StartCli,
    cli: Cli,
    storage_url: str,
    target: str,
    tmp_path: Path,
    slurm: Callable[..., dict[str, str]],
) -> None:
    """Without any signal: its end is asked of ``squeue``, and ``scontrol`` is told at last."""
    job = {"SLURM_JOB_ID": "19", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "2"}
    (tmp_path / "slow.py").write_text(OBJECTIVE.replace("torch.ones(4,", "torch.ones(40,"))
    words = command(storage_url, target)
    told = tmp_path / "slurm/scontrol.told"
    for seconds in (
        15.0,
        60.0,
        240.0,
    ):  # where others compute too, the objective is imported slowly
        ends_at = time.time() + seconds + 10.0
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(ends_at))
        job |= slurm(squeue=f"echo {clock}", scontrol="")
        running = start_cli(*words, "--grace", 10, "--requeue", env=job)
        stopped = running.wait(seconds + 60.0)
        assert time.time() < ends_at
        assert stopped.returncode == 75, stopped.stderr
        assert "Job 17_2 of SLURM: all is suspended 10 s before its end" in stopped.stderr
        assert stopped.stderr.endswith("Asking SLURM to begin job 17_2 again.\n")
        assert told.read_text().splitlines()[-1] == "requeue 17_2"
        if trained(tmp_path):
            break
    assert re.search(r"Job 17_2 ends in \d+ s\. Suspending every live trial\.", stopped.stderr)
    assert "STORED" in {trial["state"] for trial in json.loads(stopped.stdout)["trials"]}
    done = cli(*words, env=slurm())
    assert done.returncode == 0, done.stderr
    check_finished(tmp_path, done.stdout)


def test_a_requeue_that_fails_is_said(
    start_cli: StartCli,
    storage_url: str,
    target: str,
    tmp_path: Path,
    slurm: Callable[..., dict[str, str]],
    wait_for: Callable[..., Any],
) -> None:
    """The status is that of any suspended study: run the same command again."""
    job = {"SLURM_JOB_ID": "17", "SLURM_JOB_END_TIME": f"{time.time() + 3600:.0f}"}
    job |= slurm(scontrol="echo 'Requeue is disabled' >&2; exit 1", squeue="exit 1")
    running = start_cli(*command(storage_url, target, "--requeue"), env=job)
    wait_for(lambda: len(trained(tmp_path)) > 2, 120)
    running.process.send_signal(signal.SIGUSR1)
    stopped = running.wait(60)
    assert stopped.returncode == 75, stopped.stderr
    assert "SIGUSR1: suspending every live trial, within 25 s." in stopped.stderr
    assert stopped.stderr.endswith(
        "Submit the job again yourself: `scontrol requeue 17` failed: Requeue is disabled\n"
    )
    assert not (tmp_path / "slurm/squeue.told").exists()


def test_a_requeue_outside_of_slurm_is_bad_input(
    cli: Cli, storage_url: str, target: str, tmp_path: Path
) -> None:
    """It is found out before anything is begun, and leaves no study."""
    done = cli(*command(storage_url, target, "--requeue"))
    assert done.returncode == 2
    assert done.stderr == (
        "error: --requeue must be given in a job of SLURM but $SLURM_JOB_ID is not set: leave it "
        "out.\n"
    )
    assert not (tmp_path / "study.db").exists()


def test_two_tasks_of_an_array_on_one_node_are_two_hosts(
    start_cli: StartCli,
    postgres_url: str,
    target: str,
    tmp_path: Path,
    runtime_dir: Path,
    wait_for: Callable[..., Any],
) -> None:
    """Each has a broker of its own, and every unit is trained by one of them, once."""
    # The host that is there first trains nothing before the other one has a trial too.
    waits = 'while not Path(__file__).with_name("begin").exists(): time.sleep(0.01)'
    (tmp_path / "slow.py").write_text(OBJECTIVE.replace("time.sleep(0.05)", waits))
    running = []
    for task in (1, 2):
        job = {
            "SLURM_JOB_ID": f"{17 + task}",
            "SLURM_ARRAY_JOB_ID": "17",
            "SLURM_ARRAY_TASK_ID": f"{task}",
            "SLURM_JOB_END_TIME": f"{time.time() + 3600:.0f}",
            "OPTUNA_HERMES_RUNTIME_DIR": "",
            "OPTUNA_HERMES_BROKER_IDLE_SECONDS": "0.5",
            "TMPDIR": str(runtime_dir),
        }
        more = ("--checkpoint-dir", tmp_path / "checkpoints", "--devices", "cpu:1")
        running.append(start_cli(*command(postgres_url, target, *more), env=job))
    with contextlib.closing(open_ledger(postgres_url)) as ledger:
        wait_for(lambda: len({lease.host for lease in ledger.load_leases(live=True)}) == 2, 120)
    (tmp_path / "begin").touch()
    done = [each.wait(240) for each in running]
    assert [each.returncode for each in done] == [0, 0], done[0].stderr + done[1].stderr
    check_finished(tmp_path, *(each.stdout for each in done))
    assert {job for job, _, _ in trained(tmp_path)} == {"18", "19"}
    with contextlib.closing(open_ledger(postgres_url)) as ledger:
        hosts = {lease.host for lease in ledger.load_leases()}
    assert hosts == {f"{socket.gethostname()}-slurm-17_{task}" for task in (1, 2)}
