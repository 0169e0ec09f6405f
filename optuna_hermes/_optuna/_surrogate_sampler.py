"""Sampler that proposes by a surrogate: a Gaussian process on trials of any age."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.samplers._lazy_random_state import LazyRandomState
from optuna.trial import FrozenTrial, TrialState

from optuna_hermes._optuna._samplers import constraint_names, proposer
from optuna_hermes._optuna._studies import sign

N_STARTUP = 10
"""Trials with a value before the surrogate proposes; as many as TPE draws at random."""
EXPLORING = 4
"""One of so many proposals is looked for all over the space.

The others gather where the best trials are: what is better elsewhere, but begins slowly, is never
seen to be so, since nothing there grows old.
"""
OTHERS = 3
"""One of so many proposals is TPE's, which errs in other ways.

Where the process is sure of something that is not so, its own proposals hardly ever show it.
"""
MOST_KNOWN = 1000
"""Trials with a value that are looked at; of failed ones a quarter of that."""
MOST_CHOICES = 50
"""Values of a choice that the process models: each has a column of its own."""


def load_sampler(study: optuna.Study) -> None:
    """Import what the study's sampler, if it is ours, imports with its first proposal."""
    if isinstance(proposer(study.sampler), SurrogateSampler):
        importlib.import_module("optuna_hermes._optuna._surrogate_model")


class SurrogateSampler(BaseSampler):
    """Sampler that proposes the point where a trial may end best.

    A Gaussian process over parameters and age is fitted to the values of trials at several ages,
    and the point is proposed whose value at the largest age may be the lowest: a standard deviation
    below what is expected. So parameters that look good only in young trials are not taken for good
    ones once some trials have grown old. Failed trials count as bad ones. It proposes the
    parameters that all trials have; others, such as conditional ones, and choices of many values,
    are TPE's, and so are all parameters of every third trial, and of studies with several
    objectives or with constraints. The first trials are drawn at random.

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
        # Trials as they were when this one was opened, a moment ago: as Optuna's own samplers.
        return _in_common(study._get_trials(deepcopy=False, use_cache=True))

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Propose the parameters of this space; none of them while few trials have a value."""
        placed = [
            each
            for each in study._get_trials(deepcopy=False, use_cache=True)
            if each.number != trial.number and search_space.keys() <= each.params.keys()
        ]
        known = [each for each in placed if _has_value(each)]
        if not search_space or len(known) < N_STARTUP:
            return {}
        if any(map(constraint_names, known)):
            return self._others.sample_relative(study, trial, search_space)
        begun = [each for each in placed if each.state == TrialState.RUNNING]
        rng = np.random.default_rng(self._rng.rng.randint(2**31, size=4))
        # With failed ones: else what fails for its parameters, as for want of memory, would be
        # proposed for ever.
        tried = sorted([*_of_many(known, sign(study)), *_failed(placed)], key=attrgetter("number"))
        taken = [each.params for each in [*tried, *begun]]
        from optuna_hermes._optuna._surrogate_model import proposals  # SciPy is long to import

        anywhere = trial.number % EXPLORING == 0
        own = proposals(search_space, tried, begun, sign(study), rng, anywhere=anywhere)
        for params in chain(self._of_others(study, trial, search_space), own):
            # Whatever conditional parameters a trial had: where there are some, to propose such a
            # point again was no better than to leave all to TPE.
            if not any(params.items() <= each.items() for each in taken):
                return params
        return {}  # a space of few points, all of which are taken

    def _of_others(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> Iterator[dict[str, Any]]:
        if trial.number % OTHERS == 1:
            yield self._others.sample_relative(study, trial, search_space)

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        return self._others.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        self._others.before_trial(study, trial)

    def after_trial(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None,
    ) -> None:
        self._others.after_trial(study, trial, state, values)


def _in_common(trials: Sequence[FrozenTrial]) -> dict[str, BaseDistribution]:
    """The parameters that all complete trials have, in one range of several values, by name.

    They are Optuna's ``intersection_search_space``, which remembers one study's to be as fast. Here
    the next proposal may be made by another process, or for another study.
    """
    spaces = [each.distributions for each in trials if each.state == TrialState.COMPLETE]
    return {
        name: each
        for name, each in sorted(spaces[-1].items() if spaces else ())
        if not (each.single() or _has_many_values(each))
        and all(_is_equal(each, space.get(name)) for space in spaces)
    }


def _has_many_values(parameter: BaseDistribution) -> bool:
    choices = parameter.choices if isinstance(parameter, CategoricalDistribution) else ()
    return len(choices) > MOST_CHOICES


def _is_equal(one: BaseDistribution, other: BaseDistribution | None) -> bool:
    # First without Optuna's own comparison, which takes long, but knows a choice of NaN again.
    return type(one) is type(other) and (vars(one) == vars(other) or one == other)


def _of_many(trials: Sequence[FrozenTrial], sign: float) -> list[FrozenTrial]:
    """Of many trials the best, the oldest and the newest."""
    if len(trials) <= MOST_KNOWN:
        return list(trials)
    best = sorted(trials, key=lambda each: _last(each, sign))[: MOST_KNOWN // 4]
    oldest = sorted(trials, key=lambda each: -len(each.intermediate_values))[: MOST_KNOWN // 4]
    newest = trials[-(MOST_KNOWN // 2) :]
    return list({each.number: each for each in (*best, *oldest, *newest)}.values())


def _last(trial: FrozenTrial, sign: float) -> float:
    """The value of a trial, lower is better; infinite if it is NaN."""
    reports = trial.intermediate_values
    value = sign * (trial.values[0] if trial.values else reports[max(reports)])
    return math.inf if math.isnan(value) else value


def _failed(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """The newest failed trials, but for those that were begun again: that was not their values."""
    again = {number for each in trials for number in each.system_attrs.get("retry_history", ())}
    failed = [each for each in trials if each.state == TrialState.FAIL and each.number not in again]
    return failed[-(MOST_KNOWN // 4) :]


def _has_value(trial: FrozenTrial) -> bool:
    if trial.state == TrialState.PRUNED:
        return bool(trial.intermediate_values)
    return trial.state == TrialState.COMPLETE
