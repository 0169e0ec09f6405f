"""The findings of ``doctor``, and its hints."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest

from optuna_hermes import _optuna
from optuna_hermes.cli import run
from optuna_hermes.cli._checks import _software
from optuna_hermes.cli._checks._host import kind_of, limits, shared_memory, slurm, working_folder
from optuna_hermes.ledger import (
    SCHEMA_VERSION,
    CheckpointRecord,
    TrialRecord,
    open_ledger,
    schema_version,
)
from optuna_hermes.model import Checkpoint

STORAGE = ("--storage", "sqlite:///s.db")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to work in; Optuna's verbosity is put back."""
    monkeypatch.chdir(tmp_path)
    verbosity = optuna.logging.get_verbosity()
    yield tmp_path
    optuna.logging.set_verbosity(verbosity)


def checks(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> dict[str, Any]:
    """Return the checks of ``doctor``, by name."""
    assert run(["doctor", *words, "--json"]) == status
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is (status == 0)
    return {check["name"]: check for check in document["checks"]}


def test_it_looks_at_everything(capsys: pytest.CaptureFixture[str]) -> None:
    """Versions, devices, folders, broker, disk and memory are checked."""
    found = checks(capsys)
    names = {"Python", "pidfd", "optuna", "torch", "runtime folder", "broker", "SQLite commit"}
    assert names | {"working folder", "open files", "free disk here"} <= set(found)
    assert any(name.startswith("device ") for name in found)
    assert {check["state"] for check in found.values()} <= {"ok", "warn"}


def test_a_broker_may_open_as_many_files_as_the_hard_limit_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It raises its own limit to that; a low soft one is no reason to warn."""

    def found(soft: int, hard: int) -> tuple[str, str, str]:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
        check = next(limits())
        return check.state, check.found, check.hint

    assert found(256, 4096) == ("ok", "4096 at most", "")
    assert found(256, resource.RLIM_INFINITY) == ("ok", "no limit", "")
    state, files, hint = found(256, 512)
    assert (state, files) == ("warn", "512 at most")
    assert "`ulimit -Hn`" in hint


def test_an_open_folder_fails_with_the_command_that_closes_it(
    runtime_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Others could reach into the runtime folder: that is refused."""
    os.chmod(runtime_dir, 0o755)
    try:
        assert run(["doctor"]) == 1
    finally:
        os.chmod(runtime_dir, 0o700)
    assert "chmod go-rwx" in " ".join(capsys.readouterr().out.split())


def test_a_check_that_is_broken_hides_no_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has failed itself."""
    monkeypatch.setattr(_software, "python", lambda: {}["missing"])
    found = checks(capsys, status=1)
    assert (found["Python"]["state"], found["Python"]["found"]) == ("fail", "KeyError('missing')")
    assert len(found) > 5


def test_a_storage_is_looked_at_and_left_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Its studies are counted; a ledger that is not there is not made."""
    optuna.create_study(storage=STORAGE[1], study_name="digits")
    found = checks(capsys, *STORAGE)
    assert found["studies"]["found"].startswith("1 study in sqlite:///s.db")
    assert found["ledger"]["found"] == "none yet; `optimize` makes it"
    assert schema_version(STORAGE[1]) is None


def test_a_ledger_of_another_version_fails(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The check says which version there is, and which one is read."""
    optuna.create_study(storage=STORAGE[1], study_name="digits")
    open_ledger(STORAGE[1]).close()
    with contextlib.closing(sqlite3.connect(here / "s.db")) as connection, connection:
        connection.execute(f"UPDATE hermes_schema SET schema_version = {SCHEMA_VERSION + 1}")
    check = checks(capsys, *STORAGE, status=1)["ledger"]
    assert (check["state"], check["found"]) == ("fail", f"schema version {SCHEMA_VERSION + 1}")
    assert f"reads version {SCHEMA_VERSION}: use the one that made it" in check["hint"]


def test_a_ledger_that_cannot_be_used_fails(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is not taken for one in a file of its own, as a journal's is."""
    optuna.create_study(storage=STORAGE[1], study_name="digits")
    with contextlib.closing(sqlite3.connect(here / "s.db")) as connection:
        connection.execute("create table hermes_schema (id integer)")
    check = checks(capsys, *STORAGE, status=1)["ledger"]
    assert check["state"] == "fail"
    assert "no such column" in check["hint"]


def test_a_file_that_cannot_be_written_fails(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No commit is measured somewhere else in its place."""
    optuna.create_study(storage=STORAGE[1], study_name="digits")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != here.absolute())
    check = checks(capsys, *STORAGE, status=1)["storage"]
    assert check["found"] == "s.db cannot be written"
    assert str(here) in check["hint"]


def test_a_storage_that_is_not_there_fails(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Looking does not make the file."""
    found = checks(capsys, "--storage", "sqlite:///none.db", status=1)
    assert found["storage"]["state"] == "fail"
    assert "No file 'none.db'" in found["storage"]["found"]
    assert not (here / "none.db").exists()


def test_a_checkpoint_that_is_gone_fails(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stored trial whose file is missing is named, with what can be done; one that has it not."""
    study = optuna.create_study(storage=STORAGE[1], study_name="digits")
    key = _optuna.study_key(study)
    ledger = open_ledger(_optuna.ledger_url(study))
    for number in (0, 1):
        path = here / f"{number}.ckpt"
        ledger.save_trial(TrialRecord(study=key, number=number, trial_id=number, state="stored"))
        ledger.save_checkpoint(
            CheckpointRecord(
                study=key,
                number=number,
                checkpoint=Checkpoint(path=str(path), units=1, size_bytes=1, sha256=""),
                at=0.0,
            )
        )
    ledger.close()
    (here / "0.ckpt").write_bytes(b"x")
    found = checks(capsys, *STORAGE, "--study-name", "digits", status=1)
    assert found["ledger"]["found"] == f"schema version {SCHEMA_VERSION}"
    check = found["study 'digits'"]
    assert check["found"] == "2 trials, 2 stored on disk"
    assert check["state"] == "fail"
    assert f"checkpoint of trial 1 is not there, as {here / '1.ckpt'}" in check["hint"]
    (here / "1.ckpt").write_bytes(b"x")
    assert checks(capsys, *STORAGE, "--study-name", "digits")["study 'digits'"]["state"] == "ok"


def test_a_study_that_was_not_trained_yet_is_well(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``create-study`` made it, or plain Optuna; its ledger is not made by looking for it."""
    study = optuna.create_study(storage=STORAGE[1], study_name="digits")
    check = checks(capsys, *STORAGE, "--study-name", "digits")["study 'digits'"]
    assert (check["state"], check["found"]) == (
        "ok",
        "not trained yet: `optimize` makes its ledger",
    )
    assert _optuna.known_key(study) is None


def test_a_checkpoint_that_was_moved_with_its_study_is_there(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its row names the old folder; the file is in the present one."""
    study = optuna.create_study(storage=STORAGE[1], study_name="digits")
    key, name = _optuna.study_key(study), "000001-unit-1.safetensors"
    state = Checkpoint(path=f"/gone/trial-00000/{name}", units=1, size_bytes=1, sha256="")
    with contextlib.closing(open_ledger(_optuna.ledger_url(study))) as ledger:
        ledger.save_trial(TrialRecord(study=key, number=0, trial_id=0, state="stored"))
        ledger.save_checkpoint(CheckpointRecord(study=key, number=0, checkpoint=state, at=0.0))
    checks(capsys, *STORAGE, "--study-name", "digits", status=1)
    folder = _optuna.checkpoint_root(study) / _optuna.trial_folder(0)
    folder.mkdir(parents=True)
    (folder / name).write_bytes(b"x")
    assert checks(capsys, *STORAGE, "--study-name", "digits")["study 'digits'"]["state"] == "ok"


def test_a_study_needs_its_storage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name alone says nothing."""
    monkeypatch.delenv("OPTUNA_STORAGE", raising=False)
    assert run(["doctor", "--study-name", "digits"]) == 2
    assert "--study-name needs --storage" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "hints"),
    [
        ({}, []),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}, ["", "--timeout 30 s"]),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, ["--ntasks=1", "--timeout"]),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NAME": "bash"}, ["", "--timeout"]),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1020"}, ["", "submit it again"]),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "100000"}, ["", ""]),
    ],
)
def test_a_job_of_slurm(variables: dict[str, str], hints: list[str]) -> None:
    """Several tasks mislead Lightning, unless the job is interactive; an end is looked for."""
    found = list(slurm(variables, now=1000.0))
    assert len(found) == len(hints)
    for check, hint in zip(found, hints, strict=True):
        assert hint in check.hint
        assert check.state == ("warn" if hint else "ok")


