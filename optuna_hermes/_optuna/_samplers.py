"""Samplers: seeds, those that learn nothing, what wraps what, and their view of a study."""

from __future__ import annotations

import copy
import math
import random
import sys
import traceback
from collections.abc import Collection, Container, Iterator, Mapping, Sequence, Set
from typing import Any, cast

import numpy as np
import optuna
from optuna.distributions import FloatDistribution
from optuna.samplers._brute_force import _TreeNode
from optuna.samplers._lazy_random_state import LazyRandomState
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState


def reseed(sampler: optuna.samplers.BaseSampler, seed: int, number: int, n_given: int = 0) -> None:
    """Give every random state inside ``sampler`` a seed made of ``seed`` and a trial's number.

    A trial with ``n_given`` parameters of an earlier process draws none of them again: the next one
    must not be drawn from the numbers that the first one was drawn from.

    Each trial has a copy of the sampler: one whose random states are not found here draws by its
    own ``reseed_rng`` what no other copy does.
    """
    sampler.reseed_rng()
    states = [*_random_states(sampler, set())]
    words = np.random.SeedSequence([seed, number, n_given]).generate_state(len(states))
    for state, word in zip(states, words, strict=True):
        _set(state, int(word), number + n_given)


_MOST_HELD = 1000
"""Length of a list that is looked into: one of a grid's points costs each trial device time."""


def _random_states(owner: Any, seen: set[int]) -> Iterator[Any]:
    """The random states that a sampler holds, also in lists and in other samplers."""
    if id(owner) in seen:
        return
    seen.add(id(owner))
    if isinstance(owner, optuna.samplers.BaseSampler):
        held: Collection[Any] = vars(owner).values()
    else:
        held = owner.values() if isinstance(owner, dict) else owner
        if len(held) > _MOST_HELD:
            return
    for value in held:
        if isinstance(value, (optuna.samplers.BaseSampler, list, tuple, dict)):
            yield from _random_states(value, seen)
        elif isinstance(value, _STATES) or _is_of(value, *_TORCH) or _is_of(value, *_SCIPY):
            yield value


_STATES = (LazyRandomState, np.random.RandomState, np.random.Generator, random.Random)
_TORCH = "torch", "Generator"
_SCIPY = "scipy.stats.qmc", "QMCEngine"


def _is_of(value: Any, module: str, kind: str) -> bool:
    """True for an instance of a class, of a package that need not be there."""
    found = getattr(sys.modules.get(module), kind, None)
    return found is not None and isinstance(value, found)


def _set(state: Any, seed: int, place: int) -> None:
    """Seed a random state; a sequence that is no random one goes on from ``place``."""
    if isinstance(state, LazyRandomState):
        state.rng.seed(seed)
    elif isinstance(state, np.random.Generator):
        source = state.bit_generator
        source.state = type(source)(seed).state
    elif _is_of(state, *_TORCH):
        state.manual_seed(seed)
    elif _is_of(state, *_SCIPY):
        state.reset()
        if place:  # Sobol's goes back by one otherwise
            state.fast_forward(place)
    else:
        state.seed(seed)


_BLIND_SAMPLERS = (
    optuna.samplers.BruteForceSampler,
    optuna.samplers.GridSampler,
    optuna.samplers.QMCSampler,
    optuna.samplers.RandomSampler,
)


def fixed_list(study: optuna.Study, unstarted: int | None) -> bool:
    """True if the next ``unstarted`` trials do not depend on values reported until then.

    That is so if all of them are enqueued, or if the sampler does not learn; never if
    ``unstarted`` is None (no bound).
    """
    if unstarted is None:
        return False
    waiting = study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
    return len(waiting) >= unstarted or not learns(study.sampler)


def learns(sampler: optuna.samplers.BaseSampler) -> bool:
    """True if what a sampler proposes may depend on values that were reported."""
    # The exact type, since a subclass may learn.
    return type(proposer(sampler)) not in _BLIND_SAMPLERS


def left_to_propose(study: optuna.Study) -> int | None:
    """The number of points not yet proposed, of a grid or of an exhausted ``BruteForceSampler``.

    None for samplers without an end, and while a brute force has points left: which there are is
    known from trials that begin there.
    """
    sampler = proposer(study.sampler)
    if isinstance(sampler, optuna.samplers.BruteForceSampler):
        return 0 if _is_exhausted(study) else None
    if not isinstance(sampler, optuna.samplers.GridSampler):
        return None
    proposed = {
        trial.system_attrs["grid_id"]
        for trial in study.get_trials(deepcopy=False)
        if "grid_id" in trial.system_attrs
        and trial.state != TrialState.WAITING
        and sampler._same_search_space(trial.system_attrs["search_space"])
    }
    return len(sampler._all_grids) - len(proposed)


