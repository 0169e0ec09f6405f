"""Predictions of a job's device time at its submission, from earlier jobs or with hindsight."""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable

import numpy as np

from optuna_hermes.cluster.jobs import ClusterJob, JobRecord
from optuna_hermes.cluster.similar import ROLLING, Numbers, fit_trees

HOUR, DAY, WEEK = 3_600.0, 86_400.0, 604_800.0

# Number of finished jobs from which trees are first fitted.
FIRST = 100
# Growth of the number of finished jobs at which trees are fitted anew.
GROWTH = 1.15
# Number of latest jobs that trees are fitted to.
LATEST = 20_000
# Prediction for jobs before any has finished.
UNKNOWN_SECONDS = HOUR
# Of a job, at least: logarithms are learned from.
LEAST_SECONDS = 1e-6
# Weights of the latest job in the exponential means.
PACES = (0.2, 0.02)
# Number of latest jobs that quantiles are taken of.
KEPT = 20
# Times over which submissions are counted.
WINDOWS_SECONDS = (600.0, DAY)
# Columns of a row of features that hold codes.
CATEGORIES = (1, 2)
# Cumulative share of jobs, least and largest relative error of each class, from the replay of
# Philly by Hu et al., SC 2021; upwards as often as downwards.
_ERRORS = ((0.1, 0.0, 0.1), (0.5, 0.1, 0.5), (0.7, 0.5, 1.0), (0.9, 1.0, 10.0), (1.0, 10.0, 100.0))


class Estimator(ABC):
    """Predictor of jobs' device time; its methods are called in the order of simulated time."""

    @abstractmethod
    def submitted(self, job: ClusterJob) -> float | None:
        """Predict a job's device seconds, if it can; only an oracle may read its ``work``."""

    def finished(self, record: JobRecord) -> None:  # noqa: B027
        """Learn from a finished job, whose time is known from now on."""


class Clairvoyant(Estimator):
    """Perfect predictor, as a bound."""

    def submitted(self, job: ClusterJob) -> float:
        """Its true device seconds on the devices it wants, on one host."""
        return alone_seconds(job) * job.devices


