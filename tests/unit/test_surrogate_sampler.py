"""The sampler that proposes by a surrogate, in studies of all kinds."""

from __future__ import annotations

import math
import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.search_space import intersection_search_space
from optuna.trial import FrozenTrial, TrialState

from optuna_hermes import HermesSampler
from optuna_hermes._optuna import _surrogate_model, load_sampler
from optuna_hermes._optuna._surrogate_sampler import (
    EXPLORING,
    MOST_CHOICES,
    MOST_KNOWN,
    OTHERS,
    _failed,
    _of_many,
)
from optuna_hermes.errors import InvalidInputError, UnknownPolicyError


def sampler(seed: int = 0) -> HermesSampler:
    return HermesSampler(seed=seed)


def run(
    objective: Callable[[optuna.Trial], object], n: int, seed: int = 0, **study: object
) -> optuna.Study:
    made = optuna.create_study(sampler=sampler(seed), **study)  # type: ignore[arg-type]
    made.optimize(objective, n_trials=n)  # type: ignore[arg-type]
    return made


def mixed(trial: optuna.Trial) -> float:
    x = trial.suggest_float("x", 1e-4, 1.0, log=True)
    n = trial.suggest_int("n", 1, 8)
    kind = trial.suggest_categorical("kind", ["a", None, 3])
    step = trial.suggest_float("step", 0.0, 1.0, step=0.25)
    return abs(x - 0.01) + abs(n - 3) + (kind is not None) + abs(step - 0.5)


def test_mixed_spaces_are_searched() -> None:
    """Numbers of all kinds and choices are proposed within their bounds, and found."""
    study = run(mixed, 60)
    assert study.best_value < 0.3
    assert {trial.params["step"] for trial in study.trials} <= {0.0, 0.25, 0.5, 0.75, 1.0}


def test_it_finds_more_than_random_numbers() -> None:
    """On a bowl of six dimensions its best is better than that of random search, on each seed."""

    def bowl(trial: optuna.Trial) -> float:
        return sum((trial.suggest_float(f"x{i}", 0, 1) - 0.3) ** 2 for i in range(6))

    for seed in range(3):
        random = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
        random.optimize(bowl, n_trials=50)
        assert run(bowl, 50, seed).best_value < random.best_value / 2


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["complete", "fail", "pruned", "running"]),
            st.dictionaries(st.sampled_from("abc"), st.sampled_from([0, 1, 2])),
        ),
        max_size=6,
    )
)
def test_the_space_is_what_complete_trials_have_in_common(
    trials: list[tuple[str, dict[str, int]]],
) -> None:
    """It is Optuna's intersection of search spaces, without parameters of a single value."""
    study = optuna.create_study(sampler=sampler())
    ranges = [FloatDistribution(0, 1), FloatDistribution(0, 2), FloatDistribution(0, 0)]
    for state, params in trials:
        trial = study.ask({name: ranges[kind] for name, kind in params.items()})
        if state == "running":
            continue
        value = 1.0 if state == "complete" else None
        study.tell(trial, value, state=TrialState[state.upper()])
    inferred = study.sampler.infer_relative_search_space(study, study.ask()._get_latest_trial())
    space = intersection_search_space(study.trials)
    assert inferred == {name: each for name, each in space.items() if not each.single()}
    assert list(inferred) == sorted(inferred)


def test_a_choice_of_nan_is_in_the_space_and_one_of_many_values_is_not() -> None:
    """NaN is not equal to itself; each value of a choice would have a column of the process."""
    study = optuna.create_study(sampler=sampler())
    for _ in range(3):
        odd = CategoricalDistribution([None, float("nan"), "a"])
        many = CategoricalDistribution(range(MOST_CHOICES + 1))
        study.tell(study.ask({"odd": odd, "many": many}), 1.0)
    space = study.sampler.infer_relative_search_space(study, study.ask()._get_latest_trial())
    assert list(space) == ["odd"]