def tries_all(sampler: optuna.samplers.BaseSampler) -> bool:
    """True for a sampler that tries all points there are, and learns which from trials."""
    return isinstance(proposer(sampler), optuna.samplers.BruteForceSampler)


def _is_exhausted(study: optuna.Study) -> bool:
    """True if trials have begun at every point that a brute force knows.

    Optuna learns it when a trial ends, but here many may be suspended before the first one does.
    """
    trials = [
        as_seen(trial, study.directions)
        for trial in study.get_trials(deepcopy=False)
        # One that draws none, or fails before, is at no point.
        if trial.state != TrialState.WAITING and trial.params
    ]
    tree = _TreeNode()
    try:
        optuna.samplers.BruteForceSampler._populate_tree(tree, trials, {})
    except ValueError:  # points that some trials have are no points of others
        return False
    # Not without those that train: they may have drawn some of their parameters only.
    return tree.count_unexpanded(exclude_running=False) == 0


def proposer(sampler: optuna.samplers.BaseSampler) -> optuna.samplers.BaseSampler:
    """The sampler at the bottom of those that wrap others."""
    return [*nested(sampler)][-1]


def nested(sampler: optuna.samplers.BaseSampler) -> Iterator[optuna.samplers.BaseSampler]:
    """A sampler, then the one that it wraps, and so on."""
    yield sampler
    base = getattr(sampler, "base", None) or getattr(sampler, "_base_sampler", None)
    if isinstance(base, optuna.samplers.BaseSampler):
        yield from nested(base)


