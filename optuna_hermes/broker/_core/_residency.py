"""Residency: suspended trials that stay in a device's memory, and those that make room. Pure.

A parked trial keeps its memory while the next one fits beside it. If it does not, those that will
be wanted last go: to host memory while there is room for them, then to disk. A process takes memory
of the device even when its trial is in host memory: where that is what is missing, it has to end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from optuna_hermes.broker._core._live_trial import LiveTrial, TrialKey
from optuna_hermes.model import TierName


def make_room(
    short_bytes: float,
    trials: Sequence[LiveTrial],
    host_room_bytes: float,
    process_bytes: Callable[[LiveTrial], int | None],
    *,
    spare_bytes: float = 0.0,
) -> dict[TrialKey, TierName]:
    """Moves by which ``short_bytes`` of a device become free.

    A trial goes to host memory if there is room for it, or can be made: those that wait there and
    will be wanted later than it go to disk first, and it follows when it is asked about again.
    Otherwise it goes to disk, or stays if it cannot. If all that does not suffice, processes end.

    Args:
        short_bytes: what is missing; infinite means that all have to go.
        trials: those that are there, or in host memory (from any device), without the one that
            comes next; the one that will be wanted last is at the front.
        host_room_bytes: what is left of the host budget.
        process_bytes: what a trial's process takes of the device beside the trial, None if it is
            not there.
        spare_bytes: the part of ``short_bytes`` for which no process has to end.
    """
    tiers: dict[TrialKey, TierName] = {}
    for place, trial in enumerate(trials):
        if short_bytes <= 0:
            break
        if trial.tier == "host":
            continue
        if _wants(trial) <= host_room_bytes:
            tiers[trial.key] = "host"
            host_room_bytes -= _wants(trial)
        elif later := _make_way(trial, trials[:place], host_room_bytes):
            tiers.update(later)
            return tiers  # the rest is decided when they have gone
        elif trial.can_store:
            tiers[trial.key] = "disk"
            short_bytes -= process_bytes(trial) or 0
        else:
            continue
        short_bytes -= trial.takes_bytes or 0
    if spare_bytes < short_bytes < math.inf:
        tiers |= _end_processes(short_bytes - spare_bytes, trials, tiers, process_bytes)
    return tiers


def _end_processes(
    short_bytes: float,
    trials: Sequence[LiveTrial],
    tiers: Mapping[TrialKey, TierName],
    process_bytes: Callable[[LiveTrial], int | None],
) -> dict[TrialKey, TierName]:
    """Trials that go to disk for the memory of their processes, beside those that go there."""
    further: dict[TrialKey, TierName] = {}
    for trial in trials:
        if short_bytes <= 0:
            break
        away = trial.tier == "host" or tiers.get(trial.key) == "host"
        if away and trial.can_store and (taken := process_bytes(trial)):
            further[trial.key] = "disk"
            short_bytes -= taken
    return further


def clear(trials: Iterable[LiveTrial], host_room_bytes: float) -> dict[TrialKey, TierName]:
    """Moves by which a trial gets its device to itself: to disk, process and all, if possible.

    What is left of the host budget is for those that cannot be stored.
    """
    tiers: dict[TrialKey, TierName] = {}
    for trial in trials:
        if trial.can_store:
            tiers[trial.key] = "disk"
        elif _wants(trial) <= host_room_bytes:
            tiers[trial.key] = "host"
            host_room_bytes -= _wants(trial)
    return tiers


def _wants(trial: LiveTrial) -> float:
    """Further host memory for a trial to wait there; infinite if it is unknown, or if it cannot."""
    # One on several devices stays there, or goes to disk.
    offloads = trial.can_offload and trial.tier != "host" and len(trial.devices) < 2
    if not offloads or trial.takes_bytes is None:
        return math.inf
    return max(0, trial.takes_bytes - trial.host_bytes)


def _make_way(
    trial: LiveTrial, later: Sequence[LiveTrial], host_room_bytes: float
) -> dict[TrialKey, TierName]:
    """Trials that leave host memory for ``trial``; none if that would not suffice."""
    missing = _wants(trial) - host_room_bytes
    tiers: dict[TrialKey, TierName] = {}
    for each in later:
        if each.tier == "host" and each.can_store:
            tiers[each.key] = "disk"
            missing -= each.host_bytes
            if missing <= 0:
                return tiers
    return {}
