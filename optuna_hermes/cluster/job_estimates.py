"""Predictions of a job's device time at its submission."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from optuna_hermes.cluster.jobs import Job, JobRecord


class Estimator(ABC):
    """Predictor of jobs' device time; its methods are called in the order of simulated time."""

    @abstractmethod
    def submitted(self, job: Job) -> float | None:
        """Predict a submitted job; only an oracle may read its ``work``.

        Returns:
            Expected device seconds, None without a prediction.
        """

    def finished(self, record: JobRecord) -> None:  # noqa: B027
        """Learn from a finished job, whose time is known from now on."""


class Clairvoyant(Estimator):
    """Perfect predictor, as a bound."""

    def submitted(self, job: Job) -> float:
        """Its true device seconds on the devices it wants, on one host."""
        return alone_seconds(job) * job.devices


class Noisy(Estimator):
    """True times with the errors of a predictor.

    The errors are those that Hu et al., SC 2021, put in the place of their predictor in their
    replay of Philly: 10 % of the estimates are off by up to 10 % of the true time, the next 40 %
    by 10 to 50 %, 20 % by 50 to 100 %, 20 % by one to ten times the true time and 10 % by ten to a
    hundred times, upwards as often as downwards. A time cannot be negative: here an estimate is
    never below a second.

    Args:
        seed: seed of the errors; a job's error does not depend on other jobs.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def submitted(self, job: Job) -> float:
        """The time with its error, times the number of devices."""
        draw = np.random.default_rng((self._seed, job.number))
        level = draw.random()
        low, high = next((low, high) for share, low, high in _ERRORS if level <= share)
        error = float(draw.uniform(low, high) * draw.choice((-1.0, 1.0)))
        return max(1.0, alone_seconds(job) * (1.0 + error)) * job.devices


_ERRORS = ((0.1, 0.0, 0.1), (0.5, 0.1, 0.5), (0.7, 0.5, 1.0), (0.9, 1.0, 10.0), (1.0, 10.0, 100.0))
"""Cumulative share of jobs, least and largest relative error of each class."""


def alone_seconds(job: Job) -> float:
    """Time of a job that gets the devices it wants, on one host, at once."""
    done = seconds = 0.0
    while done < job.work.total:
        rate, until = job.work.speed(done, (job.devices,), None)
        until = min(until, job.work.total)
        seconds += (until - done) / rate
        done = until
    return seconds
