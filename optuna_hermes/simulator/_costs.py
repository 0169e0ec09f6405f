"""Costs of a device that changes from one trial to another."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import TierName


@dataclass(frozen=True, kw_only=True)
class SwitchCosts:
    """The cost of a change: a fraction of the unit that is trained next, and seconds by tier.

    Args:
        fraction: share of that unit's time.
        resident_seconds: time to resume a trial whose state is still on the device.
        host_seconds: time to load it from the host's memory, or from another device.
        disk_seconds: time to load it from disk.
        resident_trials: number of suspended trials that stay on each device beside the one that
            trains; of more, the one that stopped longest ago is evicted.
        host_trials: number of suspended trials in each host's memory; the others are on disk.

    Raises:
        InvalidInputError: a price or a number is negative or not finite.
    """

    fraction: float = 0.0
    resident_seconds: float = 0.0
    host_seconds: float = 0.0
    disk_seconds: float = 0.0
    resident_trials: int = 1
    host_trials: int = 1_000_000

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:
                raise InvalidInputError(
                    f"{field.name} must be finite and at least 0 but got {value}."
                )

    @property
    def by_tier(self) -> bool:
        """True if costs depend on the tier of a suspended trial."""
        return self.resident_seconds + self.host_seconds + self.disk_seconds > 0

    def seconds(self, unit_seconds: float, tier: TierName | None) -> float:
        """The cost of a change in seconds.

        Args:
            unit_seconds: length of the unit that is trained next.
            tier: the trial's tier, None for a new trial, which has no state to load.
        """
        return self.fraction * unit_seconds + self.moving(tier)

    def moving(self, tier: TierName | None) -> float:
        """Seconds to load a trial's state from a tier."""
        if tier is None:
            return 0.0
        by_tier = {
            "resident": self.resident_seconds,
            "host": self.host_seconds,
            "disk": self.disk_seconds,
        }
        return by_tier[tier]
