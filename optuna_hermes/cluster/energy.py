"""Energy: power down the devices that another policy leaves idle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from optuna_hermes.cluster.energy_forecast import LEARNING_TICKS, seasonal_rise
from optuna_hermes.cluster.energy_memory import Demand, recall
from optuna_hermes.cluster.energy_rules import TICK_SECONDS, EnergyRules
from optuna_hermes.model import Decision, Device, Snapshot
from optuna_hermes.policies.base import Policy, place_of


class Energy(Policy):
    """Decides as another policy does, and names the devices that need no power.

    Hu et al. (Helios), SC 2021, call it cluster energy saving: demand is forecast, and nodes
    beyond it and a buffer are powered down. ``EnergyRules.wanted`` names this project's changes.
    Here a node is a device, and demand is mostly known: the devices that the study's trials, and
    those that may still be created, could use at once. While demand has only ever fallen, the study
    has a fixed number of trials and no rise is forecast. Where it has risen, as it does when trials
    come from elsewhere, the demand of the last hours stays powered, and that expected by the time
    of day: a seasonal mean, since fitting trees takes longer than a decision may, and gained
    nothing on the traces that were replayed.

    A device keeps its power while a trial is on it, or suspended on it, or is about to be, and
    while another user has it.

    Args:
        inner: the policy that assigns devices.
        rules: buffer and delays of powering down.
    """

    def __init__(self, inner: Policy, rules: EnergyRules | None = None) -> None:
        self.inner = inner
        self.rules = rules or EnergyRules()

    def decide(self, snapshot: Snapshot) -> Decision:
        """Assign as the other policy does, and power down idle devices beyond the buffer."""
        known, remembered = _split(snapshot.memory)
        decision = self.inner.decide(replace(snapshot, memory=known))
        healthy = [device for device in snapshot.devices if device.healthy]
        if not healthy:
            return replace(decision, memory=_join(decision.memory, remembered))
        level = min(_wanted(snapshot), len(healthy))
        host = min(device.host for device in healthy)
        demand = recall(remembered, host=host, level=level, now=snapshot.now)
        down, demand = self._power(snapshot, decision, demand)
        memory = _join(decision.memory, demand.as_json())
        return replace(decision, powered_down=down, memory=memory)

    def _power(
        self, snapshot: Snapshot, decision: Decision, demand: Demand
    ) -> tuple[tuple[str, ...], Demand]:
        """The devices that need no power, and the demand with a new lock if some are woken."""
        ours, needed = _ours(snapshot, decision)
        n_powered = sum(device.powered for device in ours)
        is_known = not demand.has_risen
        wanted = self.rules.wanted(
            n_nodes=len(ours),
            powered=n_powered,
            demand=min(demand.level, len(ours)),
            recent=demand.level if is_known else demand.recent(self.rules.look_back_ticks),
            expected=demand.level if is_known else _expected(demand),
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
    if snapshot.wanted is not None:
        return snapshot.wanted
    if snapshot.unstarted.count is None:
        return len(snapshot.devices)
    return snapshot.unstarted.count + sum(trial.device_range[1] for trial in snapshot.trials)


def _ours(snapshot: Snapshot, decision: Decision) -> tuple[list[Device], frozenset[str]]:
    """The healthy devices that no other user has, and the ids of those that must keep power."""
    sat_on = {
        *snapshot.held,
        *(trial.device for trial in snapshot.trials if trial.device is not None),
    }
    given = {id_ for each in decision.assignments for id_ in each.devices}
    ours = [
        device
        for device in snapshot.devices
        if device.healthy and (device.free or not device.powered or device.id in sat_on)
    ]
    return ours, frozenset(sat_on | given)


def _expected(demand: Demand) -> float:
    """The highest demand of the next hour, by the time of day."""
    if len(demand.peaks) < LEARNING_TICKS:
        return float(demand.level)
    return demand.level + seasonal_rise(demand.peaks)


def _split(memory: Any) -> tuple[Any, Any]:
    """Split the memory into the inner policy's and this one's."""
    if isinstance(memory, Mapping) and memory.keys() == {"inner", "demand"}:
        return memory["inner"], memory["demand"]
    return memory, None


def _join(inner: Any, demand: Any) -> dict[str, Any]:
    return {"inner": inner, "demand": demand}
