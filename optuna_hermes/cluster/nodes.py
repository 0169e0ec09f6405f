"""Replay of powering nodes up and down by a recorded demand, minute by minute."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from optuna_hermes.cluster.energy_forecast import expected_peak, remembered
from optuna_hermes.cluster.energy_rules import TICK_SECONDS, EnergyRules
from optuna_hermes.errors import InvalidInputError

BOOT_MINUTES = 5
"""Time from a node's wake-up to its first job."""

TICK_MINUTES = int(TICK_SECONDS // 60)

Forecast = Callable[[Sequence[int]], float]


@dataclass(frozen=True, kw_only=True)
class NodeSeries:
    """A cluster's recorded demand for nodes, one entry a minute.

    Args:
        active: nodes with running jobs.
        demand: wanted nodes: the active ones, and those for waiting jobs.
        total: all nodes.
        arrivals: submitted jobs.

    Raises:
        InvalidInputError: lengths differ, or numbers do not fit together.
    """

    active: Sequence[int]
    demand: Sequence[int]
    total: Sequence[int]
    arrivals: Sequence[int]

    def __post_init__(self) -> None:
        lengths = [len(each) for each in (self.active, self.demand, self.total, self.arrivals)]
        if len(set(lengths)) != 1 or not lengths[0]:
            raise InvalidInputError(
                f"A series of nodes must have entries, as many in each list, but got {lengths}."
            )
        rows = zip(self.active, self.demand, self.total, strict=True)
        wrong = next((i for i, (a, d, t) in enumerate(rows) if not 0 <= a <= d <= t), None)
        if wrong is not None:
            raise InvalidInputError(
                "0 <= active <= demand <= total must hold in every minute but in minute "
                f"{wrong} they are {self.active[wrong]}, {self.demand[wrong]} and "
                f"{self.total[wrong]}."
            )


@dataclass(frozen=True, kw_only=True)
class NodeUse:
    """Result of a replay of nodes.

    Args:
        utilisation: the active share of the powered nodes, in node minutes; a node that boots has
            power and is not active.
        delayed_fraction: share of jobs submitted in a minute in which fewer nodes were up than
            wanted: an upper bound of those that waited for a node that was down.
        delayed: number of these jobs.
        wakeups: number of nodes that were woken.
        powered: nodes with power, by minute.
    """

    utilisation: float
    delayed_fraction: float
    delayed: int
    wakeups: int
    powered: tuple[int, ...] = field(repr=False)


def never_powered_down(series: NodeSeries) -> NodeUse:
    """The result with all nodes powered all the time, as under every policy but ``energy``."""
    return _use(series, series.total, sum(series.active))


def replay_nodes(
    series: NodeSeries,
    rules: EnergyRules | None = None,
    *,
    boot_minutes: int = BOOT_MINUTES,
    forecast: Forecast = expected_peak,
) -> NodeUse:
    """Power nodes by ``rules``; a decision uses only the past up to its minute.

    Demand stays as recorded: a job that would wait for a node is counted, but does not end later.

    Args:
        series: the recorded demand.
        rules: rules of the controller.
        boot_minutes: time from a node's wake-up to its first job.
        forecast: function from the peaks of past ticks to the highest expected demand.
    """
    rules = rules or EnergyRules()
    cluster = _Cluster(boot_minutes=boot_minutes, up=series.total[0])
    peaks: tuple[int, ...] = ()
    powered: list[int] = []
    short: list[int] = []
    expected, locked_until, served = 0.0, 0, 0
    for minute, demand in enumerate(series.demand):
        cluster.pass_minute(minute, series.total[minute])
        powered.append(cluster.powered)
        served += min(series.active[minute], cluster.up)
        if cluster.up < demand:
            short.append(minute)
        ends_tick = (minute + 1) % TICK_MINUTES == 0
        if ends_tick:
            peaks = remembered(peaks, max(series.demand[minute + 1 - TICK_MINUTES : minute + 1]))
            expected = forecast(peaks)
        wanted = rules.wanted(
            n_nodes=series.total[minute],
            powered=cluster.powered,
            demand=demand,
            recent=max(demand, *peaks[-rules.look_back_ticks :]) if ends_tick else demand,
            expected=expected,
            may_fall=ends_tick and minute >= locked_until,
        )
        if wanted > cluster.powered:
            locked_until = minute + rules.keep_ticks * TICK_MINUTES
        cluster.power(wanted, minute)
    return _use(series, powered, served, short, cluster.wakeups)


@dataclass(kw_only=True)
class _Cluster:
    """Numbers of nodes that are up, and of booting nodes with the minute from which they are up."""

    boot_minutes: int
    up: int
    booting: deque[tuple[int, int]] = field(default_factory=deque)
    wakeups: int = 0

    @property
    def powered(self) -> int:
        return self.up + sum(count for _, count in self.booting)

    def pass_minute(self, minute: int, n_nodes: int) -> None:
        while self.booting and self.booting[0][0] <= minute:
            self.up += self.booting.popleft()[1]
        self.up = min(self.up, n_nodes)

    def power(self, wanted: int, minute: int) -> None:
        spare = self.powered - wanted
        if spare < 0:
            self.booting.append((minute + self.boot_minutes, -spare))
            self.wakeups -= spare
        else:
            # Nodes that boot are not powered down before they are up.
            self.up -= min(spare, self.up)


def _use(
    series: NodeSeries,
    powered: Sequence[int],
    served: int,
    short: Sequence[int] = (),
    wakeups: int = 0,
) -> NodeUse:
    delayed = sum(series.arrivals[minute] for minute in short)
    return NodeUse(
        utilisation=served / max(1, sum(powered)),
        delayed_fraction=delayed / max(1, sum(series.arrivals)),
        delayed=delayed,
        wakeups=wakeups,
        powered=tuple(powered),
    )
