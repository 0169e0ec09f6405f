"""Summary of simulations: a row for each policy, pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from optuna_hermes.replay._simulate import REFERENCES, Result
from optuna_hermes.simulator import Metrics

# The metrics that are compared as ratios.
TIMES = ("best_seconds", "top3_seconds", "near_seconds", "auc")
MEASURES = (*TIMES, "work_seconds")


def tabulate(results: Sequence[Result[Metrics]]) -> list[dict[str, Any]]:
    """A row for each policy, in the order of ``best_seconds``; all need the same sets and seeds.

    By name: each of ``MEASURES``, as ``means_of``; the mean number of ``switches`` of a simulation,
    and the share of simulations that have ``killed_best``; ``ratios`` by reference that was
    simulated and each of ``TIMES``, its time over the policy's; the same of ``best_seconds`` to
    ``fifo`` by family.
    """
    by_policy: dict[str, list[Result[Metrics]]] = {}
    for result in results:
        by_policy.setdefault(result.policy, []).append(result)
    means = {name: means_of(found, MEASURES) for name, found in by_policy.items()}
    families = {name: _by_family(found) for name, found in by_policy.items()}
    fifo = [families["fifo"]] if "fifo" in families else []
    rows = [
        {
            "policy": name,
            **means[name],
            "switches": _mean(each.metrics.switches for each in found),
            "killed_best": _mean(each.metrics.killed_best for each in found),
            "ratios": {
                reference: ratios(means[name], [means[reference]], TIMES)
                for reference in REFERENCES
                if reference in means
            },
            "families": ratios(families[name], fifo, families[name]),
        }
        for name, found in by_policy.items()
    ]
    return sorted(rows, key=lambda row: row["best_seconds"])


def means_of(results: Sequence[Result[Any]], names: Iterable[str]) -> dict[str, float]:
    """By name of a metric, the geometric mean over sets of the mean over seeds."""
    by_set: dict[str, list[Result[Any]]] = {}
    for result in results:
        by_set.setdefault(result.curve_set, []).append(result)
    return {
        name: geometric_mean(
            [_mean(getattr(each.metrics, name) for each in found) for found in by_set.values()]
        )
        for name in names
    }


def _by_family(results: Sequence[Result[Metrics]]) -> dict[str, float]:
    families = dict.fromkeys(result.family for result in results)
    best = TIMES[0]
    return {
        family: means_of([each for each in results if each.family == family], [best])[best]
        for family in families
    }


def ratios(
    own: Mapping[str, Any], rivals: Sequence[Mapping[str, Any]], names: Iterable[str]
) -> dict[str, float]:
    """By name, the least time of rivals over one's own, NaN where that is 0; empty without rivals.

    So it is how many times as fast one is as the rival that is best in it.
    """
    return {
        name: min(rival[name] for rival in rivals) / own[name] if own[name] else math.nan
        for name in names
        if rivals and all(name in rival for rival in rivals)
    }


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return math.fsum(found) / len(found)


def geometric_mean(values: Sequence[float]) -> float:
    # An AUC can be 0, which has no logarithm.
    if not all(value > 0 for value in values):
        return 0.0
    return math.exp(_mean(map(math.log, values)))
