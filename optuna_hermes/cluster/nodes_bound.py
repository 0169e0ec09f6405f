"""Bound for controllers of nodes that delay no job: one that knows the future."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise

from optuna_hermes.cluster.energy_rules import EnergyRules
from optuna_hermes.cluster.nodes import BOOT_MINUTES, TICK_MINUTES, NodeSeries

Interval = tuple[int, int]
"""A half-open interval of minutes: its first minute, and the first one after it."""


def clairvoyant_nodes(
    series: NodeSeries,
    rules: EnergyRules | None = None,
    *,
    boot_minutes: int = BOOT_MINUTES,
    with_buffer: bool = False,
) -> float:
    """The highest utilisation at which no job is delayed.

    Nodes are alike, so node k can be the one that is wanted whenever demand is at least k, and
    each node is powered at the least cost by itself. Boot time and the least stay after a wake-up
    are those of ``replay_nodes``. A controller that delays a few jobs may exceed the bound.

    Args:
        series: the recorded demand.
        rules: rules of the controller.
        boot_minutes: time from a node's wake-up to its first job.
        with_buffer: whether the buffer of ``rules`` counts as demand.
    """
    rules = rules or EnergyRules()
    keep = max(0, rules.keep_ticks * TICK_MINUTES - boot_minutes)
    demand = series.demand
    if with_buffer:
        pairs = zip(demand, series.total, strict=True)
        demand = [min(total, wanted + rules.buffer(total)) for wanted, total in pairs]
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
    """The fewest minutes of power for a node that is up in all of these intervals.

    Dynamic programming: ``outside[i]`` is the least power used between the intervals up to the
    i-th, if the node is woken for that one. Its wake-up before was for some j, from which it
    stayed powered to the end of interval i - 1, and for ``keep`` minutes at least. At first every
    node is up, and may be powered down at once.
    """
    if wanted[0][0] > 0:
        wanted = [(0, 0), *wanted]
    may_leave = [-keep if begin == 0 else begin + keep for begin, _ in wanted]
    gaps = [0, *accumulate(after[0] - before[1] for before, after in pairwise(wanted))]
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
