"""What is expected of a job when it is submitted."""

from __future__ import annotations

from abc import ABC, abstractmethod

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


def alone_seconds(job: Job) -> float:
    """What a job takes if it gets the devices it wants, on one host, when it comes."""
    done = seconds = 0.0
    while done < job.work.total:
        rate, until = job.work.speed(done, (job.devices,), None)
        until = min(until, job.work.total)
        seconds += (until - done) / rate
        done = until
    return seconds
