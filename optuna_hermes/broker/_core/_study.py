"""Study that is served, as the broker knows it: a mutable record without a clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from optuna_hermes.broker._core._run import LiveTrial
from optuna_hermes.broker._protocol import StudySpec
from optuna_hermes.ledger._base import LeaseRecord
from optuna_hermes.model import TierName, Unstarted, Wish
from optuna_hermes.policies import Policy

_COST_MEMORY = 0.7
"""Weight of the past in the moving average of switch costs."""


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

    Its ledger's database is away since ``away_since``, for ``away_reason``.

    Args:
        orphans: leases of earlier brokers, by epoch, whose processes have not come back yet.
        trials: how many trials there were when the driver counted those that are left, None if
            it has not said so.
        waiting: the numbers of those among them that had not begun.
        lost: see ``Lease``; of trials that no worker looks for yet.
        broker: this broker, where several hosts share the study, else None.
        limit: how many runs there shall be, over all hosts; None for no bound.
        coming: leases of other hosts from which further runs will come.
        watched_since: since when the ledger has shown without an outage who lives, else None.
        spare: devices of other hosts that have nothing to train of it.
        leave_seconds: expected cost of suspending a run to disk, 0.0 before the first time.
        powered_down: devices that its policy has no use for.
        wishes: the overrides of its runs, by their numbers.
        failures: what is known of trials that failed since its driver came.
        defers: whether idle hosts are less busy than this one: runs without owner are theirs.
    """

    spec: StudySpec
    policy: Policy
    runs: dict[int, LiveTrial] = field(default_factory=dict)
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
    failures: Failures = field(default_factory=Failures)
    wishes: dict[int, Wish] = field(default_factory=dict)

    def wish_of(self, run: LiveTrial) -> Wish | None:
        """Override of a run; None once it is over."""
        return self.wishes.get(run.number) if run.live else None

    def is_held(self, run: LiveTrial) -> bool:
        """True if an override keeps a run from any device."""
        return self.wish_of(run) in ("held", "finishing")

    @property
    def all_held(self) -> bool:
        """True if nothing can be trained before a hold is released."""
        live = [run for run in self.runs.values() if run.live]
        held = all(self.wish_of(run) == "held" for run in live)
        return bool(live) and not self.may_open.any and held

    def owns(self, run: LiveTrial) -> bool:
        """True if a run belongs to this broker, where the ledger has owners."""
        return self.broker is not None and run.owner == self.broker

    def is_elsewhere(self, run: LiveTrial) -> bool:
        """True if a run belongs to the broker of another host."""
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
        """True if any of its runs may have several devices."""
        sizes = (run.sizes for run in self.runs.values() if run.live)
        return any(each is not None and each.most_devices > 1 for each in sizes)

    def cost(self, tier: TierName | None) -> float:
        """Expected seconds of bringing a run back from ``tier``."""
        return self.costs.get(tier, 0.0) if tier else 0.0

    def can_run(self, run: LiveTrial) -> bool:
        """True if ``run`` could use a device now: it waits, and has or can get a process."""
        waits = run.state in ("pending", "parked", "stored") and not run.evicting
        served = run.connection is not None or self.driver is not None
        here = not self.is_elsewhere(run) and not (self.defers and run.owner is None)
        free = not (run.stranded or run.awaited or run.given_up or self.is_held(run))
        return waits and served and here and free

    @property
    def attended(self) -> bool:
        """True if a living process holds anything of it."""
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
        """True if its driver has counted a trial among those that are not left to be created."""
        return self.trials is None or (number < self.trials and number not in self.waiting)

    @property
    def wants_device(self) -> bool:
        """True if anything of this study could use a device."""
        if self.draining or self.away_since is not None:
            return False
        return self.may_open.any or any(self.can_run(run) for run in self.runs.values())

    @property
    def parked(self) -> list[LiveTrial]:
        """Parked runs whose process could be freed."""
        runs = (run for run in self.runs.values() if run.state == "parked")
        return [run for run in runs if run.stores and run.asked is None]

    def need_of(self, run: LiveTrial | None) -> int | None:
        """Device memory a run, or a new trial, will need; as much as the largest if unknown."""
        if run is not None and run.need_bytes is not None:
            return run.need_bytes
        # Unknown before its first batch: the largest need of its study is a safe guess.
        known = (each.need_bytes for each in self.runs.values())
        return max((need for need in known if need is not None), default=None)
