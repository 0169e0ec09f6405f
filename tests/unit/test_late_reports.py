"""Values that wait for a database wait in memory where no file can be written."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optuna_hermes._optuna import _reports
from optuna_hermes._optuna._reports import Reports
from optuna_hermes.broker._client import _journal


class Database:
    """Takes values once it is back."""

    def __init__(self) -> None:
        self.back = threading.Event()
        self.values: list[tuple[int, int, float]] = []

    def write(self, *value: Any) -> None:
        self.back.wait(30)
        self.values.append(value)


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> Database:
    monkeypatch.setattr(_reports, "LATE_SECONDS", 0.01)
    return Database()


@pytest.mark.parametrize("name", ["write_bytes", "replace"])
def test_no_room_for_the_file_fails_no_trial(
    name: str,
    database: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On a full disk late values are in no file, all are written later, and nothing is left."""

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    reports = Reports(database.write)
    reports.keep_in(tmp_path, 7)
    with monkeypatch.context() as patch:
        patch.setattr(Path if name == "write_bytes" else os, name, refuse)
        reports.put(7, 1, 0.5)
        reports.put(7, 2, 0.25)
    assert "cannot be written, so make room there: [Errno 28] No space left" in caplog.text
    assert list(tmp_path.iterdir()) == []
    database.back.set()
    assert reports.flush(30)
    assert database.values == [(7, 1, 0.5), (7, 2, 0.25)]


def test_a_file_that_cannot_be_removed_stops_no_values(
    database: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wait_for: Callable[..., Any],
) -> None:
    """The next process writes the values in the file again, and they are the same."""

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    reports = Reports(database.write)
    reports.keep_in(tmp_path, 7)
    reports.put(7, 1, 0.5)
    reports.settle()
    assert _journal.find(tmp_path).unwritten == ((1, 0.5),)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        database.back.set()
        assert reports.flush(30)
        wait_for(lambda: not reports.late)
    reports.put(7, 2, 0.25)
    assert reports.flush(30)
    assert database.values == [(7, 1, 0.5), (7, 2, 0.25)]


def test_a_journal_on_a_full_disk_gets_every_value_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on meanwhile, and what its disk has not taken is in our own journal."""
    monkeypatch.setattr(_reports, "LATE_SECONDS", 0.01)
    written: list[tuple[int, int, float]] = []
    room = threading.Event()

    def write(trial_id: int, step: int, value: float) -> None:
        if not room.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append((trial_id, step, value))

    reports = Reports(write)
    reports.keep_in(tmp_path, 7)
    reports.put(7, 1, 0.5)
    reports.check()
    reports.put(7, 2, 0.25)
    assert _journal.find(tmp_path).unwritten == ((1, 0.5), (2, 0.25))
    room.set()
    assert reports.flush(30)
    assert written == [(7, 1, 0.5), (7, 2, 0.25)]


def test_no_thread_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a limit of processes values are written where they are reported, later on a thread."""
    threads: list[str] = []
    number = 0

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def write(trial_id: int, step: int, value: float) -> None:
        threads.append(threading.current_thread().name)
        if number:
            raise OSError(number, os.strerror(number))

    reports = Reports(write)
    reports.keep_in(tmp_path, 7)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        reports.put(7, 1, 0.5)
        number = errno.EACCES
        reports.put(7, 2, 0.25)
        with pytest.raises(OSError, match="Permission denied"):
            reports.check()
    number = 0
    reports.put(7, 3, 0.125)
    assert reports.flush(30)
    assert threads == [threading.current_thread().name] * 2 + ["hermes-reports"]
