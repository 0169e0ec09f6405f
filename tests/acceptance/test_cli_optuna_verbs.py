"""Optuna's own verbs through ``optuna-hermes``, as real processes."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend

from optuna_hermes import _optuna
from optuna_hermes._optuna import _local_ledgers
from optuna_hermes.cli import run
from optuna_hermes.ledger import CheckpointRecord, open_ledger
from optuna_hermes.model import Checkpoint

Cli = Callable[..., "CompletedProcess[str]"]

SPACE = json.dumps(
    {"x": {"name": "FloatDistribution", "attributes": {"low": 0.0, "high": 1.0, "log": False}}}
)


@pytest.fixture
def study(capsys: pytest.CaptureFixture[str], storage_url: str) -> tuple[str, ...]:
    """Options that name a study which ``create-study`` has made."""
    options = ("--storage", storage_url, "--study-name", "digits")
    assert run(("create-study", *options, "--direction", "maximize")) == 0
    assert capsys.readouterr().out == "digits\n"
    return options


def ask(cli: Cli, study: tuple[str, ...], *options: str) -> Any:
    asked = cli("ask", *study, "--sampler", "HermesSampler", "--search-space", SPACE, *options)
    assert asked.returncode == 0, asked.stderr
    return json.loads(asked.stdout)


def test_ask_and_tell(cli: Cli, study: tuple[str, ...], runtime_dir: Path) -> None:
    """A trial is asked of HermesSampler, told, and found again; no broker is started for it."""
    asked = ask(cli, study)
    assert asked["number"] == 0
    assert 0.0 <= asked["params"]["x"] <= 1.0
    told = cli("tell", *study, "--trial-number", "0", "--values", "0.25")
    assert told.returncode == 0, told.stderr
    listed = json.loads(cli("trials", *study, "-f", "json").stdout)
    assert [(t["number"], t["value"], t["state"]) for t in listed] == [(0, 0.25, "COMPLETE")]
    best = json.loads(cli("best-trial", *study, "-f", "json").stdout)
    assert best["number"] == 0
    assert best["params"] == asked["params"]
    assert list(runtime_dir.iterdir()) == []


def test_the_sampler_takes_its_options(cli: Cli, study: tuple[str, ...]) -> None:
    """``--sampler-kwargs`` reaches HermesSampler."""
    assert ask(cli, study, "--sampler-kwargs", '{"policy": "fifo"}')["number"] == 0


def test_studies_are_listed_and_deleted(cli: Cli, study: tuple[str, ...], storage_url: str) -> None:
    """The remaining verbs, of one word and of two, reach Optuna too."""
    listed = json.loads(cli("studies", *study[:2], "-f", "json").stdout)
    assert [entry["name"] for entry in listed] == ["digits"]
    assert cli("storage", "upgrade", *study[:2]).returncode == 0
    assert cli("delete-study", *study).returncode == 0
    assert optuna.get_all_study_names(storage_url) == []


@pytest.mark.parametrize("trains", [False, True])
def test_a_study_in_a_journal_is_deleted_with_its_files(
    trains: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its ledger and checkpoints are its alone; they stay while a process has it locked."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    journal = str(tmp_path / "journal")
    storage = JournalStorage(JournalFileBackend(journal))
    study = optuna.create_study(study_name="digits", storage=storage)
    own, given = _optuna.checkpoint_root(study), _optuna.checkpoint_root(study, tmp_path / "given")
    key, url = _optuna.study_key(study), _optuna.ledger_url(study)
    other = _optuna.checkpoint_root(optuna.create_study(study_name="faces", storage=storage))
    for folder in (own, given, other):
        (folder / "trial-00000").mkdir(parents=True)
    with closing(open_ledger(url)) as ledger:
        ledger.lock_study(key)
        for folder in (own, given):
            path = str(folder / "trial-00000" / "000001-unit-1.safetensors")
            checkpoint = Checkpoint(path=path, units=1, size_bytes=1, sha256="")
            ledger.save_checkpoint(
                CheckpointRecord(study=key, number=0, checkpoint=checkpoint, at=0.0)
            )
    file = Path(url.removeprefix("sqlite:///"))
    with open(f"{file}.hermes/{key}.lock", "a") as lock:
        if trains:
            fcntl.flock(lock, fcntl.LOCK_EX)
        assert run(("delete-study", "--storage", journal, "--study-name", "digits")) == 0
    assert optuna.get_all_study_names(storage) == ["faces"]
    assert [file.exists(), own.exists()] == [trains, trains]
    assert given.exists()
    assert other.exists()
    notes = [line for line in capsys.readouterr().err.splitlines() if "Checkpoints stay" in line]
    assert [str(each) in "".join(notes) for each in (own, given, other)] == [trains, True, False]


def test_a_study_in_a_file_is_not_deleted_while_it_is_trained(
    study: tuple[str, ...],
    storage_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """SQLite gives its ids to the next study, into which that process would write."""
    monkeypatch.setattr(_local_ledgers, "UNLOCK_SECONDS", 0.1)
    key = _optuna.study_key(optuna.load_study(study_name="digits", storage=storage_url))
    with closing(open_ledger(storage_url)) as ledger:
        ledger.lock_study(key)
    lock = Path(f"{storage_url.removeprefix('sqlite:///')}.hermes", f"{key}.lock")
    with open(lock, "a") as trains:
        fcntl.flock(trains, fcntl.LOCK_EX)
        assert run(("delete-study", *study)) == 2
    assert optuna.get_all_study_names(storage_url) == ["digits"]
    assert "error: A process trains study 'digits'" in capsys.readouterr().err
    assert run(("delete-study", *study)) == 0
    assert optuna.get_all_study_names(storage_url) == []


def test_a_study_that_could_not_be_deleted_is_not_called_deleted(
    study: tuple[str, ...],
    storage_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Optuna ignores that a server refuses, as where a process has just written a value."""
    with monkeypatch.context() as refusing:
        refusing.setattr(RDBStorage, "delete_study", lambda self, study_id: None)
        assert run(("delete-study", *study)) == 2
    assert "error: Study 'digits' was not deleted" in capsys.readouterr().err
    assert run(("delete-study", *study)) == 0
    assert optuna.get_all_study_names(storage_url) == []


