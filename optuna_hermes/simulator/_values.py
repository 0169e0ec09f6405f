"""Input and output of a simulation: costs, failures of devices, slices, and the whole trace."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import TierName
from optuna_hermes.simulator._workload import Recording


def check_finite(costs: Any) -> None:
    """Refuse numbers of a dataclass that are negative or not finite."""
    for field in fields(costs):
        value = getattr(costs, field.name)
        if not 0 <= value < math.inf:
            raise InvalidInputError(f"{field.name} must be finite and at least 0 but got {value}.")


@dataclass(frozen=True, kw_only=True)
class SwitchCosts:
    """The cost of a change: a fraction of the unit that is trained next, and seconds by tier.

    Args:
        fraction: share of that unit's time.
        resident_seconds: time to resume a trial whose state is still on the device.
        host_seconds: time to load it from the host's memory, or from another device.
        disk_seconds: time to load it from disk.
        resident_trials: number of suspended trials that stay on each device.
        host_trials: number of suspended trials in each host's memory; the others are on disk.
    """

    fraction: float = 0.0
    resident_seconds: float = 0.0
    host_seconds: float = 0.0
    disk_seconds: float = 0.0
    # Those beside the one that trains; of more, the one that stopped longest ago is evicted.
    resident_trials: int = 1
    host_trials: int = 1_000_000

    def __post_init__(self) -> None:
        check_finite(self)

    @property
    def by_tier(self) -> bool:
        """True if costs depend on the tier of a suspended trial."""
        return self.resident_seconds + self.host_seconds + self.disk_seconds > 0

    def seconds(self, unit_seconds: float, tier: TierName | None) -> float:
        """The cost of a change before a unit of so many seconds; a new trial has no tier."""
        by_tier = {
            None: 0.0,
            "resident": self.resident_seconds,
            "host": self.host_seconds,
            "disk": self.disk_seconds,
        }
        return self.fraction * unit_seconds + by_tier[tier]


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
        check_finite(self)

    def opening(self, unit_seconds: float) -> float:
        """Seconds that an opening takes before a first unit of so many seconds."""
        return self.opening_seconds + self.opening_fraction * unit_seconds


MEASURED: Mapping[str, Overheads] = {
    "set-up": Overheads(opening_seconds=0.05, decision_seconds=0.02, startup_seconds=10.0),
    "lightning": Overheads(opening_seconds=0.7, decision_seconds=0.02, startup_seconds=10.0),
    "loop": Overheads(opening_seconds=0.3, decision_seconds=0.02, startup_seconds=2.0),
}
"""What was measured on CPU slots, by framework; ``set-up`` where a Lightning trial is set up before
its device is free."""


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

    Args:
        at: time of the failure in seconds.
        device: index of the device.
        seconds: time until it can be used again.
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
    recordings: Mapping[int, Recording]
    decisions: int