def test_failures_do_not_push_out_what_is_known() -> None:
    """After a night in which everything failed it proposes near the best trials as before."""
    study = run(lambda trial: trial.suggest_float("x", 0, 1) ** 2, 30)
    failed = optuna.trial.create_trial(
        state=TrialState.FAIL,
        params={"x": 0.9},
        distributions={"x": FloatDistribution(0, 1)},
    )
    study.add_trials([failed] * (MOST_KNOWN + 100))
    own = [number for number in range(1130, 1142) if number % OTHERS != 1 and number % EXPLORING]
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1) ** 2, n_trials=12)
    assert len(own) == 6
    assert max(study.trials[number].params["x"] for number in own) < 0.3


def test_what_was_begun_again_is_no_failure_of_its_parameters() -> None:
    """A stale trial is failed by Optuna, and its copy trains on."""
    of = {"params": {"x": 0.5}, "distributions": {"x": FloatDistribution(0, 1)}}
    stale = optuna.trial.create_trial(state=TrialState.FAIL, **of)  # type: ignore[arg-type]
    again = {"failed_trial": 0, "retry_history": [0]}
    copy = optuna.trial.create_trial(value=1.0, system_attrs=again, **of)  # type: ignore[arg-type]
    study = optuna.create_study()
    study.add_trials([stale, copy, stale])
    assert [each.number for each in _failed(study.trials)] == [2]


def test_of_many_trials_the_best_the_oldest_and_the_newest_are_known() -> None:
    """None of the three is forgotten in a study of thousands."""
    space = {"x": FloatDistribution(0, 1)}
    study = optuna.create_study()
    for number in range(2 * MOST_KNOWN):
        value, age = (0.0 if number == 7 else 1.0), (9 if number == 8 else 1)
        study.add_trial(
            optuna.trial.create_trial(
                params={"x": 0.5},
                distributions=space,
                value=value,
                intermediate_values=dict.fromkeys(range(age), value),
            )
        )
    known = {each.number for each in _of_many(study.trials, 1.0)}
    assert {7, 8, 2 * MOST_KNOWN - 1} <= known
    assert MOST_KNOWN / 2 < len(known) <= MOST_KNOWN


def test_thousands_of_begun_trials_cost_no_more_than_hundreds() -> None:
    """Each would be an observation of the process, whose cost is their cube."""
    study = run(lambda trial: trial.suggest_float("x", 0, 1) ** 2, 20)
    space = {"x": FloatDistribution(0, 1)}
    begun = optuna.trial.create_trial(
        state=TrialState.RUNNING, params={"x": 0.5}, distributions=space
    )
    study.add_trials([begun] * 2000)
    modelled: list[int] = []
    model = _surrogate_model._model

    def noted(space: Any, known: Any, begun: Any, sign: float) -> Any:
        modelled.append(len(begun))
        return model(space, known, begun, sign)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_surrogate_model, "_model", noted)
        for _ in range(OTHERS):
            study.ask(space)
    assert set(modelled) == {_surrogate_model.MOST_BEGUN}


def test_every_fourth_proposal_is_looked_for_far_from_the_best() -> None:
    """The others gather there."""

    def away(trial: optuna.Trial) -> float:
        return max(abs(trial.suggest_float(f"x{i}", 0, 1) - 0.5) for i in range(6))

    values = [trial.value or 0.0 for trial in run(away, 80).trials]
    own = [number for number in range(20, 80) if number % OTHERS != 1]
    far = [values[number] for number in own if number % EXPLORING == 0]
    near = [values[number] for number in own if number % EXPLORING]
    assert len(far) == 10
    assert min(far) > np.median(near)


def test_every_third_proposal_is_tpes(monkeypatch: pytest.MonkeyPatch) -> None:
    """TPE is asked once for all parameters."""
    asked = []

    def sample_relative(
        self: object, study: object, trial: FrozenTrial, space: dict[str, object]
    ) -> dict[str, float]:
        asked.append(trial.number)
        return {name: trial.number / 100 for name in space}

    study = run(lambda trial: trial.suggest_float("x", 0, 1) ** 2, 20)
    monkeypatch.setattr(optuna.samplers.TPESampler, "sample_relative", sample_relative)
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1) ** 2, n_trials=2 * OTHERS)
    assert asked == [number for number in range(20, 20 + 2 * OTHERS) if number % OTHERS == 1]
    assert [study.trials[number].params for number in asked] == [{"x": 0.22}, {"x": 0.25}]


