"""Predictor of jobs' device time that learns from jobs finished before a submission."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable

import numpy as np

from optuna_hermes.cluster.job_estimates import Estimator, alone_seconds
from optuna_hermes.cluster.job_history import CATEGORIES, History
from optuna_hermes.cluster.jobs import Job, JobRecord
from optuna_hermes.cluster.similar import ROLLING, Numbers, fit_trees

FIRST = 100
"""Number of finished jobs from which trees are first fitted."""

GROWTH = 1.15
"""Growth of the number of finished jobs at which trees are fitted anew."""

LATEST = 20_000
"""Number of latest jobs that trees are fitted to."""

UNKNOWN_SECONDS = 3_600.0
"""Prediction for jobs before any has finished."""


class Learned(Estimator):
    """Predicts ``0.1 * rolling + 0.9 * trees`` for the time of a job, times its devices.

    Hu et al., SC 2021, look up jobs of similar names of the same user, and give trees the
    calendar, user, name and devices. The rest is this project's own: in a trace without names the
    features are the recent times of jobs of the same group, number of devices and user, and the
    times of the last submissions. All are known at submission; a job's own time is learned at its
    end. Without LightGBM there is the rolling estimate only.

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
        """Learn from a finished job."""
        self._over(record.job, record.finished, record.device_seconds / record.job.devices)

    def read(self, jobs: Iterable[Job], until: float) -> None:
        """Learn from earlier jobs, each taken to have started at its submission.

        Args:
            jobs: earlier jobs.
            until: present time in seconds; jobs that end later are not learned from.
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
