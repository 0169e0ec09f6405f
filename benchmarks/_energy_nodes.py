"""Replay of powering nodes up and down by a recorded demand, minute by minute."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise

from _energy_trees import expected_peak

from optuna_hermes.cluster.energy import TICK_SECONDS, EnergyRules, appended
from optuna_hermes.errors import InvalidInputError

# Time from a node's wake-up to its first job.
BOOT_MINUTES = 5

TICK_MINUTES = int(TICK_SECONDS // 60)

Forecast = Callable[[Sequence[int]], float]


@dataclass(frozen=True, kw_only=True)
class NodeSeries:
    """A cluster's recorded demand for nodes, one entry a minute."""

    active: Sequence[int]  # nodes with running jobs
    demand: Sequence[int]  # wanted nodes: the active ones, and those for waiting jobs
    total: Sequence[int]
    arrivals: Sequence[int]  # submitted jobs

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
    """Result of a replay of nodes."""

    # The active share of the powered nodes, booting ones included, in node minutes.
    utilisation: float
    delayed_fraction: float  # share of jobs submitted while fewer nodes were up than wanted
    delayed: int  # number of these jobs, an upper bound of those that waited for a node
    wakeups: int  # number of nodes that were woken
    powered: tuple[int, ...] = field(repr=False)  # nodes with power, by minute


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
    """Power nodes by ``rules``; a decision uses only the past up to its minute."""
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
        # Demand stays as recorded: a job that would wait is counted, but does not end later.
        if cluster.up < demand:
            short.append(minute)
        ends_tick = (minute + 1) % TICK_MINUTES == 0
        if ends_tick:
            peaks = appended(peaks, max(series.demand[minute + 1 - TICK_MINUTES : minute + 1]))
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


# A half-open interval of minutes: its first minute, and the first one after it.
Interval = tuple[int, int]


def clairvoyant_nodes(
    series: NodeSeries,
    rules: EnergyRules | None = None,
    *,
    boot_minutes: int = BOOT_MINUTES,
    with_buffer: bool = False,
) -> float:
    """The highest utilisation at which no job is delayed; with a few delays it may be higher.

    Boot time and the least stay after a wake-up are those of ``replay_nodes``.
    """
    rules = rules or EnergyRules()
    keep = max(0, rules.keep_ticks * TICK_MINUTES - boot_minutes)
    demand = series.demand
    if with_buffer:
        pairs = zip(demand, series.total, strict=True)
        demand = [min(total, wanted + rules.buffer(total)) for wanted, total in pairs]
    # Nodes are alike: node k can be the one that is wanted whenever demand is at least k, and each
    # is powered at the least cost by itself.
    levels = _levels(demand)
    powered = sum(_least_minutes(each, len(demand), boot_minutes, keep) for each in levels)
    return sum(series.active) / max(1, powered)


def _levels(demand: Sequence[int]) -> Iterator[list[Interval]]:
    """The intervals in which demand reaches each node's level."""
    steps = [(level, len(list(same))) for level, same in groupby(demand)]
    wanted: list[list[Interval]] = [[] for _ in range(max(demand))]
    begun: list[int] = []
    minute = 0
    for level, length in [*steps, (0, 0)]:
        while len(begun) > level:
            wanted[len(begun) - 1].append((begun.pop(), minute))
        begun += [minute] * (level - len(begun))
        minute += length
    return iter(wanted)


def _least_minutes(wanted: Sequence[Interval], end: int, boot: int, keep: int) -> int:
    """The fewest minutes of power for a node that is up in all of these intervals."""
    # At first every node is up, and may be powered down at once.
    if wanted[0][0] > 0:
        wanted = [(0, 0), *wanted]
    may_leave = [-keep if begin == 0 else begin + keep for begin, _ in wanted]
    gaps = [0, *accumulate(after[0] - before[1] for before, after in pairwise(wanted))]
    # Dynamic programming: the least power used between the intervals up to the i-th, if the node is
    # woken for that one. Its wake-up before was for some j, from which it stayed powered to the end
    # of interval i - 1, and for ``keep`` minutes at least.
    outside: list[float] = [0.0]
    free, oldest = math.inf, 0  # the best way with power down at once, and the first j without
    for i, (begin, _) in enumerate(wanted[1:], start=1):
        left = wanted[i - 1][1]
        while oldest < i and may_leave[oldest] <= left:
            free = min(free, outside[oldest] - gaps[oldest])
            oldest += 1
        ways = [free] if left + boot <= begin else []
        for j in range(oldest, i):
            if may_leave[j] + boot <= begin:
                ways.append(outside[j] - gaps[j] + may_leave[j] - left)
        outside.append(min(ways, default=math.inf) + gaps[i - 1] + boot)
    last = wanted[-1][1]
    ends = (
        each + gaps[-1] - gap + max(0, min(end, leaves) - last)
        for each, gap, leaves in zip(outside, gaps, may_leave, strict=True)
    )
    return sum(after - before for before, after in wanted) + int(min(ends))
