"""The broker's book: studies, runs, leases and device slots, with the questions asked of them.

Plain mutable records without a clock; ``_state`` alone changes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from optuna_hermes.broker._holder import Awaited
from optuna_hermes.broker._protocol import BatchSizes, Params, SavedCheckpoint, StudySpec
from optuna_hermes.ledger._base import EventRecord, LeaseRecord, RunRecord
from optuna_hermes.model import (
    Curve,
    Device,
    RunState,
    RunView,
    Speed,
    TierName,
    Unstarted,
    Wish,
)
from optuna_hermes.policies import Policy

_COST_MEMORY = 0.7
"""Weight of the past in the moving average of switch costs."""


PowerState = Literal["on", "going", "off", "coming"]


@dataclass(kw_only=True)
class Run:
    """One run; what it says of its memory is not in the ledger, for it ends with its process.

    Args:
        connection: the process that holds it, None when there is none.
        device: where it runs, or where its process is parked; the first one if there are several.
        others: the further ones.
        epoch: of its last lease.
        stores: whether it can be suspended to disk, as it said last.
        moves: whether it can be moved to host memory; it is asked before it has said so.
        asked: the tier it was asked to go to and has not answered yet, since ``asked_at``.
        host: where it had a device last, None before its first lease.
        need_bytes: the most memory of each device it has been seen to need, None if unknown.
        held_bytes: memory of each device it holds while it is parked, None if unknown.
        host_bytes: host memory it has taken for what it moved off its device.
        alone: it outgrew its memory beside others, and gets its device to itself.
        stranded: it found no room although nobody could go: it waits until somebody has gone.
        silence: the longest time between two signs of life while it trained, None at first.
        units_left: units until its end after its last report, None if unknown.
        params: its hyper-parameters, empty if unknown.
        sizes: of its batches, None if they do not change, or nobody has said so yet.
        speeds: what was measured of it.
        seen: how a policy saw it last, behind all that made it look so.
        awaited: a process that has not come back yet may have it.
        owner: the broker it belongs to in the ledger, where several hosts share the study.
        row: its row in the ledger, as it was read or written last; None while it has none.
    """

    study: str
    number: int
    trial_id: int
    state: RunState
    submitted: float
    curve: Curve = field(default_factory=Curve)
    tier: TierName | None = None
    connection: int | None = None
    device: str | None = None
    others: tuple[str, ...] = ()
    epoch: int = 0
    stores: bool = False
    moves: bool = True
    asked: TierName | None = None
    asked_at: float = 0.0
    waiting_since: float | None = None
    units: int = 0
    slices: int = 0
    suspensions: int = 0
    device_seconds: float = 0.0
    energy_joules: float | None = None
    host: str | None = None
    need_bytes: int | None = None
    held_bytes: int | None = None
    host_bytes: int = 0
    alone: bool = False
    stranded: bool = False
    silence: float | None = None
    units_left: int | None = None
    params: Params = field(default_factory=dict)
    sizes: BatchSizes | None = None
    speeds: tuple[Speed, ...] = ()
    seen: tuple[Any, RunView] | None = field(default=None, repr=False, compare=False)
    awaited: bool = False
    owner: str | None = None
    row: RunRecord | None = field(default=None, repr=False, compare=False)
    checkpoints: list[SavedCheckpoint] = field(default_factory=list)

    @property
    def live(self) -> bool:
        """Whether it has still to be trained."""
        return self.state not in ("done", "failed")

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices where it runs, or where its process is parked."""
        return () if self.device is None else (self.device, *self.others)

    def sits_on(self, devices: Sequence[str]) -> None:
        """It runs there, or its process is parked there."""
        self.device, self.others = (devices[0], tuple(devices[1:])) if devices else (None, ())

    @property
    def held(self) -> bool:
        """Whether it is in the memory of a process, or may be."""
        has_process = self.connection is not None or self.state in ("running", "parked")
        return self.live and (has_process or self.awaited)

    @property
    def evicting(self) -> bool:
        """Whether it is on its way off its device."""
        return self.asked in ("host", "disk")

    @property
    def takes_bytes(self) -> int | None:
        """Device memory it takes where it is, as far as is known."""
        return self.need_bytes if self.held_bytes is None else self.held_bytes

    @property
    def host_claim_bytes(self) -> int:
        """Host memory it has, or was promised."""
        promised = (self.takes_bytes or 0) if self.asked == "host" else 0
        return max(self.host_bytes, promised)

    @property
    def device_range(self) -> tuple[int, int]:
        """The least and the most devices that it may be given; another number goes over disk."""
        now = max(1, len(self.devices))
        if self.connection is not None and not self.stores:
            return now, now
        if self.sizes is None:
            return (1, 1) if self.connection is None else (now, now)
        return 1, self.sizes.most_devices

    def suits(self, slots: Sequence[Slot]) -> bool:
        """Whether its process, if it has one, could go on there: a GPU's leaves it never."""
        if self.connection is None or not self.devices:
            return True
        gpus = any(slot.device.kind == "gpu" for slot in slots)
        same = {slot.device.id for slot in slots} == set(self.devices)
        return same if gpus else len(slots) == len(self.devices)

    def needs(self, memory_bytes: int | None) -> None:
        """It has been seen to need so much device memory."""
        if memory_bytes is not None:
            self.need_bytes = max(self.need_bytes or 0, memory_bytes)

    def forget_process(self) -> None:
        """Its process is gone: what is left of it is its last checkpoint, if there is one."""
        self.connection, self.asked = None, None
        self.sits_on(())
        self.held_bytes, self.host_bytes = None, 0
        self.state = "stored" if self.checkpoints else "pending"
        self.tier = "disk" if self.checkpoints else None


