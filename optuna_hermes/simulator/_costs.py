"""What it costs a device to change from one run to another."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import TierName


@dataclass(frozen=True, kw_only=True)
class SwitchCosts:
    """The price of a change: a fraction of the unit that is trained next, and seconds by tier.

    Args:
        fraction: of that unit.
        resident_seconds: to go on with a run whose state is still on the device.
        host_seconds: to bring it from the host's memory, or from another device.
        disk_seconds: to bring it from disk.
        resident_runs: suspended runs that stay on each device beside the one that trains; of more,
            the one that stopped longest ago leaves.
        host_runs: suspended runs that each host's memory holds; the others are on disk.

    Raises:
        InvalidInputError: a price or a number is negative or not finite.
    """

    fraction: float = 0.0
    resident_seconds: float = 0.0
    host_seconds: float = 0.0
    disk_seconds: float = 0.0
    resident_runs: int = 1
    host_runs: int = 1_000_000

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:
                raise InvalidInputError(
                    f"{field.name} must be finite and at least 0 but got {value}."
                )

    @property
    def by_tier(self) -> bool:
        """Whether it matters where a run waits."""
        return self.resident_seconds + self.host_seconds + self.disk_seconds > 0

    def seconds(self, unit_seconds: float, tier: TierName | None) -> float:
        """What a change costs.

        Args:
            unit_seconds: length of the unit that is trained next.
            tier: where the run waits, None for a trial that is opened: it has nothing to bring.
        """
        return self.fraction * unit_seconds + self.moving(tier)

    def moving(self, tier: TierName | None) -> float:
        """Seconds to bring a run from a tier."""
        if tier is None:
            return 0.0
        by_tier = {
            "resident": self.resident_seconds,
            "host": self.host_seconds,
            "disk": self.disk_seconds,
        }
        return by_tier[tier]
