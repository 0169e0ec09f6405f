"""Messages of ``optimize`` during an outage, and its end without the database."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest

from optuna_hermes.errors import DatabaseOutageError
from optuna_hermes.workers._driver import Driver
from optuna_hermes.workers._notices import NOTED_SECONDS, DatabaseNotices
from optuna_hermes.workers._settings import OptimizeSettings
from support.memory_ledger import MemoryLedger
from support.statuses import study_status


class Notes(list[str]):
    """A screen that keeps its lines."""

    def note(self, text: str) -> None:
        self.append(text)

    warn = note


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def driver(notes: Notes) -> Driver:
    screen: Any = notes
    pool: Any = SimpleNamespace(began=0.0)
    return Driver(optuna.create_study(), pool, OptimizeSettings(), screen)


def test_it_is_said_once_and_taken_back_once(notes: Notes) -> None:
    """A short moment is not worth a line, a longer one is worth two."""
    news = DatabaseNotices(notes.note)
    for seconds in (None, NOTED_SECONDS / 2, None, 2 * NOTED_SECONDS, 3 * NOTED_SECONDS, None):
        news.update(seconds)
    news.update(None)
    assert notes == [
        "The database does not answer; training goes on, and what is reported is written when it "
        "is back.",
        "The database is back.",
    ]


def test_a_full_disk_is_named(driver: Driver, notes: Notes) -> None:
    """The database is there: its user has to make room."""
    reason = "OperationalError: database or disk is full"
    DatabaseNotices(notes.note).update(2 * NOTED_SECONDS, reason)
    assert notes[0].startswith("The database cannot be written, as its disk is full; training goes")
    driver._last = study_status(outage_seconds=9.0, outage_reason=reason)
    with pytest.raises(DatabaseOutageError, match="as its disk is full, so every trial that could"):
        driver._result(MemoryLedger(), 1.0)


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (None, "trial that could be was suspended to disk: bring it back, then run the same"),
        ("It did not answer for 300 s.", "It did not answer for 300 s."),
    ],
)
def test_a_call_that_ends_without_its_database_says_so(
    driver: Driver, problem: str | None, said: str
) -> None:
    """Its result cannot be read; instead of waiting for ever it says what to do."""
    driver._last = study_status(outage_seconds=300.0)
    driver._problem = problem
    with pytest.raises(DatabaseOutageError, match=said):
        driver._result(MemoryLedger(), 1.0)


def test_a_locked_file_is_not_read(
    notes: Notes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """To look if the study was deleted would hold up what is to be said, and signals."""
    file = tmp_path / "study.db"
    screen: Any = notes
    pool: Any = SimpleNamespace(began=0.0, n_ended=0)
    study = optuna.create_study(storage=f"sqlite:///{file}")
    driver = Driver(study, pool, OptimizeSettings(), screen)
    driver._ids_return = True
    looked: list[bool] = []
    monkeypatch.setattr(driver, "_refuse_deleted", lambda: looked.append(True))
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        driver._check_deleted(study_status())
        assert looked == []
    pool.n_ended = 1
    driver._check_deleted(study_status())
    assert looked == [True]
    pool.n_ended = 2
    study._storage.remove_session()
    file.unlink()
    driver._check_deleted(study_status())
    assert (looked, file.exists()) == ([True, True], False)
