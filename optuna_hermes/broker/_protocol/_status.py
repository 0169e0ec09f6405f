"""Status of a broker, as clients ask for it.

``msgspec.to_builtins`` makes the JSON of ``optuna-hermes status`` of it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from optuna_hermes.model import OverheadKind, Override, TierName, TrialStatus


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Host memory that trials may take for what they move off their devices, and have taken."""

    used_bytes: int
    budget_bytes: int


class HolderStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The lease of a device; ``trial`` is None for a new one.

    ``key`` and ``study`` are the study's key and name. It was granted ``since_seconds`` ago, and
    ``left_seconds`` are left of its slice.
    """

    key: str
    study: str
    trial: int | None
    state: Literal["running", "yielding"]
    pid: int | None
    epoch: int
    since_seconds: float
    left_seconds: float
    slice_seconds: float


class ResidentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A trial whose process has memory of a device: the one that trains there, or a parked one.

    Args:
        key, study: the study's key and name.
        tier: where its state is, None while it trains.
        held_bytes: what the trial has of the device, or was seen to need while it trains; None if
            unknown.
        process_bytes: what its process has beside that, as measured or else as estimated; None
            for a CPU slot.
        measured: whether ``process_bytes`` was measured for this process.
    """

    key: str
    study: str
    trial: int
    pid: int | None
    tier: TierName | None
    held_bytes: int | None
    process_bytes: int | None
    measured: bool = False


class DeviceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A device; figures that are None are unknown.

    ``holder`` is its lease; ``problem`` is why it cannot be granted, empty if it can. ``residents``
    have memory of a GPU; they are left out for CPU slots, which share the host's. ``exclusive`` and
    ``part`` are as in ``Device``.
    """

    id: str
    kind: Literal["cpu", "gpu"]
    healthy: bool
    memory_bytes: int | None
    memory_free_bytes: int | None
    power: Literal["on", "going", "off", "coming"]
    power_watts: float | None
    # The driver's counter, which began at some time in the past: only differences mean anything.
    energy_joules: float | None
    holder: HolderStatus | None
    problem: str
    residents: tuple[ResidentStatus, ...] = ()
    exclusive: bool = False
    part: bool = False


class WorkerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Number of a study's worker processes, and of those that wait for a trial."""

    alive: int
    idle: int


class TrialCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Number of trials by state."""

    pending: int
    running: int
    parked: int
    stored: int
    done: int
    failed: int

    @property
    def ended(self) -> int:
        """Number of trials that are over."""
        return self.done + self.failed

    @property
    def live(self) -> int:
        """Number of trials that are not over."""
        return self.pending + self.running + self.parked + self.stored


class TrialLoss(msgspec.Struct, frozen=True, kw_only=True):
    """A live trial that has lost processes in the driver's time.

    Args:
        losses, most_losses: how many without a new unit between them, and how many end it.
        pid, hung: the last of those processes, which was ended since it hung.
        given_up: no further process is to be tried.
        stored: it has a checkpoint to go on from.
    """

    trial: int
    trial_id: int
    losses: int
    most_losses: int
    pid: int | None
    hung: bool
    given_up: bool
    stored: bool


class FailureSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The failures of a study since its driver came: the first trial that failed, and its error.

    ``alike`` have failed in a row for one reason; ``hopeless`` says that there is nothing else.
    """

    first: int | None
    error: str
    alike: int
    hopeless: bool


class BestTrial(msgspec.Struct, frozen=True, kw_only=True):
    """The best value that a study's trials have reported, and the trial that has."""

    trial: int
    value: float


class TrialRow(msgspec.Struct, frozen=True, kw_only=True):
    """A trial.

    Args:
        device: the one on which it trains, None if it does not.
        units: how many it has reported.
        units_trained: how many it has trained, those included that were lost.
        value: its last one as its user knows it, None if there is none or it is not finite.
        device_seconds: without those of a lease that has not ended.
        curve: some of its values, None for what is not finite; empty if no curves were asked for.
        slope: the recent change of its value per unit, None if unknown.
    """

    number: int = msgspec.field(name="trial")
    state: TrialStatus
    override: Override | None
    tier: TierName | None
    held_bytes: int | None
    host_bytes: int
    device: str | None
    units: int
    units_trained: int
    value: float | None
    slices: int
    suspensions: int
    device_seconds: float
    watt_hours: float | None
    curve: tuple[float | None, ...] = ()
    slope: float | None = None


class StudyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A study that a broker serves; its counters begin when its driver comes.

    Args:
        ledger_url: that of its ledger, without a password.
        driver_pid: the process that has called ``optimize``, None if there is none.
        problem: why it is being ended, None if it is not for a problem.
        problem_may_pass: that is of this host and this moment: the command is to be run again.
        outage_seconds: since when its database does not answer, None if it does.
        held, boosted, finishing: the numbers of the trials with these overrides.
        all_held: nothing can be trained before a hold is released.
        no_room: trials that wait for a device's memory.
        finished: nothing of it needs a process any more.
        unstarted: trials that may still be created, None for no bound.
        lost: its trials that have lost processes.
        device_seconds: of all trials ever, with their present leases.
        held_seconds: of leases that have not ended.
        spent_seconds: of all leases since its driver came.
        overhead_seconds: device time outside of batches, by kind; what devices idled is no part of
            ``spent_seconds``.
        trials: empty if they were not asked for.
    """

    key: str
    name: str
    policy: str
    maximize: bool
    policy_folders: tuple[str, ...]
    driver_pid: int | None
    draining: bool
    problem: str | None
    problem_may_pass: bool = False
    outage_seconds: float | None
    outage_reason: str
    held: tuple[int, ...]
    boosted: tuple[int, ...]
    finishing: tuple[int, ...]
    all_held: bool
    no_room: tuple[int, ...]
    finished: bool
    unstarted: int | None
    workers: WorkerCounts
    counts: TrialCounts
    lost: tuple[TrialLoss, ...]
    failures: FailureSummary
    device_seconds: float
    watt_hours: float | None
    held_seconds: float
    spent_seconds: float
    overhead_seconds: dict[OverheadKind, float]
    switches: int
    best: BestTrial | None
    trials: tuple[TrialRow, ...] = ()
    ledger_url: str = ""

    @property
    def may_open(self) -> bool:
        """True if one more trial may be created."""
        return self.unstarted is None or self.unstarted > 0

    @property
    def overhead_fraction(self) -> float:
        """Share of device time, idle devices included, that was outside of batches."""
        known = self.spent_seconds + self.overhead_seconds["idle"]
        return sum(self.overhead_seconds.values()) / known if known else 0.0


class BrokerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A broker's devices and studies.

    Args:
        recovering: processes with leases of an earlier broker that may still come back.
    """

    host: str
    host_memory: HostMemory
    recovering: tuple[int, ...]
    devices: tuple[DeviceStatus, ...]
    studies: tuple[StudyStatus, ...]

    def study(self, key: str) -> StudyStatus | None:
        """The study with this key, None if it is not served."""
        return next((study for study in self.studies if study.key == key), None)
