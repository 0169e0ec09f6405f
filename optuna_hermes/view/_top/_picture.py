"""What ``top`` shows at one moment, and in which order. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

STATES = ("running", "parked", "stored", "pending", "done", "failed")
"""In the order of a trial's life."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialLine:
    """A trial.

    Args:
        number: the trial's.
        state: as in ``model.RunState``.
        wish: see ``model.Wish``.
        value: its last one, as the user knows it; None if there is none, or it is not finite.
        slope: by how much the value changes in a unit, of late.
        curve: some of its values, in order.
        units: how many it has reported.
        seconds: device time it has had.
        tier: where its state is while it waits.
        device: where it trains.
        slices: leases it has had.
        suspensions: how often it gave a device back before its end.
        watt_hours: what it took, None if nobody could tell.
    """

    number: int
    state: str
    wish: str | None = None
    value: float | None = None
    slope: float | None = None
    curve: tuple[float | None, ...] = ()
    units: int = 0
    seconds: float = 0.0
    tier: str | None = None
    device: str | None = None
    slices: int = 0
    suspensions: int = 0
    watt_hours: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceLine:
    """A device.

    Args:
        id: as the broker names it.
        state: of its holder, or why it has none, in words.
        study: whose trial has it, empty if nobody's.
        trial: which, None for a new one.
        epoch: of the lease, 0 if there is none.
        since_seconds: how long ago the lease was granted.
        left_seconds: of its slice.
        slice_seconds: how long that is.
        memory_bytes: its memory, None if unknown.
        memory_free_bytes: what is free of it.
        joules: what its counter says, None if it has none.
        counted: when that was seen to change last, wall clock seconds.
        watts: what it takes, None if unknown.
    """

    id: str
    state: str
    study: str = ""
    trial: int | None = None
    epoch: int = 0
    since_seconds: float = 0.0
    left_seconds: float = 0.0
    slice_seconds: float = 0.0
    memory_bytes: int | None = None
    memory_free_bytes: int | None = None
    joules: float | None = None
    counted: float = 0.0
    watts: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """All that is shown.

    Args:
        at: wall clock seconds (Unix time).
        host: this host's name, empty if there is no broker.
        key: of the study, empty if there is none.
        study: its name.
        studies: the keys of all there are.
        policy: who decides, empty if nobody does.
        maximize: whether higher values are better.
        devices: of this host.
        trials: of the study.
        best: the best trial and its value.
        device_seconds: of all trials.
        watt_hours: of all trials.
        read_only: why nothing can be wanted now, in words; empty if it can.
        problem: what is wrong with the study, in words.
    """

    at: float
    host: str = ""
    key: str = ""
    study: str = ""
    studies: tuple[str, ...] = ()
    policy: str = ""
    maximize: bool = False
    devices: tuple[DeviceLine, ...] = ()
    trials: tuple[TrialLine, ...] = ()
    best: tuple[int, float] | None = None
    device_seconds: float = 0.0
    watt_hours: float | None = None
    read_only: str = ""
    problem: str = ""

    @property
    def counts(self) -> dict[str, int]:
        """How many trials are in each state that any is in."""
        found = [trial.state for trial in self.trials]
        return {state: found.count(state) for state in STATES if state in found}


# -- order -------------------------------------------------------------------------------------

ORDERS = ("trial", "value", "slope", "time", "state")
"""By what trials can be sorted."""


def ordered(
    trials: Iterable[TrialLine], by: str, *, maximize: bool = False, back: bool = False
) -> list[TrialLine]:
    """Trials in an order; those of which nothing is known are last in any case.

    Args:
        trials: in any order.
        by: one of ``ORDERS``: the best value first, the slope that betters it most, the most
            device time.
        maximize: whether higher values are better.
        back: the other way round.
    """
    sign = -1.0 if maximize else 1.0

    def place(trial: TrialLine) -> tuple[float, int]:
        if by == "value":
            return sign * (trial.value or 0.0), trial.number
        if by == "slope":
            return sign * (trial.slope or 0.0), trial.number
        if by == "time":
            return -trial.seconds, trial.number
        return (STATES.index(trial.state), trial.number) if by == "state" else (0, trial.number)

    def is_unknown(trial: TrialLine) -> bool:
        return by in ("value", "slope") and getattr(trial, by) is None

    lines = sorted(trials, key=place, reverse=back)
    return [t for t in lines if not is_unknown(t)] + [t for t in lines if is_unknown(t)]
