"""Studies with a real sampler over small recorded pools."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from optuna_hermes.cli._simulations import with_sampler
from optuna_hermes.errors import InvalidInputError, UnknownPolicyError
from optuna_hermes.model import Decision, Snapshot, TrialView
from optuna_hermes.replay import Result
from optuna_hermes.replay._proposals import (
    PRUNERS,
    SAMPLERS,
    OptunaPruning,
    Pool,
    Proposals,
    make_sampler,
)
from optuna_hermes.replay._studies import (
    PLAIN,
    StudyMetrics,
    StudyRules,
    budget_seconds,
    simulate_study,
    tabulate_studies,
)
from optuna_hermes.simulator import CurveSet, Recording


def recording(*values: float, first: float = 1.0, seconds: float = 1.0, **params: Any) -> Recording:
    return Recording(values=values, seconds=(seconds,) * len(values), first=first, params=params)


def pool_of(recordings: Sequence[Recording], name: str = "small") -> CurveSet:
    return CurveSet(name=name, family="made", recordings=tuple(recordings))


def valley(n: int = 60, units: int = 8, name: str = "valley") -> CurveSet:
    """Trainings that fall towards the square of the distance of ``x`` from 0.3."""
    floors = [(i / (n - 1) - 0.3) ** 2 for i in range(n)]
    return pool_of(
        [
            recording(*(floor + 0.5**unit for unit in range(1, units + 1)), x=float(i))
            for i, floor in enumerate(floors)
        ],
        name,
    )


def new_study(pruner: optuna.pruners.BasePruner | None = None) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(
        sampler=optuna.samplers.RandomSampler(seed=0),
        pruner=pruner or optuna.pruners.NopPruner(),
    )


# The pool


def test_coordinates_are_ranks_and_ties_share_their_mean() -> None:
    """Five values of which two are equal: the equal ones lie halfway between their two ranks."""
    pool = Pool(pool_of([recording(0.5, x=x) for x in (1e-5, 3.0, 0.1, 0.1, 900.0)]))
    assert pool.points[:, 0].tolist() == [0.0, 0.75, 0.375, 0.375, 1.0]


def test_words_and_gaps_have_ranks_too() -> None:
    """Choices that are stored as text are put in order; what a trial lacks ranks first."""
    rows = [{"kind": "b", "x": 2.0}, {"kind": "a"}, {"kind": "c", "x": math.nan}]
    pool = Pool(pool_of([recording(0.5, **row) for row in rows]))
    assert pool.names == ("kind", "x")
    assert pool.points.tolist() == [[0.5, 1.0], [0.0, 0.25], [1.0, 0.25]]


def test_the_nearest_free_configuration_is_taken_once() -> None:
    """The distance is over all parameters, equal ones go to the first, none is given twice."""
    pool = Pool(pool_of([recording(0.5, x=x, y=y) for x, y in [(0, 1), (2, 1), (1, 0), (1, 2)]]))
    assert [pool.take({"x": 0.5, "y": 0.5}) for _ in range(2)] == [0, 1]
    assert pool.take({"x": 0.5, "y": 1.0}) == 3
    assert pool.left == 1
    assert pool.take({"x": 0.5, "y": 1.0}) == 2


def test_a_set_without_parameters_is_refused() -> None:
    """There is nothing to suggest."""
    with pytest.raises(InvalidInputError, match=r"^A sampler needs .* bare has no params"):
        Pool(pool_of([recording(0.5)], name="bare"))


# The study that proposes


def test_reports_and_ends_reach_the_study() -> None:
    """Optuna's storage says afterwards what was trained, pruned and lost."""
    study = new_study()
    source = Proposals(pool_of([recording(0.5, x=float(i)) for i in range(3)]), study)
    for number, value in enumerate((0.5, 0.7, math.nan)):
        source.open(number)
        source.reported(number, 1, 0.9)
        source.reported(number, 2, value)
        source.ended(number, pruned=number == 1)
    states = [TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL]
    assert [trial.state for trial in study.trials] == states
    assert study.trials[0].value == 0.5
    assert study.trials[1].intermediate_values == {1: 0.9, 2: 0.7}
    assert source.unstarted.count == 0
    assert not source.unstarted.fixed