@dataclass(kw_only=True)
class Lease:
    """A lease that is out: one object, which hangs on the slot of each of its devices.

    Args:
        number: None until a new trial has begun.
        devices: one or more.
        started: when it was granted; ``slice_started`` when it was renewed last.
        from_tier: where its run came from.
        yielding: the tier by which it was asked to leave.
        looked: it was looked ahead to the end of this slice.
        training: its first batch has begun.
        reported: it has reported since.
        held: it is not in the ledger yet, whose database is away: nobody has heard of it.
        before: the epoch of its run's lease before this one.
        adopted: it was granted by an earlier broker.
        lost: the epochs of leases of which one holder may have created a trial, and died before it
            said so; this one's holder looks for that trial before it creates another.
        refused: its holder has found a trial that it may not have.
        claimed: the row of its run, which was nobody's before; None if it was this broker's.
        energy_joules: what the counters of its devices said in all when it was granted, None if
            one has none.
    """

    epoch: int
    study: str
    number: int | None
    devices: tuple[str, ...]
    connection: int
    started: float
    slice_started: float
    deadline: float
    from_tier: TierName | None
    yielding: TierName | None = None
    last_progress: float = 0.0
    looked: bool = False
    training: bool = False
    reported: bool = False
    held: bool = False
    before: int = 0
    adopted: bool = False
    lost: tuple[int, ...] = ()
    refused: bool = False
    claimed: RunRecord | None = field(default=None, repr=False)
    energy_joules: float | None = None

    @property
    def device(self) -> str:
        """The first of its devices."""
        return self.devices[0]

    def device_seconds(self, end: float) -> float:
        """Device time from its beginning to ``end``."""
        return (end - self.started) * len(self.devices)


@dataclass(frozen=True, kw_only=True, slots=True)
class Want:
    """What devices are reserved for: a run, or a new trial (``number`` None).

    One object, which hangs on the slot of each of them.
    """

    study: str
    number: int | None
    slice_seconds: float | None
    batch_size: int | None = None


@dataclass(kw_only=True)
class Slot:
    """A device with its lease and what comes next.

    Until ``settles_at`` a reading may still show memory that somebody said to have left. Who is
    ``awaited`` has it from an earlier broker, and nobody else may.

    Args:
        power: see ``_power``; who is there and what is free of a device is known while it is on.
        spare: no policy has a use for it, as of when one was asked last.
        power_retry_at: its power is left as it is until then.
        power_problem: why it could not be woken, empty if it could.
    """

    device: Device
    lease: Lease | None = None
    next: Want | None = None
    empty_since: float | None = None
    settles_at: float = 0.0
    awaited: int | None = None
    power: PowerState = "on"
    spare: bool = False
    power_retry_at: float = 0.0
    power_problem: str = ""