class Noisy(Estimator):
    """True times with the errors that Hu et al., SC 2021, put in the place of their predictor."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def submitted(self, job: ClusterJob) -> float:
        """The time with its error, times the number of devices."""
        # Seeded by the job: its error does not depend on other jobs.
        draw = np.random.default_rng((self._seed, job.number))
        level = draw.random()
        low, high = next((low, high) for share, low, high in _ERRORS if level <= share)
        error = float(draw.uniform(low, high) * draw.choice((-1.0, 1.0)))
        # A time cannot be negative, as most errors downwards would make it.
        return max(1.0, alone_seconds(job) * (1.0 + error)) * job.devices


def alone_seconds(job: ClusterJob) -> float:
    """Time of a job that gets the devices it wants, on one host, at once."""
    done = seconds = 0.0
    while done < job.work.total:
        rate, until = job.work.speed(done, (job.devices,), None)
        until = min(until, job.work.total)
        seconds += (until - done) / rate
        done = until
    return seconds


class Learned(Estimator):
    """Predicts ``0.1 * rolling + 0.9 * trees`` for the time of a job, times its devices.

    Hu et al., SC 2021, look up jobs of similar names of the same user, and give trees the
    calendar, user, name and devices. The rest is this project's own: in a trace without names the
    features are the recent times of jobs of the same group, number of devices and user, and the
    times of the last submissions. Without LightGBM there is the rolling estimate only.

    Args:
        trees: whether to use LightGBM where it is installed.
    """

    def __init__(self, *, trees: bool = True) -> None:
        self._of_kind: defaultdict[Hashable, _KindHistory] = defaultdict(_KindHistory)
        self._codes: dict[str, dict[Hashable, float]] = {"group": {}, "user": {}}
        self._rows: dict[int, list[float]] = {}
        self._known: list[tuple[list[float], float]] = []
        self._n_fitted = 0
        self._use_trees = trees
        self._trees: Callable[[Numbers], Numbers] | None = None

    def submitted(self, job: ClusterJob) -> float:
        """The estimate from what is known at submission."""
        # Mean seconds of recent jobs of the most specific kind that has any.
        means = (history.means[0] for history in self._histories(job))
        known = (math.exp(mean) for mean in means if not math.isnan(mean))
        seconds = next(known, UNKNOWN_SECONDS)
        row = self._submitted(job)
        n_known = len(self._known)
        if self._use_trees and n_known >= max(FIRST, GROWTH * self._n_fitted):
            self._n_fitted = n_known
            rows, targets = zip(*self._known[-LATEST:], strict=True)
            self._trees = fit_trees(np.array(rows), np.array(targets), categories=CATEGORIES)
        if self._trees is not None:
            predicted = math.exp(float(self._trees(np.array([row]))[0]))
            seconds = ROLLING * seconds + (1 - ROLLING) * predicted
        return seconds * job.devices

    def finished(self, record: JobRecord) -> None:
        """Learn from a finished job."""
        self._finished(record.job, record.finished, record.device_seconds / record.job.devices)

    def read(self, jobs: Iterable[ClusterJob], until: float) -> None:
        """Learn from earlier jobs that end by ``until``, each taken to begin at its submission."""
        # Ends and submissions in the order of time: a row must not know of ends after it.
        ends: list[tuple[float, int, ClusterJob]] = []
        for job in sorted(jobs, key=lambda job: (job.submitted, job.number)):
            self._read_ends(ends, job.submitted)
            self._submitted(job)
            heapq.heappush(ends, (job.submitted + alone_seconds(job), job.number, job))
        self._read_ends(ends, until)
        self._rows.clear()

    def _read_ends(self, ends: list[tuple[float, int, ClusterJob]], until: float) -> None:
        while ends and ends[0][0] <= until:
            end, _, job = heapq.heappop(ends)
            self._finished(job, end, end - job.submitted)

    def _submitted(self, job: ClusterJob) -> list[float]:
        now = job.submitted
        row = self._rows[job.number] = [
            float(job.devices),
            self._code("group", job.group),
            self._code("user", job.params.get("user")),
            now % DAY / HOUR,
            float(now % WEEK // DAY),
        ]
        for history in self._histories(job):
            row += history.row(now)
            history.submitted(now)
        return row

    def _finished(self, job: ClusterJob, now: float, seconds: float) -> None:
        # A job may be shorter than the resolution of the clock that it is seen by.
        log_seconds = math.log(max(seconds, LEAST_SECONDS))
        for history in self._histories(job):
            history.finished(now, log_seconds)
        self._known.append((self._rows.pop(job.number), log_seconds))

    def _histories(self, job: ClusterJob) -> list[_KindHistory]:
        # Jobs that are submitted again take about as long as before. Traces without names have at
        # most a user, so kinds are by group, number of devices and user, the most specific first.
        user = job.params.get("user")
        kinds = (job.group, job.devices, user), (job.group, user), ("devices", job.devices)
        return [self._of_kind[kind] for kind in kinds]

    def _code(self, name: str, value: Hashable) -> float:
        codes = self._codes[name]
        return codes.setdefault(value, float(len(codes)))


class _KindHistory:
    """Statistics of the jobs of one kind: their submissions, and the times of finished ones."""

    def __init__(self) -> None:
        self.means = [math.nan] * len(PACES)
        self._latest: deque[float] = deque(maxlen=KEPT)
        self._submissions: list[deque[float]] = [deque() for _ in WINDOWS_SECONDS]
        self._last_submitted = math.nan
        self._last_finished = math.nan

    def submitted(self, now: float) -> None:
        self._last_submitted = now
        for times in self._submissions:
            times.append(now)

    def finished(self, now: float, log_seconds: float) -> None:
        self._last_finished = now
        self._latest.append(log_seconds)
        self.means = [
            log_seconds if math.isnan(mean) else mean + pace * (log_seconds - mean)
            for mean, pace in zip(self.means, PACES, strict=True)
        ]

    def row(self, now: float) -> list[float]:
        for times, seconds in zip(self._submissions, WINDOWS_SECONDS, strict=True):
            while times and times[0] <= now - seconds:
                times.popleft()
        ordered = sorted(self._latest) or [math.nan]
        return [
            *self.means,
            self._latest[-1] if self._latest else math.nan,
            ordered[len(ordered) // 10],
            ordered[len(ordered) // 2],
            ordered[-1 - len(ordered) // 10],
            now - self._last_submitted,
            now - self._last_finished,
            *(float(len(times)) for times in self._submissions),
        ]
