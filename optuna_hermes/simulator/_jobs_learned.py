"""What a job is expected to take, learned from the jobs that were over when it came."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable

import numpy as np

from optuna_hermes.policies._similar import ROLLING
from optuna_hermes.policies._trees import Numbers, fit_trees
from optuna_hermes.simulator._jobs import Job, JobRecord
from optuna_hermes.simulator._jobs_estimates import Estimator, alone_seconds
from optuna_hermes.simulator._jobs_history import CATEGORIES, History

FIRST = 100
"""Finished jobs that trees are first grown from."""

GROWTH = 1.15
"""They are grown anew when so many times as many jobs are over."""

LATEST = 20_000
"""Jobs that trees learn from: the latest."""

UNKNOWN_SECONDS = 3_600.0
"""What the first job of all is expected to take."""


class Learned(Estimator):
    """``0.1 * rolling + 0.9 * trees`` of the time of a job, times its devices.

    Hu et al., SC 2021, look up jobs of like names of the same user, and let trees see the
    calendar, user, name and devices. The rest is this project's own: a trace without names says of
    a job what jobs of its group, number of devices and user took of late, and when the last ones
    came. All of it is known when the job comes; what it takes itself is learned when it is over.
    Without LightGBM there is the rolling estimate only.

    Args:
        trees: whether to use LightGBM where it is installed.
    """

    def __init__(self, *, trees: bool = True) -> None:
        self._history = History()
        self._rows: dict[int, list[float]] = {}
        self._known: list[tuple[list[float], float]] = []
        self._grown_from = 0
        self._use_trees = trees
        self._trees: Callable[[Numbers], Numbers] | None = None

    def submitted(self, job: Job) -> float:
        """The estimate, in device seconds."""
        row = self._come(job)
        rolling = self._history.rolling(job)
        self._history.submitted(job)
        seconds = UNKNOWN_SECONDS if math.isnan(rolling) else rolling
        self._grow()
        if self._trees is not None:
            predicted = math.exp(float(self._trees(np.array([row]))[0]))
            seconds = ROLLING * seconds + (1 - ROLLING) * predicted
        return seconds * job.devices

    def finished(self, record: JobRecord) -> None:
        """From now on it is learned from."""
        self._over(record.job, record.finished, record.device_seconds / record.job.devices)

    def read(self, jobs: Iterable[Job], until: float) -> None:
        """Learn from jobs that ran before, each as soon as it came: those that were over by then.

        Args:
            jobs: of the past.
            until: the present, in seconds.
        """
        ends: list[tuple[float, int, Job]] = []
        for job in sorted(jobs, key=lambda job: (job.submitted, job.number)):
            self._read_ends(ends, job.submitted)
            self._come(job)
            self._history.submitted(job)
            end = job.submitted + alone_seconds(job)
            heapq.heappush(ends, (end, job.number, job))
        self._read_ends(ends, until)
        self._rows.clear()

    def _read_ends(self, ends: list[tuple[float, int, Job]], until: float) -> None:
        while ends and ends[0][0] <= until:
            end, _, job = heapq.heappop(ends)
            self._over(job, end, end - job.submitted)

    def _come(self, job: Job) -> list[float]:
        self._rows[job.number] = self._history.row(job)
        return self._rows[job.number]

    def _over(self, job: Job, now: float, seconds: float) -> None:
        self._history.finished(job, now, seconds)
        self._known.append((self._rows.pop(job.number), math.log(seconds)))

    def _grow(self) -> None:
        n_known = len(self._known)
        if not self._use_trees or n_known < max(FIRST, GROWTH * self._grown_from):
            return
        self._grown_from = n_known
        rows, targets = zip(*self._known[-LATEST:], strict=True)
        self._trees = fit_trees(np.array(rows), np.array(targets), categories=CATEGORIES)
