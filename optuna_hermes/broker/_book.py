"""The broker's book: studies, runs, leases and device slots, with the questions asked of them.

Plain mutable records without a clock; ``_state`` alone changes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from optuna_hermes.broker._protocol import SavedCheckpoint, StudySpec
from optuna_hermes.ledger._base import RunRecord
from optuna_hermes.model import Curve, Device, RunState, RunView, TierName, Unstarted
from optuna_hermes.policies import Policy

_COST_MEMORY = 0.7
"""Weight of the past in the moving average of switch costs."""


@dataclass(kw_only=True)
class Run:
    """One run. ``connection`` is the process that holds it, None when there is none."""

    study: str
    number: int
    trial_id: int
    state: RunState
    submitted: float
    curve: Curve = field(default_factory=Curve)
    tier: TierName | None = None
    connection: int | None = None
    device: str | None = None
    epoch: int = 0
    stores: bool = False
    evicting: bool = False
    waiting_since: float | None = None
    units: int = 0
    slices: int = 0
    suspensions: int = 0
    device_seconds: float = 0.0
    held_bytes: int | None = None
    checkpoints: list[SavedCheckpoint] = field(default_factory=list)

    @property
    def live(self) -> bool:
        """Whether it has still to be trained."""
        return self.state not in ("done", "failed")

    def forget_process(self) -> None:
        """Its process is gone: what is left of it is its last checkpoint, if there is one."""
        self.connection, self.device, self.evicting = None, None, False
        self.state = "stored" if self.checkpoints else "pending"
        self.tier = "disk" if self.checkpoints else None


@dataclass(kw_only=True)
class Lease:
    """A lease that is out. ``number`` is None until a new trial has begun."""

    epoch: int
    study: str
    number: int | None
    device: str
    connection: int
    started: float
    deadline: float
    from_tier: TierName | None
    yielding: TierName | None = None
    last_progress: float = 0.0
    training: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Want:
    """What a device is reserved for: a run, or a new trial (``number`` None)."""

    study: str
    number: int | None
    slice_seconds: float | None


@dataclass(kw_only=True)
class Slot:
    """A device with its lease and what comes next."""

    device: Device
    lease: Lease | None = None
    next: Want | None = None
    empty_since: float | None = None


@dataclass(kw_only=True)
class Study:
    """A study that is being served; what is counted is counted since its driver came."""

    spec: StudySpec
    policy: Policy
    runs: dict[int, Run] = field(default_factory=dict)
    driver: int | None = None
    unstarted: int | None = 0
    fixed: bool = False
    max_alive: int = 0
    idle: list[int] = field(default_factory=list)
    workers: set[int] = field(default_factory=set)
    draining: bool = False
    problem: str | None = None
    memory: Any = None
    costs: dict[TierName, float] = field(default_factory=dict)
    switches: int = 0
    overhead_seconds: float = 0.0
    spent_seconds: float = 0.0

    def measure(self, tier: TierName, seconds: float) -> None:
        """Take one more measurement of bringing a run back from ``tier``."""
        past = self.costs.get(tier, seconds)
        self.costs[tier] = _COST_MEMORY * past + (1 - _COST_MEMORY) * seconds

    def cost(self, tier: TierName | None) -> float:
        """Expected seconds of bringing a run back from ``tier``."""
        return self.costs.get(tier, 0.0) if tier else 0.0

    def can_run(self, run: Run) -> bool:
        """Whether ``run`` could use a device now: it waits, and has or can get a process."""
        waits = run.state in ("pending", "parked", "stored") and not run.evicting
        return waits and (run.connection is not None or self.driver is not None)

    @property
    def attended(self) -> bool:
        """Whether a living process holds anything of it."""
        held = any(run.connection is not None for run in self.runs.values())
        return self.driver is not None or bool(self.workers) or held

    @property
    def may_open(self) -> Unstarted:
        """Trials that may still be created."""
        if self.driver is None:
            return Unstarted(count=0, fixed=self.fixed)
        return Unstarted(count=self.unstarted, fixed=self.fixed)

    @property
    def wants_device(self) -> bool:
        """Whether anything of this study could use a device."""
        if self.draining:
            return False
        return self.may_open.any or any(self.can_run(run) for run in self.runs.values())

    @property
    def parked(self) -> list[Run]:
        """Parked runs whose process could be freed, least recently run first."""
        runs = [r for r in self.runs.values() if r.state == "parked" and r.stores]
        return sorted((r for r in runs if not r.evicting), key=lambda r: r.waiting_since or 0.0)


def view(run: Run, *, cost: float, bound: bool, up_for_decision: bool, reserved: bool) -> RunView:
    """A run as a policy sees it.

    Args:
        run: the run.
        cost: seconds to bring it back.
        bound: whether it can go on only on the device it sits on.
        up_for_decision: its slice has just ended, so it competes like a parked run.
        reserved: it has a device already, or must not be chosen now.
    """
    state: RunState = run.state
    if up_for_decision:
        state = "parked"
    elif reserved:
        state = "running"
    return RunView(
        number=run.number,
        state=state,
        curve=run.curve,
        attained_seconds=run.device_seconds,
        submitted=run.submitted,
        waiting_since=None if state == "running" else run.waiting_since,
        tier="resident" if up_for_decision else run.tier,
        device=run.device,
        bound_to=(run.device,) if bound and run.device else (),
        switch_cost_seconds=0.0 if up_for_decision else cost,
    )


def with_report(curve: Curve, unit: int, step: int, value: float, seconds: float) -> Curve:
    """The curve with ``unit`` (from 1) reported; a unit that is trained again takes its place."""
    keep = unit - 1
    return Curve(
        steps=(*curve.steps[:keep], step),
        values=(*curve.values[:keep], value),
        device_seconds=(*curve.device_seconds[:keep], seconds),
    )


def counts(study: Study) -> dict[str, int]:
    """How many runs are in each state."""
    tally = dict.fromkeys(("pending", "running", "parked", "stored", "done", "failed"), 0)
    for run in study.runs.values():
        tally[run.state] += 1
    return tally


@dataclass(kw_only=True)
class Client:
    """A connection. A worker serves one study, and one run at a time."""

    pid: int
    role: str
    study: str | None = None


@dataclass(kw_only=True)
class Book:
    """Everything a broker knows.

    Args:
        host: name of this host.
        wall_offset: wall clock minus the monotonic clock, in seconds.
    """

    host: str
    wall_offset: float = 0.0
    epoch: int = 0
    slots: dict[str, Slot] = field(default_factory=dict)
    studies: dict[str, Study] = field(default_factory=dict)
    clients: dict[int, Client] = field(default_factory=dict)

    def slot_of(self, epoch: int) -> Slot | None:
        """The slot whose live lease has this epoch; None if that lease is over."""
        for slot in self.slots.values():
            if slot.lease and slot.lease.epoch == epoch:
                return slot
        return None

    def run_of(self, lease: Lease) -> Run | None:
        """The run that holds a lease; None for a new trial that has not begun."""
        if lease.number is None:
            return None
        return self.studies[lease.study].runs[lease.number]

    def reserved(self, study: str) -> list[Want]:
        """What devices are reserved for, of this study."""
        return [s.next for s in self.slots.values() if s.next and s.next.study == study]

    def record(self, run: Run, now: float) -> RunRecord:
        """A run as the ledger keeps it, at ``now``."""
        return RunRecord(
            study=run.study,
            number=run.number,
            trial_id=run.trial_id,
            state=run.state,
            tier=run.tier,
            host=self.host,
            units=run.units,
            slices=run.slices,
            suspensions=run.suspensions,
            device_seconds=run.device_seconds,
            submitted=run.submitted + self.wall_offset,
            updated=now + self.wall_offset,
        )
