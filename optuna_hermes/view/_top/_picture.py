"""The content of ``top`` at one moment, the orders of its trials, and the source of all that."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from optuna_hermes.view._history import Bar

if TYPE_CHECKING:
    from rich.console import RenderableType

STATES = ("running", "parked", "stored", "pending", "done", "failed")
"""The states of a trial, in the order of its life cycle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialLine:
    """A trial.

    Args:
        number: of the trial.
        state: as in ``model.TrialStatus``.
        wish: its override, see ``model.Wish``.
        value: its last one, as the user knows it; None if there is none, or it is not finite.
        slope: recent change of the value per unit.
        curve: some of its values, in order.
        units: number of units that it has reported.
        seconds: its device time.
        tier: of its state while it is suspended.
        device: ids of its devices while it trains.
        slices: number of its leases.
        suspensions: number of times that it gave a device back before its end.
        watt_hours: energy of its devices, None if unknown.
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
        state: of its holder, or the reason why it has none, in words.
        study: name of the holder's study, empty if there is no holder.
        trial: number of the holder, None for a new trial.
        epoch: of the lease, 0 if there is none.
        since_seconds: time since the grant of the lease.
        left_seconds: rest of its slice.
        slice_seconds: length of its slice.
        memory_bytes: its memory, None if unknown.
        memory_free_bytes: its free memory, None if unknown.
        joules: its energy counter, None if it has none.
        counted: time of the counter's last known change, wall clock seconds.
        watts: its power, None if unknown.
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
    """The content of the screen.

    Args:
        at: wall clock seconds (Unix time).
        host: this host's name, empty if there is no broker.
        key: of the study, empty if there is none.
        study: its name.
        studies: the keys of all studies of the broker.
        policy: name of its policy, empty if no broker serves it.
        maximize: true if higher values are better.
        devices: of this host.
        trials: of the study.
        best: the best trial and its value.
        device_seconds: of all trials.
        watt_hours: of all trials.
        read_only: the reason why no overrides are possible now; empty if they are.
        problem: the study's problem, in words; empty if it has none.
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
        """The number of trials in each state, without states that have none."""
        found = [trial.state for trial in self.trials]
        return {state: found.count(state) for state in STATES if state in found}


# -- order -------------------------------------------------------------------------------------

ORDERS = ("trial", "value", "slope", "time", "state")
"""The sort keys of trials."""


def ordered(
    trials: Iterable[TrialLine], by: str, *, maximize: bool = False, back: bool = False
) -> list[TrialLine]:
    """Trials in an order; those without a known sort key are last in both directions.

    Args:
        trials: in any order.
        by: one of ``ORDERS``: the best value, the steepest improvement, or the most device time
            is first.
        maximize: true if higher values are better.
        back: true for the reverse order.
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


# -- source ------------------------------------------------------------------------------------


class TopSource(ABC):
    """TopSource of pictures and target of commands; calls may block, so they are made on threads.

    ``look`` and ``past`` are called in one thread, the others in any. A call that fails raises a
    ``HermesError`` whose message is shown.
    """

    @abstractmethod
    def look(self, key: str) -> Picture:
        """Return the present picture.

        Args:
            key: of the study to show; empty for any.

        Raises:
            BrokerError: no broker answers, and no ledger is known.
        """

    @abstractmethod
    def past(self) -> Sequence[Bar]:
        """Return past leases from the ledger, if one is known; quick after the first call."""

    @abstractmethod
    def want(self, key: str, number: int, wish: Literal["held", "boosted"] | None) -> None:
        """Hold, boost or (None) release a trial."""

    @abstractmethod
    def finish(self, key: str, number: int) -> None:
        """Finish a trial at its last value."""

    @abstractmethod
    def change_policy(self, key: str, policy: str) -> None:
        """Change the study's policy."""

    @abstractmethod
    def story(self, key: str, number: int) -> RenderableType:
        """Return the event log of a trial."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection; a blocked ``look`` returns."""
