"""Energy: power down the devices that another policy leaves idle."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import Decision, Device, Snapshot
from optuna_hermes.policies.base import Policy, place_of

# Length of a tick: demand is recorded and forecast, and nodes powered down, once a tick.
TICK_SECONDS = 600.0
# Forecast horizon in ticks (an hour).
AHEAD_TICKS = 6

DAY_TICKS = 144
# Length of the history; older ticks are dropped a day at a time.
KEPT_TICKS = 14 * DAY_TICKS
# Ticks of history that a forecast needs.
LEARNING_TICKS = 2 * DAY_TICKS


@dataclass(frozen=True, kw_only=True, slots=True)
class EnergyRules:
    """Buffer and delays of powering nodes down."""

    buffer_share: float = 0.05  # of all nodes, kept powered beyond demand; one node at least
    look_back_ticks: int = 36  # no node that was wanted within so many is powered down
    keep_ticks: int = 3  # for so many after a wake-up nothing is powered down

    def __post_init__(self) -> None:
        if not 0 <= self.buffer_share <= 1:
            raise InvalidInputError(
                f"buffer_share must be between 0 and 1 but got {self.buffer_share}."
            )
        for name in ("look_back_ticks", "keep_ticks"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"{name} must be 1 or more but got {getattr(self, name)}.")

    def buffer(self, n_nodes: int) -> int:
        """Nodes kept powered beyond demand."""
        return max(1, math.ceil(self.buffer_share * n_nodes))

    def wanted(
        self,
        *,
        n_nodes: int,
        powered: int,
        demand: int,
        recent: int,
        expected: float,
        may_fall: bool,
    ) -> int:
        """The number of nodes that shall have power from now on.

        Nodes are woken when demand, now or expected, leaves less than half of the buffer, and then
        for the whole buffer; they are powered down to recent or expected demand plus the buffer.
        """
        # Cluster energy saving (Hu et al., "Helios", SC 2021) has two thresholds, on the fall from
        # the mean of the past and to the mean of the forecast. Here it is the highest demand of the
        # last hours and a forecast of that to come: see docs/design/0017.
        buffer = self.buffer(n_nodes)
        ahead = max(demand, math.ceil(expected))
        least = max(demand + (buffer + 1) // 2, ahead + buffer // 2)
        if powered < min(n_nodes, least):
            return min(n_nodes, ahead + buffer)
        return min(n_nodes, powered, max(recent, ahead) + buffer if may_fall else powered)


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """The history of demand for one host's devices."""

    host: str
    tick: int  # the current tick, not over yet
    level: int  # demand at the last decision
    peak: int  # the highest demand of this tick so far
    peaks: tuple[int, ...] = ()  # the highest demand of each tick before, oldest first
    locked_until: float = 0.0  # time before which nothing is powered down, by the snapshots' clock

    @property
    def has_risen(self) -> bool:
        """True if demand ever rose from one tick to the next."""
        return any(before < after for before, after in pairwise((*self.peaks, self.peak)))

    def recent(self, ticks: int) -> int:
        """The highest demand of the last ``ticks`` ticks and of this one."""
        return max(self.peak, *self.peaks[-ticks:])

    def seen(self, level: int, now: float) -> Demand:
        """Record the demand of now; between two decisions the last level is assumed."""
        tick = int(now // TICK_SECONDS)
        peaks, peak = self.peaks, self.peak
        # More ticks than the history keeps would push each other out.
        for _ in range(min(tick - self.tick, KEPT_TICKS)):
            peaks, peak = appended(peaks, peak), self.level
        return replace(self, tick=tick, level=level, peak=max(peak, level), peaks=peaks)


def restore_demand(known: Any, *, host: str, level: int, now: float) -> Demand:
    """Restore the history from policy memory and record the demand of now."""
    if isinstance(known, Mapping):
        try:
            demand = Demand(**{**known, "peaks": tuple(known["peaks"])})
        except (KeyError, TypeError):  # of another version
            demand = None
        # Void if of another host, or of a clock ahead of this one, which restarted with its host.
        if demand is not None and demand.host == host and demand.tick <= now // TICK_SECONDS:
            return demand.seen(level, now)
    return Demand(host=host, tick=int(now // TICK_SECONDS), level=level, peak=level)


def appended(peaks: Sequence[int], peak: int) -> tuple[int, ...]:
    """The history with one more tick; once it is too long, its oldest day is dropped."""
    known = (*peaks, peak)
    return known[DAY_TICKS:] if len(known) >= KEPT_TICKS + DAY_TICKS else known


def seasonal_rise(peaks: Sequence[int]) -> float:
    """The mean rise of demand to the peak of the next hour, at this time of the days before."""
    if len(peaks) < LEARNING_TICKS:
        return 0.0
    past = np.asarray(peaks, dtype=float)
    rises = [
        max(0.0, past[i + 1 : i + 1 + AHEAD_TICKS].max() - past[i])
        for i in range(len(past) - 1 - DAY_TICKS, -1, -DAY_TICKS)
    ]
    return max(0.0, float(np.mean(rises)))


class Energy(Policy):
    """Decides as another policy does, and names the devices that need no power.

    Hu et al. (Helios), SC 2021, call it cluster energy saving: demand is forecast, and nodes
    beyond it and a buffer are powered down. Here a node is a device, and demand is mostly known:
    the devices that the study's trials, and those that may still be created, could use at once.
    A device keeps its power while a trial is on it, or suspended on it, or is about to be, and
    while another user has it. ``EnergyRules.wanted`` names this project's changes.
    """

    def __init__(self, inner: Policy, rules: EnergyRules | None = None) -> None:
        self.inner = inner
        self.rules = rules or EnergyRules()

    def decide(self, snapshot: Snapshot) -> Decision:
        """Assign as the other policy does, and power down idle devices beyond the buffer."""
        # What the inner policy remembered before it was wrapped is still its own.
        known, recorded = snapshot.memory, None
        if isinstance(known, Mapping) and known.keys() == {"inner", "demand"}:
            known, recorded = known["inner"], known["demand"]
        decision = self.inner.decide(replace(snapshot, memory=known))
        healthy = [device for device in snapshot.devices if device.healthy]
        if not healthy:
            return replace(decision, memory={"inner": decision.memory, "demand": recorded})
        level = min(_wanted(snapshot), len(healthy))
        host = min(device.host for device in healthy)
        demand = restore_demand(recorded, host=host, level=level, now=snapshot.now)
        down, demand = self._power(snapshot, decision, demand)
        # A list, for memory has to be the same after JSON.
        recorded = asdict(demand) | {"peaks": list(demand.peaks)}
        memory = {"inner": decision.memory, "demand": recorded}
        return replace(decision, powered_down=down, memory=memory)

    def _power(
        self, snapshot: Snapshot, decision: Decision, demand: Demand
    ) -> tuple[tuple[str, ...], Demand]:
        """The devices that need no power, and the demand with a new lock if some are woken."""
        ours, needed = _ours(snapshot, decision)
        n_powered = sum(device.powered for device in ours)
        # Demand is known where all trials to come are counted, and while it has only ever fallen.
        # It rises where trials come from elsewhere: then the past counts, and the time of day: a
        # seasonal mean, since fitting trees takes longer than a decision may, and gained nothing.
        is_known = snapshot.wanted_is_all or not demand.has_risen
        wanted = self.rules.wanted(
            n_nodes=len(ours),
            powered=n_powered,
            demand=min(demand.level, len(ours)),
            recent=demand.level if is_known else demand.recent(self.rules.look_back_ticks),
            expected=demand.level if is_known else demand.level + seasonal_rise(demand.peaks),
            may_fall=snapshot.now >= demand.locked_until,
        )
        if wanted > n_powered:
            locked_until = snapshot.now + self.rules.keep_ticks * TICK_SECONDS
            demand = replace(demand, locked_until=locked_until)
        # Devices that must stay powered come first, then powered ones; the last are powered down.
        ranked = sorted(
            ours, key=lambda each: (each.id not in needed, not each.powered, *place_of(each))
        )
        down = [device.id for device in ranked[wanted:] if device.id not in needed]
        return tuple(sorted(down)), demand


def _wanted(snapshot: Snapshot) -> int:
    """The number of devices that the study could use at once, if there were enough of them."""
    # A broker knows better: what can be begun now is less while workers start.
    if snapshot.wanted is not None:
        return snapshot.wanted
    if snapshot.unstarted.count is None:
        return len(snapshot.devices)
    return snapshot.unstarted.count + sum(trial.device_range[1] for trial in snapshot.trials)


def _ours(snapshot: Snapshot, decision: Decision) -> tuple[list[Device], frozenset[str]]:
    """The healthy devices that no other user has, and the ids of those that must keep power."""
    sat_on = {*snapshot.held, *(id_ for t in snapshot.trials for id_ in t.current_devices)}
    given = {id_ for each in decision.assignments for id_ in each.devices}
    ours = [
        device
        for device in snapshot.devices
        if device.healthy and (device.free or not device.powered or device.id in sat_on)
    ]
    return ours, frozenset(sat_on | given)