def test_what_tpe_proposes_again_is_the_process_s_to_propose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No point is trained twice while there are others."""
    monkeypatch.setattr(optuna.samplers.TPESampler, "sample_relative", lambda *of: {"n": 3})
    study = run(lambda trial: float(trial.suggest_int("n", 0, 99, step=3)), 11)
    study.optimize(lambda trial: float(trial.suggest_int("n", 0, 99, step=3)), n_trials=12)
    points = [trial.params["n"] for trial in study.trials[10:]]
    assert len(set(points)) == len(points)


def test_maximised_values_are_turned_round() -> None:
    """A study that maximises approaches the maximum."""
    study = run(lambda t: -((t.suggest_float("x", 0, 1) - 0.8) ** 2), 25, direction="maximize")
    assert study.best_params["x"] == pytest.approx(0.8, abs=0.05)


def test_the_same_seed_proposes_the_same() -> None:
    """All random numbers come from its seed, also after it was pickled for another process."""
    first, second = (run(mixed, 20, seed=3) for _ in range(2))
    assert [t.params for t in first.trials] == [t.params for t in second.trials]
    for study in (first, second):
        study.sampler = pickle.loads(pickle.dumps(study.sampler))
        study.optimize(mixed, n_trials=2)
    assert [t.params for t in first.trials] == [t.params for t in second.trials]


def test_conditional_parameters_are_proposed_too() -> None:
    """Parameters that only some trials have are left to TPE, the others to the surrogate."""

    def conditional(trial: optuna.Trial) -> float:
        if trial.suggest_categorical("deep", [True, False]):
            return abs(trial.suggest_float("a", 0, 1) - 0.5)
        return 0.3 + trial.suggest_float("b", 0, 1)

    study = run(conditional, 40)
    assert study.best_value < 0.1


def test_several_objectives_and_constraints_are_left_to_the_other_sampler() -> None:
    """Studies that the surrogate has no model of go on as without it."""

    def two(trial: optuna.Trial) -> tuple[float, float]:
        x = trial.suggest_float("x", 0, 1)
        return x, 1 - x

    assert len(run(two, 15, directions=["minimize", "maximize"]).trials) == 15

    def constrained(trial: optuna.Trial) -> float:
        trial.set_constraint("c", -1.0)
        return trial.suggest_float("x", 0, 1)

    if hasattr(optuna.Trial, "set_constraint"):  # since Optuna 5
        assert len(run(constrained, 15).trials) == 15


def test_a_small_space_may_be_used_up() -> None:
    """Points that were tried are not proposed while there are others, and then again."""
    study = run(lambda t: t.suggest_int("n", 0, 14) % 7, 40)
    assert len({trial.params["n"] for trial in study.trials}) == 15


def test_failed_and_pruned_trials_are_no_problem() -> None:
    """A failed trial is passed over; a pruned one counts at its last value."""

    def some_fail(trial: optuna.Trial) -> float:
        x = trial.suggest_float("x", 0, 1)
        trial.report(x, 1)
        if trial.number % 3 == 0:
            raise optuna.TrialPruned
        return float("nan") if trial.number % 3 == 1 else x

    assert run(some_fail, 45).best_value < 0.2


def test_what_fails_for_its_parameters_is_left_alone() -> None:
    """A promising corner in which every trial fails is not proposed for ever."""

    def objective(trial: optuna.Trial) -> float:
        x, y = trial.suggest_float("x", 0, 1), trial.suggest_float("y", 0, 1)
        return float("nan") if x > 0.6 else 1 - x + (y - 0.5) ** 2

    study = run(objective, 60)
    late = [trial.state.name for trial in study.trials[30:]]
    assert late.count("COMPLETE") > 10
    assert study.best_value < 0.45


def test_trials_that_were_added_count() -> None:
    """Values of another study, added without reports, are learned from."""
    study = optuna.create_study(sampler=sampler())
    space = {"x": optuna.distributions.FloatDistribution(0, 1)}
    study.add_trials(
        optuna.trial.create_trial(params={"x": x}, distributions=space, value=abs(x - 0.3))
        for x in np.linspace(0, 1, 21).tolist()
    )
    asked = [study.ask(space).params["x"] for _ in range(3)]
    assert all(abs(x - 0.3) < 0.1 for x in asked)


def test_what_is_good_only_at_first_is_not_taken_for_good() -> None:
    """Proposals follow the trials that have grown old, where ranks turn with age."""
    study = optuna.create_study(sampler=sampler())
    space = {"x": optuna.distributions.FloatDistribution(0, 1)}

    def value(x: float, unit: int) -> float:
        turned = math.log2(unit) / 5
        return 1 / unit + turned * (1 - x) + (1 - turned) * x

    for number in range(40):
        x, units = (7 * number % 40) / 40, 32 if number % 5 == 0 else 2
        study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.RUNNING,
                params={"x": x},
                distributions=space,
                intermediate_values={unit: value(x, unit) for unit in range(1, units + 1)},
            )
        )
    asked = [study.ask(space) for _ in range(5)]
    own = [trial.params["x"] for trial in asked if trial.number % OTHERS != 1]
    assert len(own) == 3
    assert min(own) > 0.8


def test_trials_that_train_are_not_proposed_again() -> None:
    """Of several trials that are asked for at once, no two are alike."""
    study = run(lambda t: (t.suggest_float("x", 0, 1) - 0.5) ** 2, 12)
    space = {"x": optuna.distributions.FloatDistribution(0, 1)}
    asked = [study.ask(space).params["x"] for _ in range(4)]
    assert min(abs(a - b) for i, a in enumerate(asked) for b in asked[:i]) > 1e-3


@pytest.mark.parametrize("together", [True, False])
def test_a_sampler_may_serve_several_studies(together: bool) -> None:
    """In one database, or in two in which they have the same id."""
    made, storage = sampler(), optuna.storages.InMemoryStorage()
    for name in ("x", "y"):
        study = optuna.create_study(sampler=made, storage=storage if together else None)
        study.optimize(lambda trial: trial.suggest_float(name, 0, 1), n_trials=12)  # noqa: B023
        assert [*made.infer_relative_search_space(study, study.trials[-1])] == [name]


def test_numbers_of_numpy_are_sent_as_plain_ones() -> None:
    """Brokers are told of slices in ``float``."""
    seconds = HermesSampler(slice_seconds=np.float32(0.5)).terms.slice_seconds
    assert (type(seconds), seconds) == (float, 0.5)


def test_what_is_no_sampler_is_refused() -> None:
    """A base must be a sampler, and has its own seed."""
    with pytest.raises(InvalidInputError, match="base must be a sampler of Optuna or None"):
        HermesSampler("gp")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="seed must be given to TPESampler"):
        HermesSampler(optuna.samplers.TPESampler(), seed=1)
    with pytest.raises(InvalidInputError, match=r"TPESampler'>: write a call, such as TPESampler"):
        HermesSampler(optuna.samplers.TPESampler)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", ["a", 1.5, -1, 2**32])
def test_what_is_no_seed_is_refused(seed: Any) -> None:
    """In the words of other numbers, not in NumPy's."""
    with pytest.raises(InvalidInputError, match=f"seed must be a whole number .* got {seed!r}: "):
        HermesSampler(seed=seed)
    assert HermesSampler(seed=np.uint32(3)).seed == 3  # type: ignore[arg-type]


def test_an_unknown_policy_is_refused_at_once() -> None:
    """Not by the first trial; one's own is looked for where the broker starts."""
    for policy in ("lifo", "energy:lifo"):
        with pytest.raises(UnknownPolicyError, match="but got 'lifo'"):
            HermesSampler(policy=policy)
    for policy in ("fifo", "energy:fifo", "none.py:Mine"):
        assert HermesSampler(policy=policy).terms.policy == policy


def test_samplers_of_others_are_not_loaded() -> None:
    """Before workers are forked only our own sampler is imported, whatever others call theirs."""

    class Other(optuna.samplers.RandomSampler):
        def load(self, path: str) -> None:
            raise AssertionError(path)

    load_sampler(optuna.create_study(sampler=HermesSampler(Other())))
    load_sampler(optuna.create_study(sampler=sampler()))
    assert "optuna_hermes._optuna._surrogate_model" in sys.modules
