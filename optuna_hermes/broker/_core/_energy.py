"""Energy that leases take from their devices. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from optuna_hermes.broker._core._broker_state import Lease, Slot
from optuna_hermes.broker._core._live_trial import LiveTrial

JOULES_PER_WATT_HOUR = 3600.0


def counted_joules(slots: Iterable[Slot]) -> float | None:
    """Sum of the devices' energy counters, None if one has none."""
    return _sum(slot.device.energy_joules for slot in slots)


def taken_joules(slots: Sequence[Slot], lease: Lease, now: float) -> float | None:
    """Energy that devices have taken since their lease began, None if it is not known.

    It is the difference of their counters. If one is missing, or began anew, it is the rated power
    of the devices for as long as the lease has lasted, which is more than they took.
    """
    counted, before = counted_joules(slots), lease.energy_joules
    if counted is not None and before is not None and counted >= before:
        return counted - before
    watts = _sum(slot.device.power_watts for slot in slots)
    return None if watts is None else watts * (now - lease.started)


def add(trial: LiveTrial, joules: float | None) -> None:
    """Add the energy of a lease to its trial."""
    if joules is not None:
        trial.energy_joules = (trial.energy_joules or 0.0) + joules


def _sum(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return sum(each or 0.0 for each in known) if known and None not in known else None


def watt_hours(joules: float | None) -> float | None:
    """Joules as watt-hours, None if they are unknown."""
    return None if joules is None else joules / JOULES_PER_WATT_HOUR
