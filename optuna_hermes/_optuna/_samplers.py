"""Samplers: their seeds, whether they learn, and what they are shown."""

from __future__ import annotations

import copy
import math
from collections.abc import Container
from typing import Any

import numpy as np
import optuna
from optuna.samplers._lazy_random_state import LazyRandomState
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState


def reseed(sampler: optuna.samplers.BaseSampler, seed: int, number: int) -> None:
    """Give every random state inside ``sampler`` a seed made of ``seed`` and a trial's number."""
    states = _random_states(sampler, set())
    words = np.random.SeedSequence([seed, number]).generate_state(max(1, len(states)))
    for state, word in zip(states, words, strict=False):
        state.rng.seed(int(word))


def _random_states(owner: Any, seen: set[int]) -> list[LazyRandomState]:
    if id(owner) in seen:
        return []
    seen.add(id(owner))
    found: list[LazyRandomState] = []
    for value in vars(owner).values():
        if isinstance(value, LazyRandomState):
            found.append(value)
        elif isinstance(value, optuna.samplers.BaseSampler):
            found.extend(_random_states(value, seen))
    return found


_BLIND_SAMPLERS = (
    optuna.samplers.BruteForceSampler,
    optuna.samplers.GridSampler,
    optuna.samplers.QMCSampler,
    optuna.samplers.RandomSampler,
)


def fixed_list(study: optuna.Study, unstarted: int | None) -> bool:
    """Whether the next ``unstarted`` trials do not depend on what is reported until then.

    That is so if all of them are enqueued, or if the sampler does not learn. Without a bound there
    is no list.
    """
    if unstarted is None:
        return False
    waiting = study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
    # A subclass may learn.
    return len(waiting) >= unstarted or type(_proposer(study.sampler)) in _BLIND_SAMPLERS


def _proposer(sampler: optuna.samplers.BaseSampler) -> optuna.samplers.BaseSampler:
    """The sampler at the bottom of those that wrap others."""
    base = getattr(sampler, "base", None) or getattr(sampler, "_base_sampler", None)
    return _proposer(base) if isinstance(base, optuna.samplers.BaseSampler) else sampler


class StudyView(optuna.Study):
    """A study in which every unfinished trial that has reported is COMPLETE at its last value.

    TPE counts RUNNING trials as bad ones. Here most trials are unfinished for most of the time,
    the good ones among them, and their last values are what is known.
    """

    def __init__(self, study: optuna.Study) -> None:
        self.__dict__ = study.__dict__

    def _get_trials(
        self,
        deepcopy: bool = True,
        states: Container[TrialState] | None = None,
        use_cache: bool = False,
    ) -> list[FrozenTrial]:
        trials = super()._get_trials(deepcopy=False, states=None, use_cache=use_cache)
        shown = [as_seen(trial, self.directions) for trial in trials]
        if states is not None:
            shown = [trial for trial in shown if trial.state in states]
        return copy.deepcopy(shown) if deepcopy else shown


def as_seen(trial: FrozenTrial, directions: list[StudyDirection]) -> FrozenTrial:
    """A trial as a sampler should see it; see ``StudyView``."""
    reported = trial.intermediate_values
    if trial.state != TrialState.RUNNING or not reported or len(directions) != 1:
        return trial
    value = reported[max(reported)]
    if math.isnan(value):
        value = -math.inf if directions[0] == StudyDirection.MAXIMIZE else math.inf
    seen = copy.copy(trial)
    seen.state = TrialState.COMPLETE
    seen.values = [value]
    seen.datetime_complete = trial.datetime_start
    return seen
