"""Readers of a study that is shown live: what was deleted and made anew is read again."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from optuna_hermes import _optuna, _optuna_tables
from optuna_hermes.cli._studies import facts_reader
from optuna_hermes.cli._top import StudySource
from optuna_hermes.errors import StorageError
from optuna_hermes.ledger import open_ledger
from optuna_hermes.view import source
from optuna_hermes.view.source import StudyReader
from support.records import trial_record


def begun(storage: Any, n_trials: int) -> None:
    """A study of trials that were opened by this package."""
    study = optuna.create_study(storage=storage, study_name="s")
    key = _optuna.study_key(study)
    with contextlib.closing(open_ledger(_optuna.ledger_url(study))) as ledger:
        for _ in range(n_trials):
            number = _optuna.open_trial(study).number
            ledger.save_trial(trial_record(number, study=key, trial_id=number))


@pytest.fixture(autouse=True)
def always_due(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(source, "FACTS_SECONDS", -1.0)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def test_a_database_that_was_made_anew_is_read(tmp_path: Path) -> None:
    """Its page is open while the file is removed and the script is run again."""
    file = tmp_path / "s.db"
    url = f"sqlite:///{file}"
    begun(url, 1)
    with contextlib.closing(StudyReader(facts_reader(url, "s"))) as reader:
        before = reader.history(None)
        assert before is not None
        assert len(before.trials) == 1
        file.unlink()
        begun(url, 2)
        after = reader.history(None)
        assert after is not None
        assert (len(after.trials), after.key != before.key) == (2, True)


def test_a_study_that_was_made_anew_has_no_history_before_it_runs(tmp_path: Path) -> None:
    """That of the deleted one is not shown as its own; `top` says why there is none."""
    url = f"sqlite:///{tmp_path / 's.db'}"
    begun(url, 1)
    top = StudySource(url, "s")
    with contextlib.closing(StudyReader(facts_reader(url, "s"))) as reader:
        assert reader.history(None) is not None
        assert len(top.look("").trials) == 1
        optuna.delete_study(study_name="s", storage=url)
        optuna.create_study(study_name="s", storage=url)
        assert reader.history(None) is None
    with pytest.raises(StorageError, match="has no ledger"):
        top._read(None)
    top.close()


def test_a_journal_is_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is long: its storage reads on where it was. A study that was made anew is another one."""
    file = str(tmp_path / "journal.log")
    storage = JournalStorage(JournalFileBackend(file))
    begun(storage, 1)
    loads, load = [], _optuna.load_study

    def counted(*arguments: Any) -> Any:
        loads.append(arguments)
        return load(*arguments)

    monkeypatch.setattr(_optuna, "load_study", counted)
    with contextlib.closing(StudyReader(facts_reader(file, "s"))) as reader:
        first, again = reader.history(None), reader.history(None)
        assert first is not None
        assert again is not None
        assert (len(first.trials), len(again.trials), len(loads)) == (1, 1, 1)
        optuna.delete_study(study_name="s", storage=storage)
        begun(storage, 2)
        last = reader.history(None)
        assert last is not None
        assert (len(last.trials), len(loads)) == (2, 2)


def test_a_journal_that_cannot_be_read_is_an_error_of_its_storage(tmp_path: Path) -> None:
    """Also after it was read before: what is shown live goes on once it can be read again."""
    file = tmp_path / "journal.log"
    begun(JournalStorage(JournalFileBackend(str(file))), 1)
    read = facts_reader(str(file), "s")
    assert read().sign == 1.0
    away = file.rename(tmp_path / "away")
    with pytest.raises(StorageError, match="No such file"):
        read()
    away.rename(file)
    assert read().sign == 1.0


def test_a_database_that_did_not_answer_once_is_read_without_optuna_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Optuna has loaded knows nothing of a file that is made anew."""
    file = tmp_path / "s.db"
    begun(f"sqlite:///{file}", 1)
    with monkeypatch.context() as once:
        once.setattr(_optuna_tables, "read_facts", lambda storage, name: None)
        read = facts_reader(f"sqlite:///{file}", "s")
        before = read()
    file.unlink()
    begun(f"sqlite:///{file}", 1)
    assert read().key != before.key
