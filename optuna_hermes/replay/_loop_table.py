"""Simulations of many studies with a sampler, and a table of their means."""

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
    """The result of one simulated study.

    Args:
        curve_set: name of its pool.
        policy: name of its policy.
        seed: seed of its sampler.
        metrics: its metrics.
    """

    curve_set: str
    policy: str
    seed: int
    metrics: LoopMetrics


@dataclass(frozen=True, kw_only=True)
class LoopRow:
    """A policy's means over all sets and seeds.

    Args:
        policy: its name.
        means: for each of ``MEASURES``, the geometric mean over sets of the mean over seeds.
        over_fifo: speed-up over ``fifo`` for each measure but ``trials_opened``; empty where
            ``fifo`` was not simulated.
        over_pruners: likewise over the pruner that is best in that measure.
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
    """Simulate every policy and seed on every set, one after another, set by set.

    Args:
        curve_sets: pools, each with a name of its own.
        policies: names, see ``run_loop``.
        setup: the settings.
        seeds: seeds of the samplers.
    """
    for curve_set in curve_sets:
        for policy in policies:
            for seed in seeds:
                metrics = run_loop(curve_set, policy, setup, seed=seed)
                yield LoopRun(curve_set=curve_set.name, policy=policy, seed=seed, metrics=metrics)


def loop_table(trials: Sequence[LoopRun]) -> tuple[LoopRow, ...]:
    """Summarise results, a row for each policy, in the order of their first results.

    Args:
        trials: results on the same sets and seeds for each policy.
    """
    policies = list(dict.fromkeys(trial.policy for trial in trials))
    means = {
        policy: _means([trial for trial in trials if trial.policy == policy]) for policy in policies
    }
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


def _means(trials: Sequence[LoopRun]) -> dict[str, float]:
    names = sorted({trial.curve_set for trial in trials})
    logs = {measure: 0.0 for measure in MEASURES}
    for name in names:
        of_set = [trial.metrics for trial in trials if trial.curve_set == name]
        for measure in MEASURES:
            mean = sum(getattr(each, measure) for each in of_set) / len(of_set)
            logs[measure] += math.log(mean) / len(names)
    return {measure: math.exp(log) for measure, log in logs.items()}


def _ratios(means: dict[str, float], rivals: Sequence[dict[str, float]]) -> dict[str, float]:
    """Speed-ups over the best of the rivals, by measure."""
    if not rivals:
        return {}
    return {
        measure: min(rival[measure] for rival in rivals) / means[measure]
        for measure in MEASURES
        if measure != "trials_opened"
    }
