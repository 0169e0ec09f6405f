"""What a lease has taken of its device's energy. Pure."""

from __future__ import annotations

from optuna_hermes.broker._book import Lease, Run, Slot

JOULES_PER_WATT_HOUR = 3600.0


def taken_joules(slot: Slot, lease: Lease, now: float) -> float | None:
    """The energy that a device has taken since its lease began, None if nobody can tell.

    That is what its counter says. Where there is none, or it began anew, it is the device's rated
    power for as long as the lease has lasted, which is more than it took.
    """
    counted, before = slot.device.energy_joules, lease.energy_joules
    if counted is not None and before is not None and counted >= before:
        return counted - before
    watts = slot.device.power_watts
    return None if watts is None else watts * (now - lease.started)


def add(run: Run, joules: float | None) -> None:
    """A lease of a run is over."""
    if joules is not None:
        run.energy_joules = (run.energy_joules or 0.0) + joules


def watt_hours(joules: float | None) -> float | None:
    """For people."""
    return None if joules is None else joules / JOULES_PER_WATT_HOUR
