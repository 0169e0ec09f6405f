"""Pytest plugin: writes how each test ended, at once, so that a crash leaves what was known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, TextIO

import pytest

Outcome = Literal["passed", "failed", "skipped"]

_ORDER: tuple[Outcome, ...] = ("skipped", "passed", "failed")
"""A test has three reports: the last of these that one of them says is how it ended."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("peers").addoption("--outcomes", type=Path, help="the file to write")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--outcomes")
    if file is not None:
        config.pluginmanager.register(_Writer(file.open("a", buffering=1)))


class _Writer:
    def __init__(self, file: TextIO) -> None:
        self._file = file

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report.nodeid, "failed", str(report.longrepr))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(nodeid, None, "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A plugin that repeats flaky tests reports "rerun" before the outcome that counts.
        if report.outcome in _ORDER and (report.when == "call" or report.outcome != "passed"):
            self._write(report.nodeid, report.outcome, report.longreprtext)

    def _write(self, test: str, outcome: Outcome | None, words: str) -> None:
        self._file.write(json.dumps([test, outcome, words[-2000:]]) + "\n")


def read(file: Path) -> dict[str, Outcome]:
    """Return the outcome of each test of a file; one that ended its process has failed."""
    found: dict[str, Outcome] = {}
    begun: set[str] = set()
    for line in file.read_text().splitlines():
        test, outcome, _ = json.loads(line)
        if outcome is None:
            begun.add(test)
        else:
            found[test] = max(found.get(test, outcome), outcome, key=_ORDER.index)
    return {**dict.fromkeys(begun - found.keys(), "failed"), **found}