@dataclass(kw_only=True)
class Study:
    """A study that is being served; what is counted is counted since its driver came.

    Its ledger's database is away since ``away_since``, for ``away_reason``.

    Args:
        orphans: leases of earlier brokers, by epoch, whose processes have not come back yet.
        trials: how many trials there were when the driver counted those that are left, None if
            it has not said so.
        waiting: the numbers of those among them that nobody had begun.
        lost: see ``Lease``; of trials that nobody looks for yet.
        broker: this broker, where several hosts share the study, else None.
        limit: how many runs there shall be, over all hosts; None for no bound.
        coming: leases of other hosts from which further runs will come.
        watched_since: since when the ledger has told without a pause who lives, None if it has not.
        spare: devices of other hosts that have nothing to train of it.
        leave_seconds: expected cost of suspending a run to disk, 0.0 before the first time.
        powered_down: devices that its policy has no use for.
        wishes: what people want of its runs, by their numbers.
        defers: whether they are less busy than this one: what is nobody's is left to them.
    """

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
    away_since: float | None = None
    away_reason: str = ""
    memory: Any = None
    costs: dict[TierName, float] = field(default_factory=dict)
    leave_seconds: float = 0.0
    switches: int = 0
    overhead_seconds: float = 0.0
    spent_seconds: float = 0.0
    orphans: dict[int, LeaseRecord] = field(default_factory=dict)
    trials: int | None = None
    waiting: frozenset[int] = frozenset()
    lost: list[tuple[int, ...]] = field(default_factory=list)
    broker: str | None = None
    limit: int | None = None
    coming: int = 0
    watched_since: float | None = None
    spare: int = 0
    powered_down: frozenset[str] = frozenset()
    defers: bool = False
    wishes: dict[int, Wish] = field(default_factory=dict)

    def wish_of(self, run: Run) -> Wish | None:
        """What people want of a run; nothing once it is over."""
        return self.wishes.get(run.number) if run.live else None

    def is_held(self, run: Run) -> bool:
        """Whether a run gets no device, whatever the policy says."""
        return self.wish_of(run) in ("held", "finishing")

    @property
    def all_held(self) -> bool:
        """Whether nothing can be trained before people let go of a run that they hold."""
        live = [run for run in self.runs.values() if run.live]
        held = all(self.wish_of(run) == "held" for run in live)
        return bool(live) and not self.may_open.any and held

    def owns(self, run: Run) -> bool:
        """Whether a run belongs to this broker, where that is written down."""
        return self.broker is not None and run.owner == self.broker

    def is_elsewhere(self, run: Run) -> bool:
        """Whether a run belongs to the broker of another host."""
        return run.owner is not None and run.owner != self.broker

    def measure(self, tier: TierName, seconds: float) -> None:
        """Take one more measurement of bringing a run back from ``tier``."""
        past = self.costs.get(tier, seconds)
        self.costs[tier] = _COST_MEMORY * past + (1 - _COST_MEMORY) * seconds

    def measure_leaving(self, seconds: float) -> None:
        """Take one more measurement of suspending a run to disk."""
        past = self.leave_seconds or seconds
        self.leave_seconds = _COST_MEMORY * past + (1 - _COST_MEMORY) * seconds

    @property
    def stretches(self) -> bool:
        """Whether any of its runs may have several devices."""
        sizes = (run.sizes for run in self.runs.values() if run.live)
        return any(each is not None and each.most_devices > 1 for each in sizes)

    def cost(self, tier: TierName | None) -> float:
        """Expected seconds of bringing a run back from ``tier``."""
        return self.costs.get(tier, 0.0) if tier else 0.0

    def can_run(self, run: Run) -> bool:
        """Whether ``run`` could use a device now: it waits, and has or can get a process."""
        waits = run.state in ("pending", "parked", "stored") and not run.evicting
        served = run.connection is not None or self.driver is not None
        here = not self.is_elsewhere(run) and not (self.defers and run.owner is None)
        free = not (run.stranded or run.awaited or self.is_held(run))
        return waits and served and here and free

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
        # It may be counted once too often until a trial from before its driver has begun.
        count = None if self.unstarted is None else max(0, self.unstarted)
        return Unstarted(count=count, fixed=self.fixed)

    def was_counted(self, number: int) -> bool:
        """Whether its driver has counted a trial among those that are not left to be created."""
        return self.trials is None or (number < self.trials and number not in self.waiting)

    @property
    def wants_device(self) -> bool:
        """Whether anything of this study could use a device."""
        if self.draining or self.away_since is not None:
            return False
        return self.may_open.any or any(self.can_run(run) for run in self.runs.values())

    @property
    def parked(self) -> list[Run]:
        """Parked runs whose process could be freed."""
        runs = (run for run in self.runs.values() if run.state == "parked")
        return [run for run in runs if run.stores and run.asked is None]

    def need_of(self, run: Run | None) -> int | None:
        """Device memory a run, or a new trial, will need; as much as the largest if unknown."""
        if run is not None and run.need_bytes is not None:
            return run.need_bytes
        known = (each.need_bytes for each in self.runs.values())
        return max((need for need in known if need is not None), default=None)


