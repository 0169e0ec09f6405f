"""Study that is served, as the broker knows it: a mutable record without a clock."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._protocol import StudySpec
from optuna_hermes.ledger._records import LeaseRecord
from optuna_hermes.model import (
    WAITING_STATES,
    OverheadKind,
    Override,
    TierName,
    TrialView,
    moving_average,
)

if TYPE_CHECKING:
    from optuna_hermes.policies import Policy


@dataclass(kw_only=True)
class Failures:
    """The failures of a study since its driver came.

    Args:
        first: the number of the first trial that failed, None if none has.
        first_error: its reason.
        error: the last reason, without numbers.
        alike: how many in a row had that one.
        units: how many units the furthest of those had reported.
        seconds: the longest device time of those.
        hopeless: there is nothing but equal failures.
    """

    first: int | None = None
    first_error: str = ""
    error: str = ""
    alike: int = 0
    units: int = 0
    seconds: float = 0.0
    hopeless: bool = False


@dataclass(kw_only=True)
class Study:
    """A study that is being served; its counters begin when its driver comes.

    Its ledger's database is away since ``outage_since``, for ``outage_reason``.

    Args:
        unclaimed_leases: leases of earlier brokers, by epoch, whose processes have not come back
            yet.
        lost_creations: see ``Lease``; of trials that no worker looks for yet.
        kept_memory: what the ledger has kept of its policy's memory, until its driver comes.
        broker: this broker, where several hosts share the study, else None.
        limit: how many trials there shall be, over all hosts; None for no bound.
        foreign: trials that count for that but have not reached its ledger, and perhaps never will.
        opening_elsewhere: leases of other hosts from which further trials will come.
        refreshed_at: when the ledger has shown last what other hosts have done.
        watched_since: since when it has done so without a gap over ``_GAP_SECONDS``.
        heartbeats: the last ones of other hosts, by this broker's clock.
        idle_elsewhere: devices of other hosts that have nothing to train of it.
        ends_at: when its driver has all trials suspended, None for no such time.
        device_seconds: ``spent_seconds`` from which on it does so, None for no bound.
        opening_seconds: expected device time from a new trial's lease to its first batch, 0.0
            before the first one.
        leave_seconds: expected cost of suspending a trial to disk, 0.0 before the first time.
        mean_unit_seconds: moving average of the device time of a unit, 0.0 before the first one.
        powered_down: devices that its policy has no use for.
        overrides: the overrides of its trials, by their numbers.
        failures: what is known of trials that failed since its driver came.
        sets_up: whether new trials may be set up before there is a device for them.
        defers: whether idle hosts are less busy than this one: trials without owner are theirs.
        asked_for: trials parked on other hosts that its policy would rather train here.
        asked_since: when it first asked for trials that still wait there.
        asks_again_at: until when it asks for no others.
        promised: trials that other hosts have asked for.
        listed: the trials of a fixed list that had not begun when its driver came, if it has told
            the parameters of all of them.
        retry_at: when trials may begin again that could not, by their numbers: their checkpoints
            were away, or they failed; infinity for never.
        failed_reads: how often in a row, each a minute after the one before, no checkpoint could be
            read; last at ``failed_read_at``.
        failed_returns: why suspended trials failed before they went on, once for each try that is
            over, by their numbers; the latest trial comes last.
        failed_in_a_row: the trials that failed so since one has trained, once for each such try; no
            new one is opened before ``opens_again_at``.
        problem_may_pass: it is of this host and this moment: the same command is to be run again.
        turn_seconds: device time by which studies take turns: that of its leases that are over, and
            what it was given to begin level with the others.
        at_work: it had a device or could use one when devices were decided about last.
        set_up_pause: how often it is not asked which trials are to be set up.
    """

    spec: StudySpec
    policy: Policy
    trials: dict[int, LiveTrial] = field(default_factory=dict)
    driver: int | None = None
    fixed: bool = False
    max_alive: int = 0
    idle_workers: list[int] = field(default_factory=list)
    workers: set[int] = field(default_factory=set)
    draining: bool = False
    problem: str | None = None
    outage_since: float | None = None
    outage_reason: str = ""
    memory: Any = None
    kept_memory: Any = None
    costs: dict[TierName, float] = field(default_factory=dict)
    ends_at: float | None = None
    device_seconds: float | None = None
    opening_seconds: float = 0.0
    leave_seconds: float = 0.0
    mean_unit_seconds: float = 0.0
    switches: int = 0
    overhead_seconds: dict[OverheadKind, float] = field(default_factory=dict)
    spent_seconds: float = 0.0
    unclaimed_leases: dict[int, LeaseRecord] = field(default_factory=dict)
    lost_creations: list[tuple[str, ...]] = field(default_factory=list)
    broker: str | None = None
    limit: int | None = None
    foreign: set[int] = field(default_factory=set)
    opening_elsewhere: int = 0
    refreshed_at: float = -math.inf
    watched_since: float = 0.0
    heartbeats: dict[str, float] = field(default_factory=dict)
    idle_elsewhere: int = 0
    powered_down: frozenset[str] = frozenset()
    sets_up: bool = False
    defers: bool = False
    asked_for: tuple[int, ...] = ()
    asked_since: dict[int, float] = field(default_factory=dict)
    asks_again_at: float = 0.0
    promised: frozenset[int] = frozenset()
    failures: Failures = field(default_factory=Failures)
    overrides: dict[int, Override] = field(default_factory=dict)
    listed: dict[int, TrialView] = field(default_factory=dict)
    retry_at: dict[int, float] = field(default_factory=dict)
    failed_reads: int = 0
    failed_read_at: float = -math.inf
    failed_returns: dict[int, list[str]] = field(default_factory=dict)
    failed_in_a_row: list[int] = field(default_factory=list)
    opens_again_at: float = 0.0
    problem_may_pass: bool = False
    turn_seconds: float = 0.0
    at_work: bool = False
    set_up_pause: int = 0

    @property
    def saved_memory(self) -> dict[str, Any]:
        """The memory as the ledger keeps it: with the name of the policy whose it is."""
        return {"policy": self.spec.policy, "memory": self.memory}

    def restore_memory(self, saved: Any) -> None:
        """Take up the memory that the ledger has kept, if it is the policy's own."""
        own = isinstance(saved, dict) and saved.get("policy") == self.spec.policy
        self.memory = saved["memory"] if own else None

    def override_of(self, trial: LiveTrial) -> Override | None:
        """Override of a trial; None once it is over."""
        return self.overrides.get(trial.number) if trial.live else None

    def is_held(self, trial: LiveTrial) -> bool:
        """True if an override keeps a trial from any device."""
        return self.override_of(trial) in ("held", "finishing")

    def add(self, trial: LiveTrial) -> None:
        """Add a trial, or replace the one of its number."""
        self.trials[trial.number] = trial
        self.foreign.discard(trial.number)

    def owns(self, trial: LiveTrial) -> bool:
        """True if a trial belongs to this broker, where the ledger has owners."""
        return self.broker is not None and trial.owner == self.broker

    def is_barred(self, trial: LiveTrial) -> bool:
        """True if a trial gets no device until somebody wants that, if ever."""
        return trial.given_up or self.is_held(trial)

    def is_elsewhere(self, trial: LiveTrial) -> bool:
        """True if a trial belongs to the broker of another host."""
        return trial.owner is not None and trial.owner != self.broker

    def add_overhead(self, kind: OverheadKind, seconds: float) -> None:
        self.overhead_seconds[kind] = self.overhead_seconds.get(kind, 0.0) + seconds

    def measure(self, tier: TierName, seconds: float) -> None:
        self.costs[tier] = moving_average(self.costs.get(tier), seconds)

    def unit_seconds(self, trial: LiveTrial) -> float:
        """Expected device time of a trial's unit, 0.0 before any trial has reported."""
        known = trial.curve.units > 1
        return trial.curve.last_unit_seconds if known else self.mean_unit_seconds

    def has_time_for(self, trial: LiveTrial, now: float) -> bool:
        """False if a device is of no use to a trial before its driver has all suspended.

        That is so if it would not be back on the device by then, or if it could not end its next
        unit and loses what it has not ended. One that can be suspended between units loses
        nothing, however long they take.
        """
        if self.ends_at is None:
            return True
        back = 0.0 if trial.state == "running" else self.cost(trial.tier)
        unit = 0.0
        if not (trial.can_store or trial.checkpoints):
            unit = self.unit_seconds(trial) / max(1, len(trial.devices))
        return now + back + unit <= self.ends_at

    def has_time_to_open(self, now: float, up: Container[int | None] = ()) -> bool:
        """False if a new trial would not end its first unit before all is suspended.

        Where no other trial can use the device it may be cut in its first unit, if it can be
        suspended there, but not before its first batch. The trials that are ``up`` for decision
        have a device.
        """
        first = now + self.opening_seconds
        if self.ends_at is None or first + self.mean_unit_seconds <= self.ends_at:
            return True
        trials = self.trials.values()
        kept = any(trial.can_store or trial.checkpoints for trial in trials)
        can_go_on = (each for each in trials if each.number in up or self.can_begin(each))
        others = any(self.has_time_for(each, now) for each in can_go_on)
        return kept and not others and first <= self.ends_at

    @property
    def is_elastic(self) -> bool:
        """True if a live trial can be trained on several devices."""
        sizes = (trial.sizes for trial in self.trials.values() if trial.live)
        return any(each is not None and each.most_devices > 1 for each in sizes)

    def cost(self, tier: TierName | None) -> float:
        """Expected seconds of bringing a trial back from ``tier``."""
        return self.costs.get(tier, 0.0) if tier else 0.0

    def can_begin(self, trial: LiveTrial) -> bool:
        """True if ``trial`` could use a device now: it waits, and has or can get a process."""
        waits = trial.state in WAITING_STATES and not trial.evicting
        served = trial.connection is not None or self.driver is not None
        left = trial.owner is None and (self.defers or trial.number in self.promised)
        here = not (left or self.is_elsewhere(trial))
        barred = self.is_barred(trial) or trial.number in self.retry_at
        return (
            waits and served and here and not (trial.waits_for_memory or trial.recovering or barred)
        )

    @property
    def has_processes(self) -> bool:
        """True if a living process holds anything of it."""
        held = any(trial.connection is not None for trial in self.trials.values())
        return self.driver is not None or bool(self.workers) or held

    @property
    def is_plain(self) -> bool:
        """True if only processes of plain ``study.optimize`` have trials of it."""
        return self.driver is None and not self.workers

    def cancel_drain(self) -> None:
        """Forget a drain, its reason and the limits of a driver: what has trials goes on."""
        self.draining, self.problem, self.problem_may_pass = False, None, False
        self.ends_at = self.device_seconds = None

    @property
    def most_known(self) -> int | None:
        """Most trials that its ledger may come to know, None for no bound."""
        return None if self.limit is None else self.limit - len(self.foreign)

    @property
    def parked(self) -> list[LiveTrial]:
        """Parked trials whose process could be freed."""
        trials = (trial for trial in self.trials.values() if trial.state == "parked")
        return [trial for trial in trials if trial.can_store and trial.requested_tier is None]

    def need_of(self, trial: LiveTrial | None) -> int | None:
        """Device memory a trial, or a new trial, will need; as much as the largest if unknown."""
        if trial is not None and trial.need_bytes is not None:
            return trial.need_bytes
        # Unknown before its first batch: the largest need of its study is a safe guess.
        known = (each.need_bytes for each in self.trials.values())
        return max((need for need in known if need is not None), default=None)
