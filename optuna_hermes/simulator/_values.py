"""Input and output of a simulation: costs, slices, and the whole trace."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.simulator._workload import Recording


def _check_finite(costs: Any) -> None:
    """Refuse numbers of a dataclass that are negative or not finite."""
    for field in fields(costs):
        value = getattr(costs, field.name)
        if not 0 <= value < math.inf:
            raise InvalidInputError(f"{field.name} must be finite and at least 0 but got {value}.")


@dataclass(frozen=True, kw_only=True)
class SwitchCosts:
    """The costs of a device that changes to another trial.

    Args:
        fraction: share of the time of the unit that is trained next.
        seconds: time to resume a suspended trial, beside that; a new one has none.
    """

    fraction: float = 0.0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        _check_finite(self)

    def of(self, unit_seconds: float, *, is_new: bool = False) -> float:
        """The cost of a change before a unit of so many seconds."""
        return self.fraction * unit_seconds + (0.0 if is_new else self.seconds)


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Device time that is not trained in, beside that of switches.

    Args:
        opening_seconds: from a new trial's lease to its first batch.
        opening_fraction: the same, as a share of the time of that trial's first unit.
        decision_seconds: from the report of a unit to the next unit on that device.
        startup_seconds: from the start of the command to the first lease.
    """

    opening_seconds: float = 0.0
    opening_fraction: float = 0.0
    decision_seconds: float = 0.0
    startup_seconds: float = 0.0

    def __post_init__(self) -> None:
        _check_finite(self)

    def opening(self, unit_seconds: float) -> float:
        """Seconds that an opening takes before a first unit of so many seconds."""
        return self.opening_seconds + self.opening_fraction * unit_seconds


class Slice(NamedTuple):
    """One unit on one device.

    Args:
        start: time at which the trial got the device.
        end: time at which the unit was reported.
        device: index of the device.
        number: the trial's number.
        unit: the trial's unit, from 1.
        value: the reported value.
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
    recordings: Mapping[int, Recording]
    decisions: int
