"""Policy memory of `energy` between two decisions: demand, tick by tick. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from optuna_hermes.cluster.energy_forecast import KEPT_TICKS, remembered
from optuna_hermes.cluster.energy_rules import TICK_SECONDS


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """The history of demand for one host's devices.

    Args:
        host: the host's name.
        tick: the current tick, not over yet.
        level: demand at the last decision.
        peak: the highest demand of this tick so far.
        peaks: the highest demand of each tick before, oldest first.
        locked_until: time before which nothing is powered down, by the snapshots' clock.
    """

    host: str
    tick: int
    level: int
    peak: int
    peaks: tuple[int, ...] = ()
    locked_until: float = 0.0

    @property
    def has_risen(self) -> bool:
        """True if demand ever rose from one tick to the next: then it may do so again."""
        return any(before < after for before, after in pairwise((*self.peaks, self.peak)))

    def recent(self, ticks: int) -> int:
        """The highest demand of the last ``ticks`` ticks and of this one."""
        return max(self.peak, *self.peaks[-ticks:])

    def seen(self, level: int, now: float) -> Demand:
        """Record the demand of now; between two decisions the last level is assumed."""
        tick = tick_of(now)
        peaks, peak = self.peaks, self.peak
        for _ in range(min(tick - self.tick, KEPT_TICKS)):
            peaks, peak = remembered(peaks, peak), self.level
        return replace(self, tick=tick, level=level, peak=max(peak, level), peaks=peaks)

    def as_json(self) -> dict[str, Any]:
        """The history as plain JSON."""
        return asdict(self) | {"peaks": list(self.peaks)}


def tick_of(now: float) -> int:
    """The tick that contains a time."""
    return int(now // TICK_SECONDS)


def recall(known: Any, *, host: str, level: int, now: float) -> Demand:
    """Restore the history from policy memory and record the demand of now.

    A history of another host, or of a clock ahead of this one, is dropped: the clock restarts at
    a reboot of its host.
    """
    if isinstance(known, Mapping):
        try:
            demand = Demand(**{**known, "peaks": tuple(known["peaks"])})
        except (KeyError, TypeError):  # of another version
            demand = None
        if demand is not None and demand.host == host and demand.tick <= tick_of(now):
            return demand.seen(level, now)
    return Demand(host=host, tick=tick_of(now), level=level, peak=level)
