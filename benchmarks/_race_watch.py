"""A trial's batches, paced and written down with its values: the only source of all figures.

Each process has a file of its own in the contest's folder, a line for each of three things:
``["trial", trial, params, at]``, ``["batch", trial, unit, begun, ended]`` and
``["value", trial, unit, value, at]``; times are seconds of the wall clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from _race_tasks import Contest, Params

PATTERN = "watch-*.jsonl"

_files: dict[int, TextIO] = {}


@dataclass(frozen=True)
class Watch:
    """Pace of the batches of a trial, and record of what it did.

    Args:
        trial: its name among those of its contestant.
        batch_seconds: a batch takes so long, most of which it waits.
    """

    trial: str
    batch_seconds: float

    @staticmethod
    def start(trial: object, params: Params, n_batches: int) -> Watch:
        """Write down that a trial exists, whose units have so many batches."""
        contest = Contest.of_environment()
        _write("trial", str(trial), dict(params), time.time())
        return Watch(str(trial), contest.unit_seconds / n_batches)

    @contextlib.contextmanager
    def batch(self, unit: int) -> Iterator[None]:
        begun = time.time()
        yield
        self.end_batch(unit, begun)

    def end_batch(self, unit: int, begun: float) -> None:
        """Wait, as for a slower device, until a batch is over."""
        time.sleep(max(0.0, begun + self.batch_seconds - time.time()))
        _write("batch", self.trial, unit, begun, time.time())

    def value(self, unit: int, value: float) -> None:
        """Write down a unit's value, before anybody else is told."""
        _write("value", self.trial, unit, value, time.time())


def _write(*line: Any) -> None:
    pid = os.getpid()
    if pid not in _files:  # else a fork would write into its parent's
        folder = Path(Contest.of_environment().folder)
        _files[pid] = (folder / f"watch-{pid}.jsonl").open("a", buffering=1)
    _files[pid].write(json.dumps(line) + "\n")


def read_lines(folder: Path) -> Iterator[list[Any]]:
    """Yield the lines of all processes of a contest, but no half line of one that was killed."""
    for path in sorted(folder.glob(PATTERN)):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                yield json.loads(line)
