"""JobEnvironment: what SLURM and Kubernetes tell of a process, by its environment."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from optuna_hermes import _job_environment
from optuna_hermes._job_environment import (
    JobEnvironment,
    end_of_job,
    host_name,
    job_environment,
    job_label,
    requeue,
    time_of,
)
from optuna_hermes.broker import _election as election
from optuna_hermes.errors import BrokerError, InvalidInputError, LaunchError
from optuna_hermes.workers import _worker_pool

JOB = {"SLURM_JOB_ID": "17", "SLURMD_NODENAME": "n1"}
TASK = {"SLURM_JOB_ID": "19", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "2"}

Fake = Callable[[str, str], Path]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """``fake(name, script)``: a program of SLURM; the file returned has its arguments."""

    def make(name: str, script: str) -> Path:
        program, told = tmp_path / "bin" / name, tmp_path / f"{name}.told"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho "$@" > {told}\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        return told

    return make


def test_without_a_manager_there_are_defaults() -> None:
    """Nothing is found, and suspending has as long as it ever had."""
    assert job_environment({}) == JobEnvironment(grace_seconds=15.0)
    assert end_of_job(job_environment({})) is None


def test_a_job_of_slurm() -> None:
    """Job, node, restarts and end come from SLURM's variables, and its usual grace period."""
    told = JOB | {
        "SLURM_RESTART_COUNT": "3",
        "SLURM_JOB_START_TIME": "1799990000",
        "SLURM_JOB_END_TIME": "1800000000",
    }
    expected = JobEnvironment(
        job="17",
        node="n1",
        restarts=3,
        began_at=1799990000.0,
        ends_at=1800000000.0,
        grace_seconds=30.0,
    )
    assert job_environment(told) == expected
    assert end_of_job(expected) == 1800000000.0


def test_an_end_of_no_calendar_is_not_known() -> None:
    """A site's number for "never" may be of any length."""
    assert job_environment(JOB | {"SLURM_JOB_END_TIME": 17 * "9"}).ends_at is None


def test_a_task_of_an_array_is_named_as_slurm_names_it() -> None:
    """The id is one that ``scontrol`` takes."""
    assert job_environment(TASK).job == "17_2"
    assert job_label(TASK) == "slurm-17_2"


def test_a_pod_of_kubernetes() -> None:
    """A manifest gives the grace period as a variable."""
    told = {"OPTUNA_HERMES_GRACE_SECONDS": "120"}
    assert job_environment(told) == JobEnvironment(grace_seconds=120.0)


@pytest.mark.parametrize("text", ["soon", "nan", "inf", "0", "-3", "1e9"])
def test_a_grace_period_out_of_range_is_refused(text: str) -> None:
    """The message names the variable."""
    with pytest.raises(InvalidInputError, match=r"\$OPTUNA_HERMES_GRACE_SECONDS must be from 1"):
        job_environment({"OPTUNA_HERMES_GRACE_SECONDS": text})


def test_what_is_no_job_id_names_no_folder() -> None:
    """A variable that anybody may set does not lead out of the runtime directory."""
    assert job_label({"SLURM_JOB_ID": "../../x"}) is None
    assert job_label({"SLURM_JOB_ID": "5", "SLURM_ARRAY_JOB_ID": "a/b"}) == "slurm-5"
    odd = job_environment(
        {"SLURM_JOB_ID": "5", "SLURM_JOB_END_TIME": "x", "SLURM_RESTART_COUNT": "y"}
    )
    assert (odd.ends_at, odd.restarts) == (None, 0)


def test_jobs_on_one_node_are_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names in a ledger differ; what a user has named goes before."""
    monkeypatch.setattr(socket, "gethostname", lambda: "n1")
    named = {**JOB, "OPTUNA_HERMES_HOST": "pod-0"}
    names = [host_name(each) for each in ({}, JOB, TASK, named)]
    assert names == ["n1", "n1-slurm-17", "n1-slurm-17_2", "pod-0"]


def test_each_job_has_a_runtime_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable of one's own counts for more; a session's folder goes with its login."""
    named = election.runtime_dir()
    folder = named / "s"  # short: a socket's path has a limit
    folder.mkdir()
    for name, value in TASK.items():
        monkeypatch.setenv(name, value)
    assert election.runtime_dir() == named
    monkeypatch.delenv(election.RUNTIME_DIR_VARIABLE)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    of_job = election.runtime_dir()
    assert of_job.parent == folder
    assert of_job.name.startswith(f"optuna-hermes-{os.getuid()}-slurm-17_2-")
    monkeypatch.delenv("SLURM_JOB_ID")
    assert "slurm" not in election.runtime_dir().name