def test_the_study_is_told_what_is_trained() -> None:
    """It has the configuration nearest to what was suggested, scaled, before anything is known."""
    study = new_study()
    source = Proposals(pool_of([recording(0.5, x=each) for each in (1.0, 5.0, 9.0)]), study)
    trained = [source.open(number).params["x"] for number in range(3)]
    places = {1.0: 0.0, 5.0: 0.5, 9.0: 1.0}
    assert sorted(trained) == [1.0, 5.0, 9.0]
    assert [trial.params for trial in study.trials] == [{"x": places[each]} for each in trained]


def test_the_pruner_of_the_study_is_asked_at_each_report() -> None:
    """A trial above the threshold shall be pruned, the others not."""
    study = new_study(optuna.pruners.ThresholdPruner(upper=0.6))
    source = Proposals(pool_of([recording(0.5, x=float(i)) for i in range(3)]), study)
    for number, value in enumerate((0.5, 0.7)):
        source.open(number)
        source.reported(number, 1, value)
    assert source.to_prune == {1}


def test_an_unknown_sampler_is_named_with_those_there_are() -> None:
    """One line for the command line."""
    with pytest.raises(InvalidInputError, match=r"^A sampler must be one of TPESampler, .*'Tpe'"):
        make_sampler("Tpe", 0)


def test_the_own_sampler_has_the_name_that_optimize_has_for_it() -> None:
    """Its class there is that of the sampler which wraps it."""
    assert type(make_sampler("HermesSampler", 0)) is type(make_sampler("surrogate", 0))


def test_a_sampler_that_needs_a_package_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before anything is simulated, and says what to install."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidInputError, match=r"CmaEsSampler .* pip install cmaes"):
        make_sampler("CmaEsSampler", 0)


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name != "CmaEsSampler"])
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_every_sampler_proposes(name: str) -> None:
    """A budget of three trainings is spent with each of them (CMA-ES needs one more package)."""
    metrics = simulate_study(valley(12, 3), "fifo", StudyRules(sampler=name, budget=3), seed=0)
    assert metrics.trials_opened >= 3


# Plain Optuna's pruners


def test_a_bad_trial_is_pruned_and_its_device_opens_another() -> None:
    """Those that still run, or were not to be pruned, are left alone."""
    policy = OptunaPruning({1, 2})
    trials = (TrialView(number=1, state="parked"), TrialView(number=2, state="running"))
    decision = policy.decide(Snapshot(trials=trials))
    assert decision == Decision(pruned=(1,))


@pytest.mark.parametrize("policy", PRUNERS)
def test_pruners_stop_trainings_early(policy: str) -> None:
    """With the same budget more trials are opened than without a pruner."""
    setup = StudyRules(n_devices=2, budget=12)
    curve_set = valley()
    plain = simulate_study(curve_set, "fifo", setup, seed=0)
    assert (
        simulate_study(curve_set, policy, setup, seed=0).trials_opened > plain.trials_opened == 12
    )


# The loop


def test_the_measures_of_a_loop_that_can_be_reckoned_by_hand() -> None:
    """A pool of one configuration, two seconds a unit, one device, a budget of two trainings."""
    only = recording(0.6, 0.1, 0.0, 0.04, seconds=2.0, x=1.0)
    metrics = simulate_study(pool_of([only]), "fifo", StudyRules(budget=2, switch_cost=0.5), seed=0)
    # Lowest final 0.04, span 0.96: near are 0.088 and 0.0496. Units end after 3, 5, 7 and 9 s.
    assert metrics == StudyMetrics(
        any5=7 / 16, any1=7 / 16, fin5=9 / 16, fin1=9 / 16, trials_opened=1
    )


