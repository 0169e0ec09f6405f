"""What is expected of a job when it is submitted."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from optuna_hermes.simulator._jobs import Job, JobRecord


class Estimator(ABC):
    """Says what a job is expected to take; told of everything in the order in which it happens."""

    @abstractmethod
    def submitted(self, job: Job) -> float | None:
        """A job comes; its work must not be looked at, save by an oracle.

        Returns:
            Device seconds that it is expected to take, None if nobody can say.
        """

    def finished(self, record: JobRecord) -> None:  # noqa: B027
        """A job is over, and what it took is known from now on."""


class Clairvoyant(Estimator):
    """Knows what every job takes: a bound."""

    def submitted(self, job: Job) -> float:
        """What it takes on the devices it wants, packed onto one host."""
        return alone_seconds(job) * job.devices


class Noisy(Estimator):
    """Knows what a job takes, with the errors of a predictor.

    The errors are those that Hu et al., SC 2021, put in the place of their predictor in their
    replay of Philly: 10 % of the estimates are off by up to 10 % of the true time, the next 40 %
    by 10 to 50 %, 20 % by 50 to 100 %, 20 % by one to ten times the true time and 10 % by ten to a
    hundred times, upwards as often as downwards. A time cannot be negative: here an estimate is
    never below a second.

    Args:
        seed: of the errors; a job has the same error whoever else comes.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def submitted(self, job: Job) -> float:
        """The time with its error, times devices."""
        draw = np.random.default_rng((self._seed, job.number))
        level = draw.random()
        low, high = next((low, high) for share, low, high in _ERRORS if level <= share)
        error = float(draw.uniform(low, high) * draw.choice((-1.0, 1.0)))
        return max(1.0, alone_seconds(job) * (1.0 + error)) * job.devices


_ERRORS = ((0.1, 0.0, 0.1), (0.5, 0.1, 0.5), (0.7, 0.5, 1.0), (0.9, 1.0, 10.0), (1.0, 10.0, 100.0))
"""Up to which share of the jobs, and how far the estimate is off, in multiples of the time."""


def alone_seconds(job: Job) -> float:
    """What a job takes if it gets the devices it wants, on one host, when it comes."""
    done = seconds = 0.0
    while done < job.work.total:
        rate, until = job.work.speed(done, (job.devices,), None)
        until = min(until, job.work.total)
        seconds += (until - done) / rate
        done = until
    return seconds
