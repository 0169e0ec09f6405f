"""Jobs of a cluster: when they come, what they want, and what became of them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from optuna_hermes.errors import InvalidInputError

Placement = tuple[int, ...]
"""How many devices of each host a job has, the most first: (8, 8, 4)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SoFar:
    """What a job has done, as far as a policy may know.

    Args:
        done: progress.
        batch_size: what it trained with last, None if that is its own.
        trained: where it has trained, and with what batch size.
        stretches: device seconds that it had had when each stretch of one speed was over.
    """

    done: float = 0.0
    batch_size: int | None = None
    trained: frozenset[tuple[Placement, int | None]] = frozenset()
    stretches: tuple[float, ...] = ()


class Work(ABC):
    """How much a job has to do, and how fast it does it."""

    @property
    @abstractmethod
    def total(self) -> float:
        """The amount of progress at which it is done, in any unit."""

    @abstractmethod
    def speed(self, done: float, devices: Placement, batch_size: int | None) -> tuple[float, float]:
        """How fast it goes on.

        Args:
            done: progress so far.
            devices: where it runs.
            batch_size: samples a step over all devices, None for the job's own.

        Returns:
            Progress a second, above 0, and the progress up to which that holds, above ``done``.
        """

    def shown(self, so_far: SoFar) -> Mapping[str, Any]:
        """What a policy sees of it: fields of its ``RunView`` that are its own to fill.

        Args:
            so_far: what the job has done.
        """
        return {}


@dataclass(frozen=True, slots=True)
class FixedWork(Work):
    """Takes so many seconds on the devices that the job wants.

    Args:
        seconds: above 0.
    """

    seconds: float

    @property
    def total(self) -> float:
        """The seconds."""
        return self.seconds

    def speed(self, done: float, devices: Placement, batch_size: int | None) -> tuple[float, float]:
        """One second a second."""
        return 1.0, self.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job that somebody submits.

    Args:
        number: unique in its trace.
        submitted: when, in seconds.
        work: what it has to do. No policy sees it.
        devices: how many it wants at once.
        group: the virtual cluster that it may use, None where there is only one.
        params: what is known of it when it is submitted, such as its user.

    Raises:
        InvalidInputError: it wants no device, or its time or work is out of range.
    """

    number: int
    submitted: float
    work: Work
    devices: int = 1
    group: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (0 <= self.submitted < math.inf and 0 < self.work.total < math.inf):
            raise InvalidInputError(
                "A job must come at a finite time of at least 0 and have some work to do but got "
                f"submitted={self.submitted} and work of {self.work.total}."
            )
        if self.devices < 1:
            raise InvalidInputError(f"A job must want a device at least but got {self.devices}.")


class JobRecord(NamedTuple):
    """What became of a job.

    Args:
        job: the job.
        started: when it had its first devices.
        finished: when it was done.
        run_seconds: how long it had devices, restarts included.
        device_seconds: the same, times devices.
        restarts: how often it went on elsewhere, or after a pause.
    """

    job: Job
    started: float
    finished: float
    run_seconds: float
    device_seconds: float
    restarts: int

    @property
    def completion_seconds(self) -> float:
        """From its submission to its end."""
        return self.finished - self.job.submitted

    @property
    def queueing_seconds(self) -> float:
        """What it spent without devices."""
        return self.completion_seconds - self.run_seconds


@dataclass(frozen=True, kw_only=True)
class JobTrace:
    """What a simulation of jobs did.

    Args:
        records: in the order of their ends.
        n_devices: of all groups.
        decisions: how often the policy was asked.
        refused: jobs that want more devices than their group has: they never ran.
        unfinished: jobs that had not ended when the simulation stopped.
    """

    records: tuple[JobRecord, ...]
    n_devices: int
    decisions: int
    refused: tuple[Job, ...] = ()
    unfinished: tuple[Job, ...] = ()
