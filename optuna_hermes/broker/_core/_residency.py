"""Residency: suspended trials that stay in a device's memory, and those that make room. Pure.

A parked trial keeps its memory while the next one fits beside it. If it does not, those that will
be wanted last go: to host memory while there is room for them, then to disk. A process takes memory
of the device even when its trial is in host memory: where that is what is missing, it has to end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.model import TierName

TrialId = tuple[str, int]
"""A study's key and a trial's number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidentTrial:
    """A suspended trial that could make room.

    Args:
        trial: the trial.
        tier: ``resident`` on the device that needs room, or ``host`` (from any device).
        takes_bytes: what it takes there, of the device or of the host, None if unknown.
        kept_bytes: host memory that its process has, and would use again.
        process_bytes: what its process takes of the device that needs room beside that, None if
            the process is not there.
        can_offload: whether it can go to host memory.
        can_store: whether it can go to disk.
    """

    trial: TrialId
    tier: TierName
    takes_bytes: int | None
    kept_bytes: int = 0
    process_bytes: int | None = None
    can_offload: bool = False
    can_store: bool = False


def resident_trial(trial: LiveTrial, process_bytes: int | None) -> ResidentTrial:
    """``ResidentTrial`` of a trial; one on several devices stays there, or goes to disk."""
    in_host = trial.tier == "host"
    return ResidentTrial(
        trial=(trial.study, trial.number),
        tier="host" if in_host else "resident",
        takes_bytes=trial.host_bytes if in_host else trial.takes_bytes,
        kept_bytes=trial.host_bytes,
        process_bytes=process_bytes,
        can_offload=trial.can_offload and not in_host and len(trial.devices) < 2,
        can_store=trial.can_store,
    )


def make_room(
    short_bytes: float,
    residents: Sequence[ResidentTrial],
    host_room_bytes: int,
    *,
    spare_bytes: float = 0.0,
) -> dict[TrialId, TierName]:
    """Moves by which ``short_bytes`` of a device become free.

    A trial goes to host memory if there is room for it, or can be made: those that wait there and
    will be wanted later than it go to disk first, and it follows when it is asked about again.
    Otherwise it goes to disk, or stays if it cannot. If all that does not suffice, processes end.

    Args:
        short_bytes: what is missing; infinite means that all have to go.
        residents: the one that will be wanted last at the front, without the trial that comes next.
        host_room_bytes: what is left of the host budget.
        spare_bytes: the part of ``short_bytes`` for which no process has to end.
    """
    tiers: dict[TrialId, TierName] = {}
    for place, resident in enumerate(residents):
        if short_bytes <= 0:
            break
        if resident.tier == "host":
            continue
        if _has_room(resident, host_room_bytes):
            tiers[resident.trial] = "host"
            host_room_bytes -= _wants(resident) or 0
        elif later := _make_way(resident, residents[:place], host_room_bytes):
            tiers.update(later)
            return tiers  # the rest is decided when they have gone
        elif resident.can_store:
            tiers[resident.trial] = "disk"
            short_bytes -= resident.process_bytes or 0
        else:
            continue
        short_bytes -= resident.takes_bytes or 0
    if spare_bytes < short_bytes < math.inf:
        tiers |= _end_processes(short_bytes - spare_bytes, residents, tiers)
    return tiers


def _end_processes(
    short_bytes: float, residents: Sequence[ResidentTrial], tiers: Mapping[TrialId, TierName]
) -> dict[TrialId, TierName]:
    """Trials that go to disk for the memory of their processes, beside those that go there."""
    further: dict[TrialId, TierName] = {}
    for resident in residents:
        if short_bytes <= 0:
            break
        away = resident.tier == "host" or tiers.get(resident.trial) == "host"
        if resident.process_bytes and resident.can_store and away:
            further[resident.trial] = "disk"
            short_bytes -= resident.process_bytes
    return further


def clear(residents: Iterable[ResidentTrial], host_room_bytes: int) -> dict[TrialId, TierName]:
    """Moves by which a trial gets its device to itself: to disk, process and all, if possible.

    Args:
        residents: the trials that are there.
        host_room_bytes: what is left of the host budget, for those that cannot be stored.
    """
    tiers: dict[TrialId, TierName] = {}
    for resident in residents:
        if resident.can_store:
            tiers[resident.trial] = "disk"
        elif resident.tier == "resident" and _has_room(resident, host_room_bytes):
            tiers[resident.trial] = "host"
            host_room_bytes -= _wants(resident) or 0
    return tiers


def _has_room(resident: ResidentTrial, host_room_bytes: int) -> bool:
    wants = _wants(resident)
    return resident.can_offload and wants is not None and wants <= host_room_bytes


def _wants(resident: ResidentTrial) -> int | None:
    """Further host memory that a trial on a device needs to wait there; None if unknown."""
    if resident.takes_bytes is None:
        return None
    return max(0, resident.takes_bytes - resident.kept_bytes)


def _make_way(
    resident: ResidentTrial, later: Sequence[ResidentTrial], host_room_bytes: int
) -> dict[TrialId, TierName]:
    """Trials that leave host memory for ``resident``; none if that would not suffice."""
    wants = _wants(resident)
    if not resident.can_offload or wants is None:
        return {}
    missing = wants - host_room_bytes
    tiers: dict[TrialId, TierName] = {}
    for each in later:
        if each.tier == "host" and each.can_store:
            tiers[each.trial] = "disk"
            missing -= each.takes_bytes or 0
            if missing <= 0:
                return tiers
    return {}
