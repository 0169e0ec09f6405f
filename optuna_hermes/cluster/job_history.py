"""Features of a job at its submission, from its attributes, the time, and earlier jobs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from typing import Any

from optuna_hermes.cluster.jobs import Job

PACES = (0.2, 0.02)
"""Weights of the latest job in the exponential means."""

KEPT = 20
"""Number of latest jobs that quantiles are taken of."""

WINDOWS_SECONDS = (600.0, 86_400.0)

HOUR, DAY, WEEK = 3_600.0, 86_400.0, 604_800.0


class _Past:
    """Statistics of the jobs of one kind: their submissions, and the times of finished ones."""

    def __init__(self) -> None:
        self.means = [math.nan] * len(PACES)
        self.latest: deque[float] = deque(maxlen=KEPT)
        self.came: list[deque[float]] = [deque() for _ in WINDOWS_SECONDS]
        self.last_came = math.nan
        self.last_over = math.nan

    def came_at(self, now: float) -> None:
        self.last_came = now
        for times in self.came:
            times.append(now)

    def over_at(self, now: float, log_seconds: float) -> None:
        self.last_over = now
        self.latest.append(log_seconds)
        for place, pace in enumerate(PACES):
            mean = self.means[place]
            gap = 0.0 if math.isnan(mean) else log_seconds - mean
            self.means[place] = log_seconds if math.isnan(mean) else mean + pace * gap

    def row(self, now: float) -> list[float]:
        for times, seconds in zip(self.came, WINDOWS_SECONDS, strict=True):
            while times and times[0] <= now - seconds:
                times.popleft()
        ordered = sorted(self.latest) or [math.nan]
        return [
            *self.means,
            self.latest[-1] if self.latest else math.nan,
            ordered[len(ordered) // 10],
            ordered[len(ordered) // 2],
            ordered[-1 - len(ordered) // 10],
            now - self.last_came,
            now - self.last_over,
            *(float(len(times)) for times in self.came),
        ]


class History:
    """Statistics of all jobs so far, updated in the order of time.

    Jobs that are submitted again take about as long as they took before. Traces without names
    have at most a user, so the kinds of jobs are those of one group, number of devices and user.
    """

    def __init__(self) -> None:
        self._pasts: dict[Hashable, _Past] = {}
        self._codes: dict[Hashable, float] = {}

    def row(self, job: Job) -> list[float]:
        """Features of a job that is submitted now; they use nothing that happens later."""
        now = job.submitted
        row = [
            float(job.devices),
            self._code("group", job.group),
            self._code("user", job.params.get("user")),
            now % DAY / HOUR,
            float(now % WEEK // DAY),
        ]
        for kind in _kinds(job):
            row += self._past(kind).row(now)
        return row

    def rolling(self, job: Job) -> float:
        """Mean seconds of recent jobs of the same kind, NaN if there are none."""
        for kind in _kinds(job):
            mean = self._past(kind).means[0]
            if not math.isnan(mean):
                return math.exp(mean)
        return math.nan

    def submitted(self, job: Job) -> None:
        """Record a submission."""
        for kind in _kinds(job):
            self._past(kind).came_at(job.submitted)

    def finished(self, job: Job, now: float, seconds: float) -> None:
        """Record the time of a finished job."""
        for kind in _kinds(job):
            self._past(kind).over_at(now, math.log(seconds))

    def _past(self, kind: Hashable) -> _Past:
        if kind not in self._pasts:
            self._pasts[kind] = _Past()
        return self._pasts[kind]

    def _code(self, name: str, value: Any) -> float:
        """The code of a category, in the order of first appearance, from 0."""
        key = (name, value)
        if key not in self._codes:
            self._codes[key] = float(sum(known[0] == name for known in self._codes))  # type: ignore[index]
        return self._codes[key]


CATEGORIES = (1, 2)
"""Columns of a row that hold codes."""


def _kinds(job: Job) -> tuple[Hashable, ...]:
    """Keys of the kinds that a job belongs to, the most specific first."""
    user = job.params.get("user")
    like = (job.group, job.devices, user)
    return like, (job.group, user), ("devices", job.devices)
