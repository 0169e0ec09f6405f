"""Contests of ``race.py`` as processes, and their records in files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from _race_contest import ENDED, OUTPUT
from _race_measure import Lease, Record, make_record
from _race_tasks import Contest
from _race_watch import read_lines

CONTESTANTS = {
    "optuna": "_race_optuna.py",
    "optuna-median": "_race_optuna.py",
    "optuna-halving": "_race_optuna.py",
    "optuna-hyperband": "_race_optuna.py",
    "ray-asha": "_race_ray.py",
    "ray-bohb": "_race_ray.py",
    "hermes": "_race_hermes.py",
    "hermes-tpe": "_race_hermes.py",
    "hermes-asha": "_race_hermes.py",
    "hermes-fifo": "_race_hermes.py",
}
"""The script of each."""
RAY = tuple(name for name in CONTESTANTS if name.startswith("ray-"))
EARLY = 0.1
"""Share of the budget that a contestant may leave: more is a failure."""
APART = 0.1
"""Share of the budget between the starts of any two contests: imports take all cores."""
TAIL = 15
"""Lines of a failed contestant's output that are shown."""


class ContestError(Exception):
    """A contestant failed; it has no record."""


class StoppedError(Exception):
    """The race was stopped."""


class Runner:
    """Runs contests, any number at once, each from a thread of its own.

    Args:
        ray_python: the Python that has Ray.
        outputs: the folder for what contestants print.
    """

    def __init__(self, ray_python: str | None, outputs: Path) -> None:
        self._ray_python = ray_python
        self._outputs = outputs
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = threading.Event()
        self._next_start = 0.0

    def run(self, contest: Contest) -> Record:
        """Its record.

        Raises:
            ContestError: it failed.
            StoppedError: ``stop`` was called.
        """
        # Short, for a socket's path must be.
        folder = Path(tempfile.mkdtemp(prefix="race-"))
        contest = replace(contest, folder=str(folder))
        try:
            record = self._record(contest, folder)
        except ContestError as error:
            raise ContestError(f"{error}\nIts files are in {folder}.") from None
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)
        return record

    def stop(self) -> None:
        """End all contests with all their processes."""
        with self._lock:
            self._stopped.set()
            for process in self._running:
                process.terminate()

    def _record(self, contest: Contest, folder: Path) -> Record:
        self._wait(contest)
        path = folder / ENDED
        ended: dict[str, Any] = {"status": None, "seconds": 0.0}
        if path.exists():
            ended = json.loads(path.read_text())
        if ended["status"] or ended["seconds"] < (1 - EARLY) * contest.seconds:
            output = folder / OUTPUT
            lines = output.read_text(errors="replace").splitlines() if output.exists() else []
            raise ContestError(
                f"{contest.name} ended after {ended['seconds']:.0f} of {contest.seconds:g} s with "
                f"status {ended['status']}:\n" + "\n".join(lines[-TAIL:])
            )
        self._outputs.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / OUTPUT, self._outputs / f"{contest.name}.log")
        setting = asdict(contest)
        for name in ("folder", "begun"):
            del setting[name]
        return make_record(
            setting,
            read_lines(folder),
            begun=ended["begun"],
            cpu_seconds=ended["cpu_seconds"],
            leases=_leases(folder) if contest.contestant.startswith("hermes") else None,
        )

    def _wait_for_start(self, contest: Contest) -> None:
        with self._lock:
            at = max(time.monotonic(), self._next_start)
            self._next_start = at + APART * contest.seconds
        self._stopped.wait(at - time.monotonic())

    def _wait(self, contest: Contest) -> None:
        self._wait_for_start(contest)
        here = Path(__file__).parent
        python = self._ray_python if contest.contestant in RAY else sys.executable
        assert python is not None
        wrapper = [sys.executable, str(here / "_race_contest.py"), json.dumps(asdict(contest))]
        command = [*wrapper, python, str(here / CONTESTANTS[contest.contestant])]
        with self._lock:
            if self._stopped.is_set():
                raise StoppedError
            # In a session of its own: Ctrl-C reaches this process alone, which ends the others.
            environment = {**os.environ, "PYTHONPATH": _path(here, contest)}
            process = subprocess.Popen(command, start_new_session=True, env=environment)
            self._running.add(process)
        process.wait()
        with self._lock:
            self._running.discard(process)
        if process.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM):
            raise StoppedError


def _path(here: Path, contest: Contest) -> str:
    """Return the module path of a contestant's processes; Ray's do not get our packages."""
    inherited = "" if contest.contestant in RAY else os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(each for each in (str(here), inherited) if each)


def _leases(folder: Path) -> list[Lease]:
    """All leases out of this project's ledger; none if it was not even created in time."""
    # Not read-only: the journal of a process that was killed has to be played back.
    connection = sqlite3.connect(folder / "study.db")
    try:
        if not connection.execute(
            "SELECT 1 FROM sqlite_master WHERE name = 'hermes_leases'"
        ).fetchone():
            return []
        rows = connection.execute(
            "SELECT number, started, ended FROM hermes_leases WHERE number IS NOT NULL"
        ).fetchall()
    finally:
        connection.close()
    return [Lease(str(number), started, ended) for number, started, ended in rows]


# -- records in files --------------------------------------------------------------------------


def save_record(folder: Path, contest: Contest, record: Record) -> None:
    """Write a record, all of it or nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    path = record_path(folder, contest)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(asdict(record)))
    unfinished.replace(path)


def record_path(folder: Path, contest: Contest) -> Path:
    return folder / f"{contest.name}.json"


def read_records(folder: Path, contests: Sequence[Contest]) -> Iterator[tuple[Contest, Record]]:
    """The records that there are of these contests."""
    for contest in contests:
        path = record_path(folder, contest)
        if path.exists():
            document: Mapping[str, Any] = json.loads(path.read_text())
            yield contest, Record.of_json(document)
