"""Frozen values that cross module boundaries: the snapshot of a policy, and its decision.

Lower is better everywhere inside the package; maximised values are turned round where they enter.
Times are seconds of one monotonic clock, memory is in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec

TrialStatus = Literal["pending", "running", "parked", "stored", "done", "failed", "pruned"]
"""``pending``: admitted, never ran. ``parked``: suspended, its process alive. ``stored``:
suspended on disk, no process. ``done``, ``failed`` and ``pruned`` are final; only the rivals that
the simulator runs for comparison prune."""

TierName = Literal["resident", "host", "disk"]
"""Tier in which a suspended trial's state is."""

Override = Literal["held", "boosted", "finishing"]
"""Override of a live trial, above the policy. ``held``: it gets no device. ``boosted``: it gets
the next one. ``finishing``: it gets no device, for it is about to be closed at its last value."""

MOST_COUNT = 2**53

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_COUNT)]
"""A count that fits into any database and any JSON, also when some of them are added up."""

MOST_SECONDS = 1e9
"""Longest time that a message holds: 30 years."""

MOST_SEED = 2**63 - 1
"""Largest seed of a study: an integer of any database."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS)]
"""A length of time in seconds, finite."""

Size = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
"""Number of samples in a batch."""

MOST_SIZES = 64
"""Largest number of batch sizes whose speed a trial reports."""

WAITING_STATES: frozenset[TrialStatus] = frozenset({"pending", "parked", "stored"})
LIVE_STATES: frozenset[TrialStatus] = WAITING_STATES | {"running"}


OUTAGE_SECONDS = 300.0
"""Time for which training goes on while its database is away; then everything is suspended."""

OverheadKind = Literal["idle", "opening", "resuming", "saving", "suspending"]
"""Kinds of device time outside of batches.