def raised_in(error: BaseException) -> optuna.samplers.BaseSampler | None:
    """The sampler that has raised an error of an objective; None if none has."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    owners = (frame.f_locals.get("self") for frame in reversed(frames))
    return next((each for each in owners if isinstance(each, optuna.samplers.BaseSampler)), None)


def keeps_nothing(part: object) -> bool:
    """True for samplers and pruners that keep nothing of a trial in themselves that matters later.

    So are those of Optuna and of this package: they read it from the study.
    """
    return type(part).__module__.split(".")[0] in ("optuna", "optuna_integration", "optuna_hermes")


def repeated(trials: Sequence[FrozenTrial]) -> bool:
    """True if trials have the same parameters, which chance would not give to a continuous one."""
    first, *others = trials
    continuous = any(
        isinstance(each, FloatDistribution) and each.step is None and not each.single()
        for each in first.distributions.values()
    )
    return continuous and all(other.params == first.params for other in others)


def is_proposed(trial: FrozenTrial) -> bool:
    """True for a trial whose parameters a sampler has drawn, all that it asks for by now."""
    begun = bool(trial.intermediate_values) or trial.state.is_finished()
    return begun and "fixed_params" not in trial.system_attrs


def nested_pruners(pruner: object) -> Iterator[optuna.pruners.BasePruner]:
    """A pruner, then the one that it wraps, and so on; none for None."""
    while isinstance(pruner, optuna.pruners.BasePruner):
        yield pruner
        pruner = getattr(pruner, "wrapped", None) or getattr(pruner, "_wrapped_pruner", None)


def read_anew(study: optuna.Study, trial_id: int) -> None:
    """Forget the trials that this thread has read, unless it was for the same trial.

    Optuna forgets them when a trial is asked for. Of a batch that is asked for first, and
    suggested later, each trial is to see what the others were given.
    """
    known: Any = study._thread_local
    if getattr(known, "read_for", None) != trial_id:
        known.cached_all_trials = known.shown_trials = None
        known.read_for = trial_id


class StudyView(optuna.Study):
    """A study in which every unfinished trial that has reported is COMPLETE at its last value.

    TPE counts RUNNING trials as bad ones. Here most trials are unfinished for most of the time,
    the good ones among them, and their last values are what is known.

    Args:
        study: the study, or the view of it that ``HyperbandPruner`` gives to a bracket's trials.
    """

    __slots__ = ("_shown",)  # outside __dict__, which is the study's own

    def __init__(self, study: optuna.Study) -> None:
        # A bracket's view refuses most attributes, its own __dict__ among them.
        self.__dict__ = object.__getattribute__(study, "__dict__")
        self._shown = study

    def __reduce__(self) -> tuple[Any, ...]:
        return StudyView, (self._shown,)  # a copy is a view of a copy

    def stop(self) -> None:
        """Stop the study, also where a bracket's view of it is shown."""
        self._shown.stop()

    def _get_best_trial(self, deepcopy: bool) -> FrozenTrial:
        """The best of the trials that are shown as COMPLETE: see ``Study.best_trial``."""
        shown = self._get_trials(deepcopy=False, states=(TrialState.COMPLETE,), use_cache=True)
        feasible = list(filter(is_feasible, shown))
        if self._is_multi_objective() or not feasible:
            return super()._get_best_trial(deepcopy)  # raises the error that says why
        sign = -1.0 if self.direction == StudyDirection.MAXIMIZE else 1.0
        best = min(feasible, key=lambda each: sign * cast("float", each.value))
        return copy.deepcopy(best) if deepcopy else best

    def get_trials(
        self, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """The trials of the study, or of the bracket, as ``as_seen`` shows them."""
        return _of(self._as_seen(self._shown.get_trials(deepcopy=False)), deepcopy, states)

    def _get_trials(
        self,
        deepcopy: bool = True,
        states: Container[TrialState] | None = None,
        use_cache: bool = False,
    ) -> list[FrozenTrial]:
        # Samplers that avoid what others try read all trials again for each proposal. Those were
        # known a moment ago, when this one was opened.
        use_cache = use_cache or (states is not None and TrialState.RUNNING in states)
        trials = self._shown._get_trials(deepcopy=False, states=None, use_cache=use_cache)
        # Optuna keeps the same list for all parameters of a proposal.
        known: Any = self._thread_local
        last = getattr(known, "shown_trials", None)
        if last is None or last[0] is not trials:
            last = known.shown_trials = trials, self._as_seen(trials)
        return _of(last[1], deepcopy, states)

    def _as_seen(self, trials: list[FrozenTrial]) -> list[FrozenTrial]:
        needed = known_constraints(trials)
        without_value = {TrialState.RUNNING}
        if isinstance(proposer(self.sampler), optuna.samplers.BaseGASampler):
            # Its parents are chosen once, and must have values for ever: one that was suspended
            # then, and has failed since, is a bad one.
            without_value |= {TrialState.FAIL, TrialState.PRUNED}
        return [
            as_seen(trial, self.directions)
            if trial.state in without_value and needed <= constraint_names(trial)
            else trial
            for trial in trials
        ]


def _of(
    trials: list[FrozenTrial], deepcopy: bool, states: Container[TrialState] | None
) -> list[FrozenTrial]:
    """The trials in some states, as Optuna's ``get_trials`` takes both arguments."""
    if states is not None:
        trials = [trial for trial in trials if trial.state in states]
    return copy.deepcopy(trials) if deepcopy else trials


def known_constraints(trials: Sequence[FrozenTrial]) -> Set[str]:
    """Names of the constraints that trials have: samplers raise if only some trials have them.

    They are known at the end of a trial, unless the objective sets them.
    """
    last = next((each for each in reversed(trials) if each.state == TrialState.COMPLETE), None)
    # The first trial to end has them, too, shortly before it is COMPLETE.
    having = [each for each in trials if each.state == TrialState.RUNNING or each is last]
    return {name for each in having for name in constraint_names(each)}


def is_feasible(trial: FrozenTrial) -> bool:
    """True if a trial violates none of its constraints, as far as it has any."""
    return all(value <= 0.0 for value in _constraint_values(trial).values())


def constraint_names(trial: FrozenTrial) -> Set[str]:
    """The names of a trial's known constraints; before Optuna 5 their numbers."""
    return _constraint_values(trial).keys()


def _constraint_values(trial: FrozenTrial) -> Mapping[str, float]:
    if hasattr(trial, "constraints"):
        return cast("Mapping[str, float]", trial.constraints)
    values = trial.system_attrs.get("constraints") or ()
    return {str(number): value for number, value in enumerate(values)}


def as_seen(trial: FrozenTrial, directions: list[StudyDirection]) -> FrozenTrial:
    """A trial as a sampler should see it; see ``StudyView``."""
    reported = trial.intermediate_values
    if trial.values is not None or not reported or len(directions) != 1:
        return trial
    value = reported[max(reported)]
    if math.isnan(value) or trial.state == TrialState.FAIL:
        value = -math.inf if directions[0] == StudyDirection.MAXIMIZE else math.inf
    seen = copy.copy(trial)
    seen.state = TrialState.COMPLETE
    seen.values = [value]
    seen.datetime_complete = trial.datetime_start
    return seen
