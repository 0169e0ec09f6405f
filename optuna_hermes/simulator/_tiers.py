"""Who makes room for those that stopped later, pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from optuna_hermes.model import RunView, TierName
from optuna_hermes.simulator._costs import SwitchCosts


def moves_down(
    suspended: Iterable[RunView], costs: SwitchCosts, host_of: Mapping[str, str]
) -> Iterator[tuple[RunView, TierName]]:
    """Who moves from its device to the host's memory, and from there to disk.

    The run that stopped last has the first choice. Nobody moves up on its own: a run leaves its
    tier for a device when it trains again, and only then.

    Args:
        suspended: the runs that wait for a device on which another run has trained since.
        costs: how many find room.
        host_of: the host of each device.

    Yields:
        A run and its new tier.
    """
    resident = dict.fromkeys(host_of, costs.resident_runs)
    host = dict.fromkeys(host_of.values(), costs.host_runs)
    for view in sorted(suspended, key=lambda view: -(view.waiting_since or 0.0)):
        assert view.device is not None, "a suspended run has had a device"
        tier: TierName = "disk"
        if view.tier == "resident" and resident[view.device] > 0:
            resident[view.device] -= 1
            tier = "resident"
        elif view.tier != "disk" and host[host_of[view.device]] > 0:
            host[host_of[view.device]] -= 1
            tier = "host"
        if tier != view.tier:
            yield view, tier