A device is ``idle`` while a trial that waits or may be created could use it. A new trial is
``opening``, and a suspended one ``resuming``, from its lease to its first batch; it is
``saving`` while it trains no batch for the sake of a checkpoint, and ``suspending`` from its last
batch to the end of its lease.
"""


_MEMORY = 0.7
"""Weight of the past in a moving average."""


def moving_average(past: float | None, seconds: float) -> float:
    """A moving average with one more measured time; ``past`` is None or 0.0 before the first."""
    return _MEMORY * (past or seconds) + (1 - _MEMORY) * seconds


AnyReport = TypeVar("AnyReport")


def add_report(reports: dict[int, AnyReport], unit: int, report: AnyReport) -> None:
    """Add the report of a unit to those of its trial, which are in the order of units.

    It replaces those of this unit and of all later ones: its trial had lost its process, and went
    back.
    """
    while reports and next(reversed(reports)) >= unit:
        reports.popitem()
    reports[unit] = report


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """The reports of one trial, one entry a unit.

    Args:
        steps: what the trial counted when it reported (epochs, batches), ascending.
        values: the objective, lower is better; NaN and infinite values are kept as they came.
        device_seconds: device time the trial had used when it reported, ascending.
    """

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    device_seconds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.steps) == len(self.values) == len(self.device_seconds):
            raise ValueError(
                "steps, values and device_seconds must have one length but got "
                f"{len(self.steps)}, {len(self.values)} and {len(self.device_seconds)}."
            )

    @property
    def units(self) -> int:
        """Number of units that the trial has reported."""
        return len(self.values)

    @property
    def seconds(self) -> float:
        """Device time until the last report, 0.0 before the first."""
        return self.device_seconds[-1] if self.device_seconds else 0.0

    @property
    def last_unit_seconds(self) -> float:
        """Device time of the unit that was reported last, 0.0 before the first."""
        return self.seconds - (self.device_seconds[-2] if self.units > 1 else 0.0)

    def with_report(self, unit: int, step: int, value: float, device_seconds: float) -> Curve:
        """The curve with a report of ``unit``, from 1, which replaces that and all later ones."""
        keep = unit - 1
        return Curve(
            steps=(*self.steps[:keep], step),
            values=(*self.values[:keep], value),
            device_seconds=(*self.device_seconds[:keep], device_seconds),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A trial's state on disk after ``units`` units, safe there: file and directory are synced.

    ``path`` is absolute, ``size_bytes`` and ``sha256`` (hexadecimal) are the file's.
    """

    # The bounds hold for what a message brings: msgspec checks them where it decodes.
    path: Annotated[str, msgspec.Meta(max_length=4096)]
    units: Count
    size_bytes: Count
    sha256: Annotated[str, msgspec.Meta(max_length=64)]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizes:
    """The batch sizes that a trial may have, its present one, and the devices that it may have.

    Args:
        now, least, most: samples in its next batch, and the bounds of that.
        seconds: mean seconds of a batch, by the sizes that were measured.
        unit_samples: samples in a unit, None if unknown.
        most_devices: how many devices it may be given at once; batches are those of all together.
    """

    now: Size
    least: Size
    most: Size
    seconds: Annotated[Mapping[Size, Seconds], msgspec.Meta(max_length=MOST_SIZES)] = field(
        default_factory=dict
    )
    unit_samples: Size | None = None
    most_devices: Size = 1

    @property
    def valid(self) -> bool:
        """True if they are in order."""
        return self.least <= self.now <= self.most


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Measured duration of a trial's steps, by the numbers of its devices and of their hosts.

    ``batch_size`` is samples a step, over all devices.
    """

    devices: int
    batch_size: int
    step_seconds: float
    hosts: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Elastic:
    """Limits within which a trial's batch size and devices may change between slices.

    Args:
        batch_size: samples a step, over all its devices, as it trains now or would begin.
        batch_sizes, devices: the least and the most that it may be given.
        device_batch_size: the most samples a step that one device holds, None if unknown; a step
            of more accumulates gradients.
        noise_scale: samples a step from which on more of them hardly help (McCandlish et al.,
            2018), None if it is not measured.
        unit_samples: how many samples a unit is, at the least batch size; None if unknown.
        speeds: what was measured of this trial so far, no two alike but in their seconds.
    """

    batch_size: int
    batch_sizes: tuple[int, int]
    devices: tuple[int, int] = (1, 1)
    device_batch_size: int | None = None
    # Up to a factor, a step of b does as much for the training as 1 / (noise_scale + b) of its
    # samples.
    noise_scale: float | None = None
    unit_samples: float | None = None
    speeds: tuple[Speed, ...] = ()

    def __post_init__(self) -> None:
        low, high = self.batch_sizes
        if not 1 <= low <= self.batch_size <= high:
            raise ValueError(
                "batch_size must lie within batch_sizes, which begin with 1 or more, but got "
                f"{self.batch_size} and {self.batch_sizes}."
            )
        if not 1 <= self.devices[0] <= self.devices[1]:
            raise ValueError(
                f"devices must be two counts of 1 or more, ascending, but got {self.devices}."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """Amounts of what a host has besides devices; None is unknown, or without bound.

    ``host_bytes`` are for the state of suspended trials.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialView:
    """One trial as a policy sees it.

    Args:
        number: the trial's number in its study; unique in a snapshot.
        state: see ``TrialStatus``. A trial whose slice has just ended is ``parked`` here, bound to
            nothing yet, with ``device`` naming where it still is.
        attained_seconds: device time it has had.
        submitted: when it was admitted.
        waiting_since: when it last stopped running (or was admitted), None while it runs.
        tier: where its state is, None if it never ran or is running.
        device: the device it runs on or is parked on, if any.
        devices: all of them, if there are several.
        bound_to: devices it can resume on without moving; empty means any.
        switch_cost_seconds: expected cost of bringing it onto a device.
        devices_wanted: how many devices it trains on at once.
        units_left: units until its end, if known.
        expected_seconds: device time it is expected to take in all, if that was estimated when it
            was submitted.
        elastic: how far it may be stretched, None if its batch size and devices are fixed.
        needs: what it takes besides devices, its state being suspended some day.
    """

    number: int
    state: TrialStatus
    curve: Curve = Curve()
    attained_seconds: float = 0.0
    submitted: float = 0.0
    waiting_since: float | None = None
    tier: TierName | None = None
    device: str | None = None
    devices: tuple[str, ...] = ()
    bound_to: tuple[str, ...] = ()
    switch_cost_seconds: float = 0.0
    devices_wanted: int = 1
    units_left: int | None = None
    expected_seconds: float | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    elastic: Elastic | None = None
    needs: Resources = Resources()

    @property
    def current_devices(self) -> tuple[str, ...]:
        """The devices it runs on or is parked on."""
        return self.devices or (() if self.device is None else (self.device,))

    @property
    def device_range(self) -> tuple[int, int]:
        """The least and the most devices that it may be given."""
        if self.elastic is None:
            return self.devices_wanted, self.devices_wanted
        return self.elastic.devices


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A GPU (``id`` is its UUID), a MIG slice or a CPU slot (``cpu:0``).

    Args:
        id: unique on its host.
        host: the host's name.
        kind: ``cpu`` or ``gpu``.
        healthy: False when it is known to be broken.
        lost: its driver does not reach it: what was in its memory is gone.
        free: True when a policy may assign it now: no trial and no stranger is on it. Unknown is
            never free.
        unlisted: no process is listed on it, which may be because none can be listed here: that
            it is free then shows in its memory only.
        exclusive: one process at most may use it: a trial that is parked there keeps others off.
        part: it is a slice of a GPU, of which a process can use one only.
        shown_by: the environment variable that shows it to a process, and its name there; None for
            a CPU slot.
        memory_bytes: its memory, None if unknown.
        memory_free_bytes: what is free of it now, None if unknown.
        processes: the bytes that each process has of it, as far as they are known.
        problem: why it is not healthy, or why it cannot be granted now, in words; empty if all is
            well.
        powered: False while it is powered down, or on its way down or up; then it is not free.
        power_watts: its rated power, None if unknown.
        energy_joules: what it has taken since some moment of the past, None if nothing counts it.
        used: it has just computed, None if unknown.
    """

    id: str
    host: str = "localhost"
    kind: Literal["cpu", "gpu"] = "cpu"
    healthy: bool = True
    lost: bool = False
    free: bool = False
    unlisted: bool = False
    exclusive: bool = False
    part: bool = False
    shown_by: tuple[str, str] | None = None
    memory_bytes: int | None = None
    memory_free_bytes: int | None = None
    processes: tuple[tuple[int, int], ...] = ()
    problem: str = ""
    powered: bool = True
    power_watts: float | None = None
    energy_joules: float | None = None
    used: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Unstarted:
    """Trials that may still be created.

    Args:
        count: how many, None without bound.
        fixed: whether they are a list known beforehand, not proposals of a sampler that learns.
        listed: those of the list whose parameters are known, in its order: ``pending``, to be
            assigned by their numbers. All of them, or none: a new trial without a number is then
            the first one of the list.
    """

    count: int | None = 0
    fixed: bool = False
    listed: tuple[TrialView, ...] = ()

    @property
    def any(self) -> bool:
        """True if one more trial may be created."""
        return self.count is None or self.count > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Time after which all trials of a study are suspended; None is unknown, or without bound.

    Args:
        seconds: by the clock.
        device_seconds: of all devices together.
    """

    seconds: float | None = None
    device_seconds: float | None = None

    def on_each(self, n_devices: int) -> float:
        """Seconds that each of so many devices trains until then, infinite without bound."""
        seconds = math.inf if self.seconds is None else self.seconds
        if self.device_seconds is None:
            return seconds
        return min(seconds, self.device_seconds / max(1, n_devices))


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """All that a policy may know.

    Args:
        now: the clock, in seconds.
        seed: for policies that draw random numbers.
        devices: every device of the host; a policy assigns only those that are ``free``.
        trials: every trial that is not finished, in any order.
        finished: trials that are done or failed, for learners.
        unstarted: trials that may still be created.
        room: what is left of the host's resources, whatever trials that wait hold of them included;
            device memory is said by the devices.
        wanted: devices that the study could use at once, if it had as many and a process for
            each; None where that is no more than ``trials`` and ``unstarted`` say.
        wanted_is_all: no trials can come but those that ``wanted`` counts.
        held: devices that it has, or is about to have, beside those that ``trials`` name.
        left: what is left of the study's budget.
        opening_seconds: expected device time from a new trial's lease to its first batch.
        memory: JSON that the policy gave back last time.
    """

    now: float = 0.0
    seed: int = 0
    devices: tuple[Device, ...] = ()
    trials: tuple[TrialView, ...] = ()
    finished: tuple[TrialView, ...] = ()
    unstarted: Unstarted = Unstarted()
    room: Resources = Resources()
    wanted: int | None = None
    wanted_is_all: bool = False
    held: tuple[str, ...] = ()
    left: Budget = Budget()
    opening_seconds: float = 0.0
    memory: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """One device (or several) to one trial.

    Args:
        trial: its number, None for a trial that is not created yet and has none.
        devices: ids, each free in the snapshot; as many as the trial's ``device_range`` allows.
        slice_seconds: length of the slice, None for the broker's own.
        batch_size: samples a step, over all devices, within the limits of an elastic trial; None
            leaves it as it is, and is the only value for others.
    """

    trial: int | None
    devices: tuple[str, ...]
    slice_seconds: float | None = None
    batch_size: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Assignments of free devices; a device that is not named stays empty.

    Args:
        assignments: no device twice, no trial twice.
        pruned: suspended trials that shall never go on. The broker kills nothing and refuses it.
        powered_down: ids of all devices that need no power: empty ones, and those that are down
            already. Whatever is not named is woken. Nothing is done about it where no command
            powers devices up and down.
        memory: JSON to be given back with the next snapshot.
    """

    assignments: tuple[Assignment, ...] = ()
    pruned: tuple[int, ...] = ()
    powered_down: tuple[str, ...] = ()
    memory: Any = None
