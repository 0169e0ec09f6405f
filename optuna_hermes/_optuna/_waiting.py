"""Trials of plain Optuna that wait for a device: said for what, and ended where it never comes."""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import optuna
import psutil

from optuna_hermes.broker import Held, broker_status, sessions
from optuna_hermes.errors import HermesError

NOTICE_SECONDS = 5.0
"""A trial that has waited for so long for a device says who has it."""

WARNING_SECONDS = 60.0
"""It says so again, as a warning, after each so many seconds."""

SHARE_SECONDS = 2.0
"""A trial inside of another one trains on its device if that one has done nothing for so long."""

_LOOK_SECONDS = 0.5

_STALE_SECONDS = 10.0

_IDLE_SHARE = 0.05
"""A thread that takes less of a core only waits for something."""

log = optuna.logging.get_logger("optuna.hermes")


class InsideError(Exception):
    """A trial is part of another one, which has a device and waits for it."""


class Idleness:
    """How long threads of this process, and other processes, have done nothing."""

    def __init__(self) -> None:
        self._looks: dict[object, tuple[float, float, float]] = {}

    def seconds(self, who: object, cpu_seconds: float | None) -> float:
        """How long somebody's processor time has hardly grown; 0 for one just met, or gone.

        Args:
            who: a name for a thread or a process.
            cpu_seconds: its processor time, None if it is gone.
        """
        now = time.monotonic()
        since, at, had = self._looks.get(who, (now, now, math.inf))
        spent = math.inf if cpu_seconds is None else cpu_seconds
        stale = now - at > _STALE_SECONDS  # it may have worked in between
        if stale or not 0 <= spent - had <= _IDLE_SHARE * (now - at):
            since = now
        self._looks[who] = since, now, spent
        return now - since

    def of_threads(self, helds: list[Held]) -> dict[Held, float]:
        """How long the threads of sessions have done nothing; one that has ended, for ever."""
        spent = _thread_seconds() if helds else {}
        return {
            held: self.seconds(
                (held.thread.name, held.thread.native_id), spent.get(held.thread.native_id or 0)
            )
            if held.thread.is_alive()
            else math.inf
            for held in helds
        }


def _thread_seconds() -> dict[int, float]:
    """The processor time of each thread of this process."""
    with contextlib.suppress(psutil.Error):
        return {each.id: each.user_time + each.system_time for each in psutil.Process().threads()}
    return {}


class Wait:
    """Follows a trial that waits for a device.

    Args:
        study: its study's name.
        number: of the trial.
        rest: called when a wait begins to last: who waits needs no connection to a database.
    """

    def __init__(self, study: str, number: int, rest: Callable[[], None]) -> None:
        self.is_first = True
        """It waits for its first turn."""
        self._study = study
        self._number = number
        self._rest = rest
        self._seconds = math.inf
        self._next_look = self._next_look_above = 0.0
        self._next_notice = NOTICE_SECONDS

    def __call__(self, seconds: float) -> None:
        """Look at how things stand, after so many seconds.

        Raises:
            InsideError: a trial that this one is part of has the device, and waits for it.
        """
        if seconds < self._seconds:  # another wait has begun
            self._next_notice = NOTICE_SECONDS
            self._rest()
        self._seconds = seconds
        if self.is_first and seconds >= self._next_look:
            self._next_look = seconds + _LOOK_SECONDS
            if self._is_inside_of_thread() or self._is_inside_of_process(seconds):
                raise InsideError
        if seconds >= self._next_notice:
            _notices.say(self._study, self._number, seconds)
            self._next_notice = seconds + WARNING_SECONDS

    def _is_inside_of_thread(self) -> bool:
        """Whether a trial of another study only waits, in another thread of this process."""
        others = [h for h in sessions.all() if h.study != self._study and h.session.holds]
        if any(_outer.get(held) == self._study for held in others):
            return True
        for held, seconds in _idleness.of_threads(others).items():
            if seconds >= SHARE_SECONDS:
                _outer[held] = self._study
                return True
        return False

    def _is_inside_of_process(self, seconds: float) -> bool:
        """Whether a trial of another study only waits, in a process above this one."""
        if self._study in _inside:
            return True
        if seconds < self._next_look_above:
            return False
        self._next_look_above = max(_LOOK_SECONDS, 2 * seconds)  # a broker is asked
        above = {process.pid: process for process in _ancestors()}
        outer = [
            above[holder["pid"]]
            for _, holder in _holders()
            if holder["pid"] in above and holder["study"] != self._study
        ]
        waits = [_idleness.seconds(each.pid, _cpu_seconds(each)) for each in outer]
        if max(waits, default=0.0) < SHARE_SECONDS:
            return False
        _inside.add(self._study)
        return True


_idleness = Idleness()

_inside: set[str] = set()
"""Studies that were found to run inside of a process above this one."""

_outer: weakref.WeakKeyDictionary[Held, str] = weakref.WeakKeyDictionary()
"""Sessions, with the study that was found to run inside of each."""


def _ancestors() -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process().parents()
    return []


def _cpu_seconds(process: psutil.Process) -> float | None:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return None


def _holders() -> Iterator[tuple[str, dict[str, Any]]]:
    """The devices of this host that somebody has, and who."""
    with contextlib.suppress(HermesError):
        status = broker_status(runs=False)
        for device in [] if status is None else status["devices"]:
            if device["holder"] is not None:
                yield device["id"], device["holder"]


class _Notices:
    """Says who waits for whom, but not for each of many at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = -math.inf

    def say(self, study: str, number: int, seconds: float) -> None:
        """Say why a trial waits, unless another one has just said as much."""
        warns = seconds >= WARNING_SECONDS
        with self._lock:
            now = time.monotonic()
            if now - self._last < NOTICE_SECONDS:
                return
            self._last = now
        has = ", ".join(
            f"{device} has trial {holder['trial']} of study {holder['study']!r} "
            f"(process {holder['pid']})"
            for device, holder in _holders()
        )
        words = (
            f"Trial {number} of study {study!r} has waited {seconds:.0f} s for a device: "
            f"{has or 'none is free'}. `optuna-hermes status` shows more."
        )
        (log.warning if warns else log.info)(words)


_notices = _Notices()
