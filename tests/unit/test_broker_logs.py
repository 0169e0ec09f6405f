"""A broker's log, for people and for programs, and its size limit."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from optuna_hermes.broker._server import _logs as logs


def record(message: str, *, error: BaseException | None = None, **extra: Any) -> logging.LogRecord:
    info = None if error is None else (type(error), error, error.__traceback__)
    made = logging.LogRecord("broker", logging.WARNING, __file__, 1, message, (), info)
    made.created = 1.5
    vars(made).update(extra)
    return made


def test_a_line_for_programs_has_the_fields_that_are_known() -> None:
    """JSON has time, level and message, and of the fields those that were given."""
    line = logs.JsonFormatter().format(record("killed\nit", study="digits", trial=0, epoch=None))
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:01.500Z",
        "level": "WARNING",
        "message": "killed\nit",
        "study": "digits",
        "trial": 0,
    }


def test_a_line_for_programs_has_the_traceback() -> None:
    """An error is in the same line as what was said about it."""
    try:
        raise ValueError("a crash")
    except ValueError as error:
        line = logs.JsonFormatter().format(record("the broker crashed", error=error))
    assert json.loads(line)["error"].endswith("ValueError: a crash")


def test_a_line_for_people_ends_with_the_fields() -> None:
    """Text shows the same, in words."""
    line = logs.TextFormatter().format(record("killed", device="cpu:0", trial=3))
    assert line.endswith("WARNING killed (trial 3, device cpu:0)")
    assert logs.TextFormatter().format(record("ended")).endswith("WARNING ended")


def test_a_file_does_not_grow_without_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest lines are in the file itself, and few older files are kept."""
    monkeypatch.setattr(logs, "FILE_BYTES", 1000)
    handler = logs.log_handler(tmp_path / "broker.log", as_json=False)
    for number in range(200):
        handler.emit(record(f"line {number}"))
    handler.close()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["broker.log", "broker.log.1", "broker.log.2", "broker.log.3"]
    assert max(path.stat().st_size for path in tmp_path.iterdir()) <= 1000
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    assert (tmp_path / "broker.log").read_text().endswith("line 199\n")


def test_a_folder_that_is_made_again_gets_another_file(tmp_path: Path) -> None:
    """As a cleaner of temporary files removes it; while it is away nothing is raised."""
    file = tmp_path / "made" / "broker.log"
    file.parent.mkdir()
    handler = logs.log_handler(file, as_json=False)

    def log(text: str) -> None:
        handler.handle(logging.LogRecord("n", logging.INFO, "f", 1, text, (), None))

    log("first")
    shutil.rmtree(file.parent)
    log("away")
    file.parent.mkdir()
    log("again")
    handler.close()
    assert file.read_text().split()[-1] == "again"
    assert "first" not in file.read_text()


def test_without_a_file_it_goes_to_standard_error() -> None:
    """In the foreground whoever started the broker keeps its log."""
    handler = logs.log_handler(None, as_json=True)
    assert isinstance(handler, logging.StreamHandler)
    assert handler.stream is sys.stderr