def test_what_never_happens_costs_the_whole_budget() -> None:
    """Half a training: nothing finishes, and no value is near the best one."""
    only = recording(0.6, 0.1, 0.0, 0.04, x=1.0)
    metrics = simulate_study(pool_of([only]), "hermes", StudyRules(budget=0.5), seed=0)
    assert metrics == StudyMetrics(any5=1.0, any1=1.0, fin5=1.0, fin1=1.0, trials_opened=1)


def test_the_budget_is_shared_by_the_devices() -> None:
    """Median full training times the budget, divided."""
    lengths = (1, 3, 50)
    curve_set = pool_of([recording(*[0.5] * n, seconds=2.0, x=float(n)) for n in lengths])
    assert budget_seconds(curve_set, StudyRules(n_devices=4, budget=10)) == 15.0


@pytest.mark.parametrize("policy", [*PLAIN, "hermes"])
def test_a_loop_repeats_itself(policy: str) -> None:
    """The same seed gives the same figures; another one opens other trials first."""
    setup = StudyRules(n_devices=2, budget=10)
    first, again, other = (simulate_study(valley(), policy, setup, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_pausing_opens_more_than_running_to_the_end() -> None:
    """Under hermes the same budget looks at several times as many configurations."""
    setup = StudyRules(n_devices=2, budget=8)
    fifo, hermes = (simulate_study(valley(), name, setup, seed=0) for name in ("fifo", "hermes"))
    assert hermes.trials_opened >= 2 * fifo.trials_opened


def test_an_empty_budget_and_an_unknown_policy_are_refused() -> None:
    """One line each."""
    with pytest.raises(InvalidInputError, match=r"^A budget must be above 0 .* got 0\.$"):
        StudyRules(budget=0)
    with pytest.raises(UnknownPolicyError, match="'nothing'"):
        simulate_study(valley(), "nothing", StudyRules(), seed=0)


# Means


def loop_run(curve_set: str, policy: str, seed: int, any5: float) -> Result[StudyMetrics]:
    metrics = StudyMetrics(any5=any5, any1=0.5, fin5=0.5, fin1=0.5, trials_opened=10)
    return Result(curve_set=curve_set, family="made", policy=policy, seed=seed, metrics=metrics)


def test_the_table_has_means_over_seeds_then_over_sets() -> None:
    """Arithmetic over seeds, geometric over sets, and ratios to plain Optuna and its pruners."""
    anys = {
        "fifo": [(0.5, 0.7), (0.6, 0.6)],
        "median-stop": [(0.4, 0.4), (0.4, 0.4)],
        "asha-stop": [(0.3, 0.3), (0.3, 0.3)],
        "hermes": [(0.1, 0.3), (0.05, 0.05)],
    }
    trials = [
        loop_run(name, policy, seed, pair[seed])
        for policy, pairs in anys.items()
        for name, pair in zip("ab", pairs, strict=True)
        for seed in (0, 1)
    ]
    rows = {row["policy"]: row for row in tabulate_studies(trials)}
    assert list(rows) == list(anys)
    assert rows["hermes"]["any5"] == pytest.approx(0.1)
    assert rows["hermes"]["trials_opened"] == pytest.approx(10)
    assert rows["hermes"]["ratios"]["fifo"]["any5"] == pytest.approx(6)
    assert rows["hermes"]["ratios"]["best pruner"]["any5"] == pytest.approx(3)
    assert "trials_opened" not in rows["hermes"]["ratios"]["fifo"]


def test_a_table_without_rivals_has_no_ratios() -> None:
    """There is nothing to compare with."""
    (row,) = tabulate_studies([loop_run("a", "hermes", 0, 0.1)])
    assert row["ratios"] == {"fifo": {}, "best pruner": {}}


def test_every_set_policy_and_seed_is_run() -> None:
    """One result for each, with its name."""
    sets = [valley(8, 2, name) for name in ("a", "b")]
    results = with_sampler(sets, ("fifo", "hermes"), "TPESampler", 2.0, 1, 0.005, (0, 1))["results"]
    keys = [(each["set"], each["policy"], each["seed"]) for each in results]
    assert len(set(keys)) == len(keys) == 8
    assert keys[0] == ("a", "fifo", 0)