@dataclass(kw_only=True)
class Client:
    """A connection. A worker serves one study, and one run at a time.

    Args:
        pid: its process.
        role: as in ``Hello``.
        study: whom it serves.
        prepared: the run whose checkpoint it has read ahead of time.
        leaving: the devices whose memory it still has, after it said that it leaves, since
            ``left_at``.
        started: when its process did, as its kernel counts.
        described: parameters of the trials of studies that it is about to open.
        finishes: runs that it is about to close, by study and number.
    """

    pid: int
    role: str
    started: int = 0
    study: str | None = None
    prepared: int | None = None
    leaving: tuple[str, ...] = ()
    left_at: float = 0.0
    described: dict[str, dict[int, Params]] = field(default_factory=dict)
    finishes: set[tuple[str, int]] = field(default_factory=set)


@dataclass(kw_only=True)
class Book:
    """Everything a broker knows.

    Args:
        host: name of this host.
        instance: this broker, as other hosts know it.
        wall_offset: wall clock minus the monotonic clock, in seconds.
        host_budget_bytes: host memory that runs may take for what they move off their devices.
        awaited: by the connections that their ends are told by.
        early: workers that are ready for a study that is not open yet, by its key.
        powers: whether there are commands that power devices up and down.
    """

    host: str
    instance: str = ""
    wall_offset: float = 0.0
    host_budget_bytes: int = 0
    epoch: int = 0
    slots: dict[str, Slot] = field(default_factory=dict)
    studies: dict[str, Study] = field(default_factory=dict)
    clients: dict[int, Client] = field(default_factory=dict)
    awaited: dict[int, Awaited] = field(default_factory=dict)
    early: dict[str, list[int]] = field(default_factory=dict)
    powers: bool = False

    @property
    def served(self) -> int:
        """How many clients need this broker; those that only look do not."""
        return sum(1 for client in self.clients.values() if client.role != "viewer")

    @property
    def recovering(self) -> bool:
        """Whether processes of an earlier broker are about to say what they have."""
        return any(not each.late for each in self.awaited.values())

    @property
    def asleep(self) -> bool:
        """Whether any device is powered down, or on its way there or back."""
        return any(slot.power != "on" for slot in self.slots.values())

    def holds(self, connection: int) -> bool:
        """Whether a client has a device, or a run in its memory."""
        leased = any(lease.connection == connection for lease in self.leases())
        return leased or any(run.connection == connection for run in self.runs())

    def leases(self) -> list[Lease]:
        """The leases that are out, each once."""
        return list({id(s.lease): s.lease for s in self.slots.values() if s.lease}.values())

    def wants(self) -> list[Want]:
        """What devices are reserved for, each once."""
        return list({id(s.next): s.next for s in self.slots.values() if s.next}.values())

    def slots_of(self, held: Lease | Want) -> list[Slot]:
        """The slots of the devices of a lease, or of what they are reserved for."""
        return [slot for slot in self.slots.values() if held is slot.lease or held is slot.next]

    def slot_of(self, epoch: int) -> Slot | None:
        """The first slot whose live lease has this epoch; None if that lease is over."""
        for slot in self.slots.values():
            if slot.lease and slot.lease.epoch == epoch:
                return slot
        return None

    def run_of(self, lease: Lease) -> Run | None:
        """The run that holds a lease; None for a new trial that has not begun."""
        if lease.number is None:
            return None
        return self.studies[lease.study].runs[lease.number]

    @property
    def host_used_bytes(self) -> int:
        """What of the host budget is taken, or promised."""
        return sum(run.host_claim_bytes for run in self.runs())

    def runs(self) -> Iterator[Run]:
        """Every run of every study."""
        for study in self.studies.values():
            yield from study.runs.values()

    def parked_on(self, slot: Slot) -> list[Run]:
        """Runs whose processes are parked on a device, in its memory or in the host's."""
        return [r for r in self.runs() if r.state == "parked" and slot.device.id in r.devices]

    def reserved(self, study: str) -> list[Want]:
        """What devices are reserved for, of this study."""
        return [want for want in self.wants() if want.study == study]

    def wants_process(self, want: Want) -> bool:
        """Whether a worker that waits is needed for what devices are reserved for."""
        if want.number is None:
            return True
        run = self.studies[want.study].runs[want.number]
        return run.connection is None or not run.suits(self.slots_of(want))

    def unreserve(self, want: Want) -> None:
        """What devices were reserved for comes to nothing; a new trial may still be created."""
        for slot in self.slots_of(want):
            slot.next = None
        if want.number is None:
            study = self.studies[want.study]
            study.unstarted = None if study.unstarted is None else study.unstarted + 1

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
            energy_joules=run.energy_joules,
            submitted=run.submitted + self.wall_offset,
            updated=now + self.wall_offset,
        )

    def event(
        self, study: str, number: int | None, kind: str, detail: dict[str, Any], now: float
    ) -> EventRecord:
        """A line of the story of a study, or of one of its runs."""
        at = now + self.wall_offset
        return EventRecord(study=study, number=number, kind=kind, at=at, detail=detail)
