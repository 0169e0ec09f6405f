"""Many studies with a sampler, and what their means say."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from optuna_hermes.replay._loop import LoopMetrics, LoopSetup, run_loop
from optuna_hermes.replay._loop_pruners import PRUNERS
from optuna_hermes.simulator import CurveSet

MEASURES = ("any5", "any1", "fin5", "fin1", "trials_opened")


@dataclass(frozen=True, kw_only=True)
class LoopRun:
    """One study.

    Args:
        curve_set: name of its pool.
        policy: name of its policy.
        seed: of its sampler.
        metrics: what came out.
    """

    curve_set: str
    policy: str
    seed: int
    metrics: LoopMetrics


@dataclass(frozen=True, kw_only=True)
class LoopRow:
    """A policy over all sets and seeds.

    Args:
        policy: its name.
        means: of each of ``MEASURES``, the geometric mean over sets of the mean over seeds.
        over_fifo: how many times sooner than ``fifo`` for each measure but ``trials_opened``;
            empty where ``fifo`` was not run.
        over_pruners: likewise, than the pruner that is best in that measure.
    """

    policy: str
    means: dict[str, float]
    over_fifo: dict[str, float]
    over_pruners: dict[str, float]


def run_loops(
    curve_sets: Iterable[CurveSet],
    policies: Sequence[str],
    setup: LoopSetup,
    seeds: Sequence[int],
) -> Iterator[LoopRun]:
    """Run every policy and seed over every set, one after another, set by set.

    Args:
        curve_sets: pools, each with a name of its own.
        policies: names, see ``run_loop``.
        setup: the rules.
        seeds: of the samplers.
    """
    for curve_set in curve_sets:
        for policy in policies:
            for seed in seeds:
                metrics = run_loop(curve_set, policy, setup, seed=seed)
                yield LoopRun(curve_set=curve_set.name, policy=policy, seed=seed, metrics=metrics)


def loop_table(runs: Sequence[LoopRun]) -> tuple[LoopRow, ...]:
    """Sum up, a row for each policy, in the order of their first runs.

    Args:
        runs: of the same sets and seeds for each policy.
    """
    policies = list(dict.fromkeys(run.policy for run in runs))
    means = {policy: _means([run for run in runs if run.policy == policy]) for policy in policies}
    pruners = [means[policy] for policy in policies if policy in PRUNERS]
    fifo = [means["fifo"]] if "fifo" in means else []
    return tuple(
        LoopRow(
            policy=policy,
            means=means[policy],
            over_fifo=_ratios(means[policy], fifo),
            over_pruners=_ratios(means[policy], pruners),
        )
        for policy in policies
    )


def _means(runs: Sequence[LoopRun]) -> dict[str, float]:
    names = sorted({run.curve_set for run in runs})
    logs = {measure: 0.0 for measure in MEASURES}
    for name in names:
        of_set = [run.metrics for run in runs if run.curve_set == name]
        for measure in MEASURES:
            mean = sum(getattr(each, measure) for each in of_set) / len(of_set)
            logs[measure] += math.log(mean) / len(names)
    return {measure: math.exp(log) for measure, log in logs.items()}


def _ratios(means: dict[str, float], rivals: Sequence[dict[str, float]]) -> dict[str, float]:
    """How many times sooner than the best of the rivals, measure by measure."""
    if not rivals:
        return {}
    return {
        measure: min(rival[measure] for rival in rivals) / means[measure]
        for measure in MEASURES
        if measure != "trials_opened"
    }
