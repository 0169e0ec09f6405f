"""Activity of silent processes, as the kernel reports it: at work, idle or stopped."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import psutil

from optuna_hermes.broker._core._events import Activity

LEAST_SHARE = 0.01
"""Share of a core from which on a process works: threads that only wait and poll take less."""

_AT_WORK = (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@dataclass(frozen=True, kw_only=True)
class _CpuReading:
    """CPU seconds of a process and all its descendants, at a time."""

    at: float
    cpu_seconds: float


class Activities:
    """Observer of processes, which compares each look with the one before."""

    def __init__(self) -> None:
        self._readings: dict[int, _CpuReading] = {}

    def measure(self, pids: Mapping[int, int]) -> dict[int, Activity]:
        """The activity of each process and its descendants since the last look.

        It is by the key of ``pids``; processes that are seen for the first time are left out.
        """
        children = _children()
        before, self._readings = self._readings, {}
        found: dict[int, Activity] = {}
        for key, pid in pids.items():
            tree = list(_tree(pid, children))
            now = self._readings[pid] = _CpuReading(
                at=time.monotonic(), cpu_seconds=_cpu_seconds(tree)
            )
            if tree and pid in before:
                found[key] = _activity(tree, before[pid], now)
        return found


def _activity(tree: list[psutil.Process], before: _CpuReading, now: _CpuReading) -> Activity:
    states = [_state(process) for process in tree]
    used = now.cpu_seconds - before.cpu_seconds
    # Less than before: a child has ended whose time its parent did not collect.
    if any(state in _AT_WORK for state in states) or used < 0:
        return "works"
    if used >= LEAST_SHARE * (now.at - before.at):
        return "works"
    return "stopped" if states[0] in _STOPPED else "idle"


def _children() -> dict[int, list[psutil.Process]]:
    found: dict[int, list[psutil.Process]] = defaultdict(list)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found[process.ppid()].append(process)
    return found


def _tree(pid: int, children: Mapping[int, list[psutil.Process]]) -> Iterator[psutil.Process]:
    """A process and all its descendants, itself first."""
    with contextlib.suppress(psutil.Error):
        yield psutil.Process(pid)
    for child in children.get(pid, ()):
        yield from _tree(child.pid, children)


def _cpu_seconds(tree: list[psutil.Process]) -> float:
    """CPU seconds of processes, and of their children that have ended."""
    seconds = 0.0
    for process in tree:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def _state(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.Error:
        return psutil.STATUS_DEAD
