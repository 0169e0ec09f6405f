"""Starts of workers: those that failed or were refused, and what follows for others."""

from __future__ import annotations

import math
from collections.abc import Callable

from optuna_hermes.workers._result import one_line
from optuna_hermes.workers._words import BEGAN, FAILED, GRANTED

MOST_FAILED_STARTS = 3
"""Workers in a row that may end before their trial begins; then the study is stopped."""

_PAUSE_SECONDS = 1.0
"""Pause before another one is forked: the cause of the failed start may be over by then."""

_MOST_REFUSED_STARTS = 60
"""Tries to start a worker while there is none: for about a minute."""

_REFUSED_SECONDS = 60.0
"""Time for which no more workers than the devices need are started once one was refused."""


_NO_THREAD = "can't start new thread"
"""Words of Python where a worker reaches the limit of processes, in which threads count."""

_LIMITS = "processes or of memory"


class Starts:
    """Counts workers that end before they have found their trial, and those that are refused."""

    def __init__(self) -> None:
        self.failed_in_a_row = 0
        self.reason = ""
        self.again_at = -math.inf
        """When the next one may be started."""
        self._failed = self._failed_seen = 0
        self._failed_before: dict[int, int] = {}
        self._last: dict[int, tuple[str, str]] = {}
        self._refused_in_a_row = self._alive_when_refused = 0
        self._why_refused = ""
        self._newly_refused = False
        self._refused_at = -math.inf

    def forked(self, pid: int) -> None:
        self._refused_in_a_row = 0
        self._failed_before[pid] = self._failed

    def said(self, pid: int, word: str, reason: str) -> None:
        if self._last.get(pid, ("", ""))[0] == BEGAN:
            return
        self._last[pid] = word, reason
        if word == BEGAN:
            self.forget()

    def exited(self, pid: int, how: str, *, alive: int) -> str | None:
        """Record a worker's exit; ``how`` describes it in words, ``alive`` others are there.

        Returns:
            What the system has said if it has refused the worker a thread that others may leave.
        """
        last, reason = self._last.pop(pid, (None, ""))
        before = self._failed_before.pop(pid, None)
        if alive and last == FAILED and _NO_THREAD in reason:
            self.refused(reason, alive=alive)
            return reason
        # One that waits for a lease was killed. Of those alive at the same time only one is
        # counted, since they share the cause.
        if last in (None, GRANTED, FAILED) and before == self._failed:
            self._failed += 1
            self.failed_in_a_row += 1
            self.reason = reason or how
        return None

    def refused(self, reason: str, *, alive: int) -> None:
        """Record that the system could not start a worker; ``alive`` others are there."""
        self._newly_refused = True
        self._refused_in_a_row = 0 if alive else self._refused_in_a_row + 1
        self._why_refused, self._alive_when_refused = reason, alive

    def forget(self) -> None:
        """Reset the count: a trial has begun, or the broker is another one."""
        self.failed_in_a_row = 0

    def check(self, now: float, note: Callable[[str], None]) -> str | None:
        """Pause after a start that failed or was refused; the reason to stop after several."""
        failed, before = self.failed_in_a_row, self._failed_seen
        self._failed_seen = failed
        if self._newly_refused:
            self._newly_refused = False
            self._refused_at, self.again_at = now, now + _PAUSE_SECONDS
        if failed > before:
            self.again_at = now + _PAUSE_SECONDS
            if failed < MOST_FAILED_STARTS:
                note(
                    f"A worker has ended before its trial began: {one_line(self.reason)}. "
                    "Another one is started."
                )
        if self._refused_in_a_row >= _MOST_REFUSED_STARTS:
            return (
                f"The system starts no worker ({one_line(self._why_refused)}): raise the limit of "
                f"{_LIMITS}, then run the same command again."
            )
        if failed >= MOST_FAILED_STARTS:
            advice = "look at the sampler, the study and what is printed above"
            if _NO_THREAD in self.reason:
                advice = f"raise the limit of {_LIMITS}"
            return (
                f"{failed} workers in a row have ended before their trials began, the last by "
                f"{one_line(self.reason)}: {advice}, then run the same command again."
            )
        return None

    def room(self, max_alive: int, n_devices: int, now: float) -> int:
        """Workers that the system has room for: while it refuses more, parked trials go to disk.

        Where there are enough for all devices one fewer is kept, for what trials start themselves.
        """
        alive = self._alive_when_refused
        if not alive or now - self._refused_at >= _REFUSED_SECONDS:
            return max_alive
        return max(min(alive, n_devices), alive - 1)