def test_a_study_whose_locks_are_another_user_s_is_not_deleted(
    study: tuple[str, ...],
    storage_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The line says that nobody can see who may train then, and who can delete the study."""
    assert _optuna.study_key(optuna.load_study(study_name="digits", storage=storage_url))
    folder, stat = storage_url.removeprefix("sqlite:///") + ".hermes", Path.stat

    def refuse(path: Path, **named: Any) -> os.stat_result:
        if str(path).startswith(f"{folder}/"):
            raise PermissionError(path)
        return stat(path, **named)

    monkeypatch.setattr(Path, "stat", refuse)
    assert run(("delete-study", *study)) == 2
    monkeypatch.undo()
    assert f"or {folder} is another user's: stop it, or delete" in capsys.readouterr().err
    assert optuna.get_all_study_names(storage_url) == ["digits"]


def test_what_optuna_refuses_is_one_line(cli: Cli, study: tuple[str, ...]) -> None:
    """A study that is not there, or has no best trial, is bad input, without a traceback."""
    optuna.create_study(storage=study[1], study_name="two", directions=["minimize"] * 2)
    for name, error in {
        "faces": f"No study 'faces' in {study[1]} (there: 'digits', 'two'): create it with ",
        "digits": "The best trial must be complete but none is yet: see `optuna-hermes trials`.",
        "two": "A single best trial cannot be retrieved from a multi-objective study.",
    }.items():
        done = cli("best-trial", *study[:3], name)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert done.stderr.splitlines()[-1].startswith(f"error: {error}")


def test_an_unknown_verb(cli: Cli) -> None:
    """A verb that is neither ours nor Optuna's is bad input, through a real process too."""
    done = cli("fly")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: No verb 'fly': see `optuna-hermes --help`.\n"
