"""Input and output of a simulation: failures of devices, slices, and the whole trace."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.simulator._workload import Recording


class Slice(NamedTuple):
    """One unit on one device.

    Args:
        start: time at which the trial got the device.
        end: time at which the unit was reported, or the device failed.
        device: index of the device.
        number: the trial's number.
        unit: the trial's unit, from 1; 0 where the device failed before its end.
        value: the reported value, NaN where the device failed.
        switched: whether the device changed to another trial for it.
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
    """A failure of a device: its unit is lost, its trial goes on from the end of the last one.

    A unit that would end at that very moment is lost too.

    Args:
        at: time of the failure in seconds.
        device: index of the device.
        seconds: time until it can be used again.

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
    """The result of a simulation.

    Args:
        slices: all slices in the order of their ends.
        finished: times of trials that were trained to their ends, by number.
        pruned: times of trials that were pruned, by number.
        recordings: the training of each opened trial, by number.
        decisions: number of calls of the policy.
    """

    slices: tuple[Slice, ...]
    finished: dict[int, float]
    pruned: dict[int, float]
    recordings: tuple[Recording, ...]
    decisions: int