def test_a_folder_on_a_network(here: Path) -> None:
    """SQLite's locks are not to be relied on there."""
    assert [check.state for check in working_folder(here, "ext4")] == ["ok"]
    (check,) = working_folder(here, "nfs4")
    assert check.state == "warn"
    assert "PostgreSQL" in check.hint


def test_a_checkpoint_of_another_job(here: Path) -> None:
    """Lightning would resume any fit from it."""
    (here / "hpc_ckpt_1.ckpt").touch()
    check = list(working_folder(here, "ext4"))[-1]
    assert check.found == "hpc_ckpt_1.ckpt"
    assert "default_root_dir" in check.hint


def test_the_kind_of_a_file_system() -> None:
    """The nearest mount counts, not the root."""
    assert kind_of(Path("/proc/self")) == "proc"


def test_the_kind_of_a_file_system_behind_a_link(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite follows it; of two mounts at one place, as autofs makes them, the later is seen."""
    (here / "link").symlink_to("/proc/self")
    assert kind_of(here / "link") == "proc"
    mounts = [SimpleNamespace(mountpoint=str(here), fstype=kind) for kind in ("autofs", "nfs4")]
    monkeypatch.setattr("psutil.disk_partitions", lambda **_: mounts)
    assert kind_of(here / "s.db") == "nfs4"


def test_nothing_is_written_into_an_empty_database(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Optuna would make its tables to look for a study."""
    file = here / "s.db"
    file.touch()
    assert checks(capsys, *STORAGE)["studies"]["found"].startswith("0 studies")
    assert run(["status", *STORAGE, "--study-name", "digits"]) == 2
    assert "No study 'digits'" in capsys.readouterr().err
    assert file.stat().st_size == 0


def test_little_shared_memory() -> None:
    """64 MB, as containers have by default, end data loaders by a signal."""
    assert shared_memory(8 << 30).state == "ok"
    assert "--shm-size" in shared_memory(64 << 20).hint
