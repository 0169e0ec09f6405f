"""What no controller of nodes can beat that delays nobody: one that knows the future."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise

from optuna_hermes.policies._energy_rules import Rules
from optuna_hermes.simulator._nodes import BOOT_MINUTES, TICK_MINUTES, NodeSeries

Interval = tuple[int, int]
"""A first minute, and the first one after it that does not belong to it."""


def clairvoyant_nodes(
    series: NodeSeries,
    rules: Rules | None = None,
    *,
    boot_minutes: int = BOOT_MINUTES,
    with_buffer: bool = False,
) -> float:
    """The highest utilisation at which no job is delayed.

    Nodes are alike, so the one that is wanted last can be the one that is powered down first: the
    nodes are told apart by how high demand must be for each to be wanted, and each is powered at
    the least cost by itself. Boot time and the least stay after a wake-up are those of
    ``replay_nodes``. A controller that delays a few jobs may come out above it.

    Args:
        series: what was wanted.
        rules: of the controller.
        boot_minutes: from a node's wake-up to its first job.
        with_buffer: the buffer of ``rules`` has to be kept too, as if it were demand.
    """
    rules = rules or Rules()
    keep = max(0, rules.keep_ticks * TICK_MINUTES - boot_minutes)
    demand = series.demand
    if with_buffer:
        pairs = zip(demand, series.total, strict=True)
        demand = [min(total, wanted + rules.buffer(total)) for wanted, total in pairs]
    levels = _levels(demand)
    powered = sum(_least_minutes(each, len(demand), boot_minutes, keep) for each in levels)
    return sum(series.active) / max(1, powered)


def _levels(demand: Sequence[int]) -> Iterator[list[Interval]]:
    """For each node, the intervals in which demand is high enough that it is wanted."""
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

    ``outside[i]`` is the least that it takes, between the intervals up to the i-th, if the node is
    woken for that one. It was woken last for some j before, stayed powered from there to the end
    of interval i - 1, and for ``keep`` minutes at least. At first every node is up, and need not
    stay.
    """
    if wanted[0][0] > 0:
        wanted = [(0, 0), *wanted]
    may_leave = [-keep if begin == 0 else begin + keep for begin, _ in wanted]
    gaps = [0, *accumulate(after[0] - before[1] for before, after in pairwise(wanted))]
    outside: list[float] = [0.0]
    free, oldest = math.inf, 0  # the best of those that may leave at once, and who comes after
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
