"""Curve sets under policies, each until the best trial has finished: then the measures are known.

Settings, results and processes are those of ``optuna-hermes simulate``; only the end differs, so
that ``switches`` counts those until then.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, product

from _policies_cases import as_in, as_reported

from optuna_hermes.policies import make_policy
from optuna_hermes.replay import Result, SimulationRules
from optuna_hermes.replay._processes import parallel_map
from optuna_hermes.simulator import (
    RIVALS,
    CurveSet,
    FixedList,
    Recording,
    Trace,
    TrialSimulator,
    arrange,
    make_rival,
    measure,
)
from optuna_hermes.simulator._metrics import by_final

STEPS = 200
"""Looks at the trace, over the time of the whole work."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Rules, number of seeds and case of one table."""

    rules: SimulationRules
    n_seeds: int
    case: str = ""


def simulate_to_best(
    sets: Sequence[CurveSet],
    policies: Sequence[str],
    settings: Sequence[Setting],
    *,
    processes: int | None = None,
    on_job: Callable[[int, int], None] = lambda done, total: None,
) -> list[list[Result]]:
    """The results of each setting, as ``replay.simulate_one`` would give them.

    A job is a set, a seed and a policy under all settings: policies that remember what they
    computed about a curve need it only once.
    """
    n_seeds = max(setting.n_seeds for setting in settings)
    jobs = list(product(range(len(sets)), range(n_seeds), policies))
    done = count(1)
    answers = parallel_map(
        partial(_job, sets, settings),
        jobs,
        processes=processes,
        on_answer=lambda: on_job(next(done), len(jobs)),
    )
    by_setting: list[list[Result]] = [[] for _ in settings]
    for answer in answers:
        for index, result in answer:
            by_setting[index].append(result)
    return by_setting


def _job(
    sets: Sequence[CurveSet], settings: Sequence[Setting], job: tuple[int, int, str]
) -> list[tuple[int, Result]]:
    index, seed, name = job
    return [
        (number, _result(sets[index], setting, name, seed))
        for number, setting in enumerate(settings)
        if seed < setting.n_seeds
    ]


def _result(curves: CurveSet, setting: Setting, name: str, seed: int) -> Result:
    rules = setting.rules
    recordings = arrange(name, as_in(setting.case, curves.draw(rules.n_trials, seed), seed))
    cluster = TrialSimulator(
        make_rival(name, recordings) if name in RIVALS else make_policy(name),
        FixedList(as_reported(setting.case, recordings, seed)),
        n_devices=rules.n_devices,
        costs=rules.costs,
        seed=seed,
    )
    work = math.fsum(sum(each.seconds) for each in recordings) / rules.n_devices
    # Nothing in a simulation waits for the collector, and its searches take a fifth of the time.
    gc.disable()
    try:
        trace = _to_best(cluster, by_final(recordings)[0], work)
    finally:
        gc.enable()
    return Result(
        curve_set=curves.name,
        family=curves.family,
        policy=name,
        seed=seed,
        metrics=measure(
            _true(trace, recordings) if setting.case else trace,
            recordings,
            rules.n_devices,
            rules.costs,
        ),
    )


def _to_best(cluster: TrialSimulator, best: int, work: float) -> Trace:
    """The trace until a trial has finished; to the end of all if it was pruned."""
    for step in range(1, STEPS + 1):
        trace = cluster.run(until=step * work / STEPS)
        if best in trace.finished:
            return trace
        if best in trace.pruned:
            break
    return cluster.run()


def _true(trace: Trace, recordings: Sequence[Recording]) -> Trace:
    """A trace with the values of trainings instead of what was reported of them."""
    slices = [
        each._replace(value=recordings[each.number].values[each.unit - 1]) for each in trace.slices
    ]
    return replace(trace, slices=tuple(slices))
