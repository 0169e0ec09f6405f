"""What `energy` remembers from one decision to the next: demand, tick by tick. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from optuna_hermes.policies._energy_forecast import KEPT_TICKS, remembered
from optuna_hermes.policies._energy_rules import TICK_SECONDS


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """The demand for one host's devices.

    Args:
        host: its name.
        tick: the one that is not over yet.
        level: demand at the last decision.
        peak: the highest demand of this tick so far.
        peaks: those of the ticks before, oldest first.
        locked_until: nothing is powered down before, by the snapshots' clock.
    """

    host: str
    tick: int
    level: int
    peak: int
    peaks: tuple[int, ...] = ()
    locked_until: float = 0.0

    @property
    def has_risen(self) -> bool:
        """Whether it ever rose from one tick to the next: then it may do so again."""
        return any(before < after for before, after in pairwise((*self.peaks, self.peak)))

    def recent(self, ticks: int) -> int:
        """The highest demand of so many ticks, and of this one."""
        return max(self.peak, *self.peaks[-ticks:])

    def seen(self, level: int, now: float) -> Demand:
        """With the demand of this moment; between two decisions it is taken to have stayed."""
        tick = tick_of(now)
        peaks, peak = self.peaks, self.peak
        for _ in range(min(tick - self.tick, KEPT_TICKS)):
            peaks, peak = remembered(peaks, peak), self.level
        return replace(self, tick=tick, level=level, peak=max(peak, level), peaks=peaks)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self) | {"peaks": list(self.peaks)}


def tick_of(now: float) -> int:
    """The tick of a moment."""
    return int(now // TICK_SECONDS)


def recall(known: Any, *, host: str, level: int, now: float) -> Demand:
    """The demand that was remembered, with that of this moment.

    What is of another host, or of a clock that was ahead of this one, is forgotten: a clock begins
    anew when its host does.
    """
    if isinstance(known, Mapping):
        try:
            demand = Demand(**{**known, "peaks": tuple(known["peaks"])})
        except (KeyError, TypeError):  # of another version
            demand = None
        if demand is not None and demand.host == host and demand.tick <= tick_of(now):
            return demand.seen(level, now)
    return Demand(host=host, tick=tick_of(now), level=level, peak=level)