def test_hosts_that_share_a_folder_for_temporary_files_share_no_runtime_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As where ``$TMPDIR`` is in a home directory on a server."""
    monkeypatch.delenv(election.RUNTIME_DIR_VARIABLE)
    found = set()
    for host in ("a", "b"):
        monkeypatch.setenv("OPTUNA_HERMES_HOST", host)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        found.add(election._runtime_path())
    assert len(found) == 2
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    assert election._runtime_path() == Path(f"/tmp/optuna-hermes-{os.getuid()}")


def test_folders_that_are_too_long_for_a_socket_share_no_runtime_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Jobs that have one each may have devices of their own, too."""
    monkeypatch.delenv(election.RUNTIME_DIR_VARIABLE)
    found = set()
    for job in ("a", "b"):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / (job * 90)))
        found.add(election._runtime_path())
    assert len(found) == 2
    assert {each.parent for each in found} == {Path("/tmp")}


def test_a_host_without_a_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container that can be read only: the way out is named."""

    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.delenv(election.RUNTIME_DIR_VARIABLE)
    monkeypatch.setattr("tempfile.gettempdir", none)
    monkeypatch.setattr(election, "holder_card", lambda directory: None)
    with pytest.raises(BrokerError, match="set OPTUNA_HERMES_RUNTIME_DIR to a folder of your own"):
        election.runtime_dir()


@pytest.mark.parametrize("left", ["other", None])
def test_a_broker_whose_disk_is_full_is_found(
    left: str | None, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python passes a full folder for temporary files over, or has none left."""

    def gettempdir() -> str:
        if left is None:
            raise FileNotFoundError("No usable temporary directory found")
        return str(runtime_dir / left)

    full, card = runtime_dir / "t", election.holder_card

    def card_of_test(directory: Path) -> dict[str, object] | None:
        return card(directory) if directory.parent == full else None

    monkeypatch.setattr(election, "holder_card", card_of_test)
    monkeypatch.delenv(election.RUNTIME_DIR_VARIABLE)
    monkeypatch.setenv("TMPDIR", str(full))
    monkeypatch.setenv("TMP", str(runtime_dir / "other"))
    monkeypatch.setattr("tempfile.tempdir", str(full))
    directory = election.runtime_dir()
    assert directory.parent == full
    lock = election.RuntimeLock(directory, "cpu:1")
    monkeypatch.setattr("tempfile.gettempdir", gettempdir)
    assert election.runtime_dir() == directory
    lock.release()
    assert election.runtime_dir() == directory, "a process keeps to it"
    election._at_work.cache_clear()
    if left is not None:
        assert election.runtime_dir().parent == runtime_dir / left
    else:
        with pytest.raises(BrokerError, match="No folder for temporary files can be written"):
            election.runtime_dir()


def test_workers_keep_to_one_runtime_directory(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are told of it, whatever an objective makes of the folder for temporary files."""
    monkeypatch.delenv(election.RUNTIME_DIR_VARIABLE)
    monkeypatch.setattr("tempfile.tempdir", str(runtime_dir))
    told = _worker_pool._environment("cpu:1")[election.RUNTIME_DIR_VARIABLE]
    assert told == str(election.runtime_dir())


def test_squeue_is_asked_for_an_end_that_no_variable_has(fake: Fake) -> None:
    """Its local time becomes seconds since 1970."""
    told = fake("squeue", 'test "$SLURM_TIME_FORMAT" = standard && echo 2030-01-02T03:04:05')
    assert end_of_job(job_environment(TASK)) == time.mktime((2030, 1, 2, 3, 4, 5, 0, 0, -1))
    assert told.read_text() == "--noheader --jobs 17_2 --format %e\n"


@pytest.mark.parametrize("script", ["echo NONE", "echo N/A", "exit 1", "exec sleep 30"])
def test_an_end_that_squeue_does_not_know(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    """A job without limit, an error and a controller that does not answer: none stops a study."""
    monkeypatch.setattr(_job_environment, "_ASK_SECONDS", 0.5)
    fake("squeue", script)
    assert end_of_job(job_environment(JOB)) is None
    assert time_of("") is None


def test_without_squeue_the_end_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container of a job may lack SLURM's programs."""
    monkeypatch.setenv("PATH", "/nowhere")
    assert end_of_job(job_environment(JOB)) is None
    with pytest.raises(LaunchError, match="'scontrol' cannot be run here"):
        requeue("17")


def test_a_requeued_job(fake: Fake) -> None:
    """``scontrol`` gets the job's id; where it fails, its message is the reason."""
    told = fake("scontrol", "")
    requeue("17_2")
    assert told.read_text() == "requeue 17_2\n"
    fake("scontrol", "echo 'Requested operation is presently disabled' >&2\nexit 1")
    with pytest.raises(LaunchError, match="requeue 17_2` failed: Requested operation is presently"):
        requeue("17_2")
    fake("scontrol", "exit 4")
    with pytest.raises(LaunchError, match="exit status 4"):
        requeue("17_2")


def test_a_scontrol_that_hangs_is_given_up(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason says how long it was waited for."""
    monkeypatch.setattr(_job_environment, "_ASK_SECONDS", 0.6)
    fake("scontrol", "exec sleep 30")
    with pytest.raises(LaunchError, match="`scontrol` has not answered for 1 s"):
        requeue("17")
