"""Jobs of a cluster: their submission, their work, and records of their completion."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from optuna_hermes.errors import InvalidInputError

Placement = tuple[int, ...]
"""Numbers of a job's devices on each host, the largest first: (8, 8, 4)."""


@dataclass(kw_only=True)
class JobProgress:
    """A job's progress so far, as far as a policy may know it."""

    done: float = 0.0  # progress, in the unit of its work
    batch_size: int | None = None  # the last batch size, None for the job's own
    # Placements and batch sizes that it has trained with.
    trained: set[tuple[Placement, int | None]] = field(default_factory=set)
    # Device seconds attained at the end of each stretch of constant speed.
    stretches: list[float] = field(default_factory=list)


class Work(ABC):
    """The amount of a job's work, and its speed."""

    @property
    @abstractmethod
    def total(self) -> float:
        """The amount of progress at which the job is done, in any unit."""

    @abstractmethod
    def speed(self, done: float, devices: Placement, batch_size: int | None) -> tuple[float, float]:
        """Progress per second from ``done`` on, above 0, and the progress up to which it holds.

        ``batch_size`` None is the job's own.
        """

    def shown(self, progress: JobProgress) -> Mapping[str, Any]:
        """Fields of the job's ``TrialView`` that depend on its kind of work."""
        return {}


@dataclass(frozen=True, slots=True)
class FixedWork(Work):
    """Work of a fixed time, in seconds above 0, on the devices that the job wants."""

    seconds: float

    @property
    def total(self) -> float:
        """The seconds, as progress."""
        return self.seconds

    def speed(self, done: float, devices: Placement, batch_size: int | None) -> tuple[float, float]:
        """One second of work per second."""
        return 1.0, self.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterJob:
    """A job of a cluster, as in its trace."""

    number: int  # unique in its trace
    submitted: float  # time in seconds
    work: Work  # hidden from policies
    devices: int = 1  # number of those that it wants at once
    group: str | None = None  # virtual cluster that it may use, None where there is only one
    params: Mapping[str, Any] = field(default_factory=dict)  # known at submission, such as its user

    def __post_init__(self) -> None:
        if not (0 <= self.submitted < math.inf and 0 < self.work.total < math.inf):
            raise InvalidInputError(
                "A job must come at a finite time of at least 0 and have some work to do but got "
                f"submitted={self.submitted} and work of {self.work.total}."
            )
        if self.devices < 1:
            raise InvalidInputError(f"A job must want a device at least but got {self.devices}.")


class JobRecord(NamedTuple):
    """The record of a finished job."""

    job: ClusterJob
    started: float  # time at which it got its first devices
    finished: float  # time of its end
    run_seconds: float  # time with devices, restarts included
    device_seconds: float  # the same, times its number of devices
    restarts: int  # number of times it went on elsewhere, or after a pause

    @property
    def completion_seconds(self) -> float:
        """Time from submission to end."""
        return self.finished - self.job.submitted

    @property
    def queueing_seconds(self) -> float:
        """Time without devices."""
        return self.completion_seconds - self.run_seconds


@dataclass(frozen=True, kw_only=True)
class JobTrace:
    """The result of a simulation of jobs."""

    records: tuple[JobRecord, ...]  # finished jobs in the order of their ends
    n_devices: int  # number of devices of all groups
    decisions: int  # number of calls of the policy
