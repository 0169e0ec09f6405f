"""Eviction of suspended trials to lower tiers, pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from optuna_hermes.model import TierName, TrialView
from optuna_hermes.simulator._costs import SwitchCosts


def moves_down(
    suspended: Iterable[TrialView], costs: SwitchCosts, host_of: Mapping[str, str]
) -> Iterator[tuple[TrialView, TierName]]:
    """The trials that move from their device to the host's memory, and from there to disk.

    The trial that stopped last has the first choice. A trial moves up only when it trains again.

    Args:
        suspended: waiting trials on whose device another trial has trained since.
        costs: numbers of trials that each tier holds.
        host_of: the host of each device.

    Yields:
        A trial and its new tier.
    """
    resident = dict.fromkeys(host_of, costs.resident_trials)
    host = dict.fromkeys(host_of.values(), costs.host_trials)
    for view in sorted(suspended, key=lambda view: -(view.waiting_since or 0.0)):
        assert view.device is not None, "a suspended trial has had a device"
        tier: TierName = "disk"
        if view.tier == "resident" and resident[view.device] > 0:
            resident[view.device] -= 1
            tier = "resident"
        elif view.tier != "disk" and host[host_of[view.device]] > 0:
            host[host_of[view.device]] -= 1
            tier = "host"
        if tier != view.tier:
            yield view, tier
