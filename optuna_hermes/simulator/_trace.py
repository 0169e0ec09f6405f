"""What a simulation is told, and what it has done."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.simulator._workload import Recording


class Slice(NamedTuple):
    """One unit on one device.

    Args:
        start: when the device was given to the run.
        end: when the unit was reported, or the device failed.
        device: its index.
        number: the trial's.
        unit: which one of the trial, from 1; 0 where the device failed before its end.
        value: what was reported, NaN where nothing was.
        switched: whether the device changed run for it.
    """

    start: float
    end: float
    device: int
    number: int
    unit: int
    value: float
    switched: bool


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A device fails: the unit on it is lost, its run goes on from the end of the last one.

    A unit that would end at that very moment is lost too.

    Args:
        at: when, in seconds.
        device: index of the device.
        seconds: until it can be used again.

    Raises:
        InvalidInputError: a time is negative or not finite.
    """

    at: float
    device: int
    seconds: float

    def __post_init__(self) -> None:
        if not (0 <= self.at < math.inf and 0 <= self.seconds < math.inf):
            raise InvalidInputError(
                "A failure must have finite times of at least 0 but got "
                f"at={self.at} and seconds={self.seconds}."
            )


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What a simulation did.

    Args:
        slices: in the order of their ends.
        finished: number of each trial that was trained to its end, and when.
        pruned: number of each trial that was pruned, and when.
        recordings: every opened trial's training, by number.
        decisions: how often the policy was asked.
    """

    slices: tuple[Slice, ...]
    finished: dict[int, float]
    pruned: dict[int, float]
    recordings: tuple[Recording, ...]
    decisions: int
