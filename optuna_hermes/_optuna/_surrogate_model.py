"""Model of a study's trials, by a surrogate: what ``SurrogateSampler`` proposes by."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from optuna._transform import _SearchSpaceTransform
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from optuna_hermes.surrogate import Cube, Observations, Process, observe, propose

MOST_MODELLED = 130
"""Trials that the process is made of."""
MOST_BEGUN = 100
"""Trials without a value that count as if they had what is expected of them: the newest."""
APART = 0.01
"""Difference, as a share of its range, that some parameter has from that of each begun trial."""


def proposals(
    search_space: dict[str, BaseDistribution],
    tried: Sequence[FrozenTrial],
    begun: Sequence[FrozenTrial],
    sign: float,
    rng: np.random.Generator,
    *,
    anywhere: bool = False,
) -> Iterator[dict[str, Any]]:
    """Propose parameters of a space, those first that may end best.

    Args:
        search_space: what is proposed, at least one parameter.
        tried: trials that have a value, or have failed, in the order of their numbers.
        begun: trials that have no value yet.
        sign: -1 where values are maximised, else 1.
        rng: source of all random numbers.
        anywhere: True to look all over the space, not near the best trials.
    """
    space = _Space(search_space)
    process, points, end = _model(space, tried, begun[-MOST_BEGUN:], sign)
    taken = np.array([space.point(each) for each in begun]).reshape(len(begun), points.shape[1])
    for point in propose(process, points, end, space.cube, rng, anywhere=anywhere):
        # Where the process is sure of the minimum, what is expected of begun trials moves nothing.
        if not (np.abs(taken - point).max(axis=1) < APART).any():
            yield space.params(point)


class _Space:
    """Search space as a cube."""

    def __init__(self, space: dict[str, BaseDistribution]) -> None:
        self._space = space
        self._transform = _SearchSpaceTransform(space, transform_0_1=True)
        columns = self._transform.column_to_encoded_columns
        choices = [
            columns[index]
            for index, each in enumerate(space.values())
            if isinstance(each, CategoricalDistribution)
        ]
        self.cube = Cube(choices, len(self._transform.bounds))

    def point(self, trial: FrozenTrial) -> Any:
        """Return the point of a trial [d]."""
        return self._transform.transform(_own(trial, self._space))

    def params(self, point: Any) -> dict[str, Any]:
        """Return the parameters of a point."""
        return self._transform.untransform(point)


def _model(
    space: _Space, known: Sequence[FrozenTrial], begun: Sequence[FrozenTrial], sign: float
) -> tuple[Process, Any, float]:
    """Fit a process to trials, and take from it what those that have no value may have.

    Returns:
        The process, the points of the trials that it was fitted to, and the age that counts.
    """
    observed = _observations(known, sign)
    chosen = _modelled(observed)
    observed = observed.of(chosen)
    points = np.array([space.point(known[index]) for index in chosen])
    process = Process(points[observed.trials], observed)
    if begun:
        # As if they had what is expected of them: so the next one is proposed elsewhere.
        more = np.array([space.point(each) for each in begun])
        expected = process.predict(more, observed.end)[0]
        both = np.vstack([points, more])
        all_ = observed.and_at_end(expected)
        process = Process(both[all_.trials], all_, process.settings)
    return process, points, observed.end


def _modelled(observed: Observations) -> list[int]:
    """The trials that a process is made of: the best half of so many, old ones, and the newest."""
    ages, values = observed.last()
    if len(ages) <= MOST_MODELLED:
        return list(range(len(ages)))
    best = np.argsort(values, kind="stable")[: MOST_MODELLED // 2]
    oldest = np.lexsort((values, -ages))[: MOST_MODELLED // 4]
    newest = np.arange(len(ages))[::-1]
    return sorted(list(dict.fromkeys([*best, *oldest, *newest]))[:MOST_MODELLED])


def _observations(trials: Sequence[FrozenTrial], sign: float) -> Observations:
    curves: list[list[float]] = []
    finals: list[float | None] = []
    for each in trials:
        if each.state == TrialState.FAIL:
            curves.append([math.inf])
            finals.append(None)
            continue
        reports = each.intermediate_values
        curves.append([sign * reports[step] for step in sorted(reports)])
        # Trials that have not ended are shown as COMPLETE at their last value.
        finals.append(sign * each.values[0] if each.values else None)
    return observe(curves, finals)


def _own(trial: FrozenTrial, space: dict[str, BaseDistribution]) -> dict[str, Any]:
    return {name: trial.params[name] for name in space}
