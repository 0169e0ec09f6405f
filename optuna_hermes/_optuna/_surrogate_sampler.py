"""Sampler that proposes by a surrogate: a Gaussian process on trials of any age."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import optuna
from optuna._transform import _SearchSpaceTransform
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.samplers._lazy_random_state import LazyRandomState
from optuna.search_space import IntersectionSearchSpace
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from optuna_hermes._optuna._samplers import constraint_names
from optuna_hermes.surrogate import Cube, Observations, Process, observe, propose

N_STARTUP = 10
"""Trials with a value before the surrogate proposes; as many as TPE draws at random."""
MOST_KNOWN = 1000
"""Trials that are looked at: the newest."""
MOST_MODELLED = 130
"""Trials that the process is made of."""


class SurrogateSampler(BaseSampler):
    """Sampler that proposes the point where a trial is expected to end best.

    A Gaussian process over parameters and age is fitted to the values of trials at several ages,
    and the point is proposed whose expected improvement at the largest age is the largest. So
    parameters that look good only in young trials are not taken for good ones once some trials
    have grown old. Failed trials count as bad ones. It proposes the parameters that all trials
    have; others, such as conditional ones, are TPE's, and so are all parameters of studies with
    several objectives or with constraints. The first trials are drawn at random.

    Args:
        seed: of its random numbers.

    Example:
        >>> import optuna
        >>> from optuna_hermes import HermesSampler
        >>> study = optuna.create_study(sampler=HermesSampler(seed=0))
        >>> study.optimize(lambda trial: trial.suggest_float("x", -1, 1) ** 2, n_trials=15)
        >>> abs(study.best_params["x"]) < 0.5
        True
    """

    def __init__(self, seed: int | None = None) -> None:
        self._rng = LazyRandomState(seed)
        self._others = TPESampler(seed=seed)
        self._space = IntersectionSearchSpace()

    def reseed_rng(self) -> None:
        """Draw other random numbers than a copy of this sampler."""
        self._rng.rng.seed()
        self._others.reseed_rng()

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return the parameters that all trials with a value have in common."""
        if len(study.directions) > 1:
            return {}
        space = self._space.calculate(study)
        return {name: each for name, each in space.items() if not each.single()}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Propose the parameters of this space; none of them while few trials have a value."""
        placed = [
            each
            for each in study.get_trials(deepcopy=False)
            if each.number != trial.number and search_space.keys() <= each.params.keys()
        ]
        known = [each for each in placed if _has_value(each)]
        if not search_space or len(known) < N_STARTUP or any(map(constraint_names, known)):
            return {}
        begun = [each for each in placed if each.state == TrialState.RUNNING]
        space = _Space(search_space)
        rng = np.random.default_rng(self._rng.rng.randint(2**31, size=4))
        # Else what fails for its parameters, as for want of memory, would be proposed for ever.
        failed = [each for each in placed if each.state == TrialState.FAIL]
        tried = sorted([*known, *failed], key=attrgetter("number"))[-MOST_KNOWN:]
        process, points, end = _model(space, tried, begun, _sign(study))
        taken = [each.params for each in [*tried, *begun]]
        for point in propose(process, points, end, space.cube, rng):
            params = space.params(point)
            if not any(params.items() <= each.items() for each in taken):
                return params
        return {}  # a space of few points, all of which are taken

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Delegate to TPE."""
        return self._others.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Delegate to TPE."""
        self._others.before_trial(study, trial)

    def after_trial(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None,
    ) -> None:
        """Delegate to TPE."""
        self._others.after_trial(study, trial, state, values)


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


def _sign(study: optuna.Study) -> float:
    return -1.0 if study.direction == StudyDirection.MAXIMIZE else 1.0


def _own(trial: FrozenTrial, space: dict[str, BaseDistribution]) -> dict[str, Any]:
    return {name: trial.params[name] for name in space}


def _has_value(trial: FrozenTrial) -> bool:
    if trial.state == TrialState.PRUNED:
        return bool(trial.intermediate_values)
    return trial.state == TrialState.COMPLETE
