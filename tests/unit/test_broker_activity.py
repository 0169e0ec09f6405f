"""The activity of processes, as the broker measures it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from optuna_hermes.broker._core._events import Activity
from optuna_hermes.broker._server._activity import (
    LEAST_SHARE,
    Activities,
    _activity,
    _CpuReading,
)

SPIN = "while True: pass"
WAIT = "import threading; threading.Event().wait()"
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
try:
    child.wait()
finally:
    child.kill()
"""

Start = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """``start(code)``: a Python process; at the end it and its children are gone."""
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", code], start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def comes_to(pid: int, wanted: Activity, wait_for: Any) -> None:
    activities = Activities()

    def seen() -> bool:
        return activities.measure({1: pid}) == {1: wanted}

    assert activities.measure({1: pid}) == {}  # the first look says nothing
    wait_for(seen, 60)


@pytest.mark.parametrize(("code", "activity"), [(SPIN, "works"), (WAIT, "idle"), (PARENT, "works")])
def test_who_computes_works_and_who_waits_does_not(
    code: str, activity: Activity, start: Start, wait_for: Any
) -> None:
    """A parent that waits for a child that computes is at work: loader workers are such."""
    comes_to(start(code).pid, activity, wait_for)


def test_processor_time_since_the_last_look_counts(start: Start, wait_for: Any) -> None:
    """Not that of its whole life; less than before is that of a child whose time is lost."""
    process = start(WAIT)
    comes_to(process.pid, "idle", wait_for)
    before = _CpuReading(at=10.0, cpu_seconds=500.0)
    for used, activity in (
        (-1.0, "works"),
        (0.0, "idle"),
        (9.9 * LEAST_SHARE, "idle"),
        (10.1 * LEAST_SHARE, "works"),
    ):
        now = _CpuReading(at=20.0, cpu_seconds=500.0 + used)
        assert _activity([psutil.Process(process.pid)], before, now) == activity


def test_a_stopped_process_does_nothing(start: Start, wait_for: Any) -> None:
    """SIGSTOP is seen as what it is."""
    process = start(SPIN)
    comes_to(process.pid, "works", wait_for)
    process.send_signal(signal.SIGSTOP)
    comes_to(process.pid, "stopped", wait_for)


def test_a_process_that_is_gone_is_not_spoken_of(start: Start) -> None:
    """Its end is heard by others."""
    process = start(WAIT)
    process.kill()
    process.wait()
    activities = Activities()
    assert activities.measure({1: process.pid}) == {}
    assert activities.measure({1: process.pid}) == {}
