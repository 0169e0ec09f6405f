"""The surrogate: observations of trials, a process that is fitted to them, and proposals by it."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import approx_fprime

from optuna_hermes.curves import Floats
from optuna_hermes.surrogate import Cube, Observations, Process, _process, observe, propose
from optuna_hermes.surrogate._process import MOST_FITTED, _fitted, _loss, _Pairs


def process_of(points: Floats, values: Floats) -> Process:
    """One value for each of some points, all of one age."""
    trials = np.arange(len(values))
    observed = Observations(trials=trials, ages=np.zeros(len(values)), values=values, end=0.0)
    return Process(points, observed)


def test_examples_hold() -> None:
    """The examples in the docstrings hold."""
    assert doctest.testmod(_process).failed == 0


def test_trials_are_observed_at_doubled_ages_and_at_their_last_one() -> None:
    """Units 1, 2, 4, ... and the last one, whose value the end replaces if there is one."""
    seen = observe([[6.0, 5.0, 4.5, 4.0, 3.5, 3.0], [5.5], [6.0, 5.0, 4.0]], [2.5, None, None])
    assert seen.trials.tolist() == [0, 0, 0, 0, 1, 2, 2, 2]
    assert seen.ages == pytest.approx([0, 1, 2, math.log2(6), 0, 0, 1, math.log2(3)])
    assert seen.values * 2.5 + 5.0 == pytest.approx([6, 5, 4, 2.5, 5.5, 6, 5, 4])
    assert seen.end == math.log2(6)
    ages, values = seen.last()
    assert ages == pytest.approx([math.log2(6), 0, math.log2(3)])
    assert values * 2.5 + 5.0 == pytest.approx([2.5, 5.5, 4])


def test_what_is_worse_than_a_plateau_keeps_its_order() -> None:
    """Where most values are the best one, such as no failed test, bad ones are not as good."""
    seen = observe([[0.0]] * 7 + [[1.0], [3.0], [math.inf]], [None] * 10)
    plateau, bad, worse, infinite = seen.values[[0, 7, 8, 9]]
    assert plateau < bad < worse
    assert plateau < infinite


def test_what_is_far_worse_is_put_nearer() -> None:
    """By five times as much as the best is better than the median; what failed, by as much."""
    seen = observe([[each] for each in (1.0, 2.0, 4.0, 9.0, 1e9, math.nan)], [None] * 6)
    assert seen.values * 15 + 4 == pytest.approx([1, 2, 4, 9, 19, 7])


@pytest.mark.parametrize("huge", [1e12, 1e300, 1.7e308])
def test_one_huge_value_hides_no_differences(huge: float) -> None:
    """A loss that has diverged counts as a bad one; what is known of the others is kept."""
    seen = observe([[0.1], [0.2], [0.3], [huge]], [None] * 4)
    assert seen.values * 0.75 + 0.25 == pytest.approx([0.1, 0.2, 0.3, 1.0])


def test_values_that_differ_little_against_their_size_differ() -> None:
    """Energies of molecules, for example: the surrogate tells good points from bad ones."""
    x = np.linspace(0, 1, 12)
    seen = observe([[-1100.0 + 1e-6 * each] for each in x.tolist()], [None] * 12)
    assert np.ptp(seen.values) == pytest.approx(2.0)
    mean, _ = Process(x[:, None], seen).predict(np.array([[0.1], [0.9]]), 0.0)
    assert mean[1] - mean[0] > 1.0


def test_a_trial_without_reports_is_observed_at_the_end() -> None:
    """Objectives that report nothing have values of full age."""
    seen = observe([[], [3.0, 2.0]], [1.0, None])
    assert seen.trials.tolist() == [0, 1, 1]
    assert seen.ages.tolist() == [1.0, 0.0, 1.0]
    assert seen.values[0] < seen.values[2]


def test_some_trials_and_more_at_the_end() -> None:
    """A choice of trials is counted anew; those added have one value each, of full age."""
    seen = observe([[3.0, 2.0], [2.5], [2.8, 1.0]], [None] * 3).of([2, 1])
    assert seen.trials.tolist() == [0, 0, 1]
    more = seen.and_at_end(np.array([0.1, 0.2]))
    assert more.trials.tolist() == [0, 0, 1, 2, 3]
    assert more.ages[-2:].tolist() == [1.0, 1.0]


@given(st.lists(st.lists(st.floats(), min_size=1, max_size=9), min_size=1, max_size=12))
def test_any_values_can_be_modelled(curves: list[list[float]]) -> None:
    """NaN, infinite and huge values are put near the others, and a process can be made of them."""
    seen = observe(curves, [None] * len(curves))
    assert np.isfinite(seen.values).all()
    assert len(seen.trials) == len(seen.ages) == len(seen.values)
    points = np.linspace(0, 1, len(curves))[:, None]
    mean, deviation = Process(points[seen.trials], seen).predict(points, seen.end)
    assert np.isfinite(mean).all()
    assert (deviation > 0).all()


def test_a_process_finds_the_dimension_that_matters() -> None:
    """Of two dimensions the one that values depend on gets the shorter length scale."""
    rng = np.random.default_rng(0)
    points = rng.random((60, 2))
    process = process_of(points, np.sin(6 * points[:, 0]))
    assert process.settings.scales[0] > process.settings.scales[1] + 1
    new = rng.random((50, 2))
    mean, deviation = process.predict(new, 0.0)
    assert np.abs(mean - np.sin(6 * new[:, 0])).max() < 0.1
    assert (deviation > 0).all()


def test_the_gradient_is_that_of_the_loss() -> None:
    """All settings are searched along the true gradient."""
    rng = np.random.default_rng(1)
    points, values = rng.random((12, 3)), rng.normal(size=12)
    ages = rng.uniform(0, 5, 12)
    pairs = _Pairs(points, ages, np.arange(12) // 3)
    at = np.array([0.3, -0.5, 0.9, -0.5, -1.0, -2.0, 1.2, -3.0, -1.5, -1.2])
    expected = approx_fprime(at, lambda x: _loss(x, pairs, values)[0], 1e-6)
    assert _loss(at, pairs, values)[1] == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_what_parameters_do_may_change_with_age() -> None:
    """From a few trials that have grown old a process learns that ranks turn."""
    x = np.linspace(0, 1, 30)
    curves = []
    for number, each in enumerate(x.tolist()):
        units = 16 if number % 5 == 0 else 1
        late = np.log2(np.arange(1, units + 1)) / 4
        curves.append((1 + late * (1 - each) + (1 - late) * each).tolist())
    seen = observe(curves, [None] * len(curves))
    process = Process(x[seen.trials, None], seen)
    ends = np.array([[0.1], [0.9]])
    young, old = process.predict(ends, 0.0)[0], process.predict(ends, seen.end)[0]
    assert young[0] < young[1]
    assert old[0] > old[1]


@pytest.mark.parametrize(
    ("rate", "off"),
    [
        pytest.param(0.0, 0.07, id="as far apart"),
        pytest.param(0.3, 0.02, id="nearer to each other"),
    ],
)
def test_where_no_trial_has_grown_old_is_not_taken_for_bad(rate: float, off: float) -> None:
    """All values fall with age; that only the best trials grow old says nothing of the others."""

    def apart(x: Floats) -> Floats:
        return np.asarray(0.1 * np.sin(9 * x[:, 0]) + 0.1 * np.cos(7 * x[:, 1] * x[:, 2]))

    doublings = np.log2(np.arange(1, 17))
    mean, left = 1 - 0.2 * doublings, np.exp(-rate * doublings)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        x = rng.random((60, 5))
        first = apart(x) + 0.03 * rng.normal(size=60)
        best = np.argsort(first)[:8]
        curves = [
            (mean + value * left)[: 16 if number in best else 1].tolist()
            for number, value in enumerate(first)
        ]
        seen = observe(curves, [None] * len(curves))
        process = Process(x[seen.trials], seen)
        others = rng.random((200, 5))
        known = np.concatenate(curves)
        unit = np.ptp(known) / np.ptp(seen.values)
        foreseen = process.predict(others, seen.end)[0] - seen.values.min()
        foreseen = known.min() + unit * foreseen
        assert abs(np.mean(foreseen - (mean[-1] + apart(others) * left[-1]))) < off


def test_equal_values_are_no_problem() -> None:
    """Values without any spread give a process that expects them everywhere."""
    process = process_of(np.random.default_rng(0).random((12, 2)), np.ones(12))
    assert process.predict(np.array([[0.1, 0.9]]), 0.0)[0] == pytest.approx(1.0)


def test_settings_are_fitted_to_so_many_observations() -> None:
    """Of many trials the oldest quarter comes first; whole trials are taken."""
    curves = [[1.0] * (16 if number % 10 == 0 else 1) for number in range(200)]
    seen = observe(curves, [None] * 200)
    some = _fitted(seen)
    assert len(some) <= MOST_FITTED
    taken = np.unique(seen.trials[some])
    assert set(range(0, 200, 10)) <= set(taken.tolist())
    assert len(some) == np.isin(seen.trials, taken).sum()


def test_proposals_approach_the_minimum() -> None:
    """The first candidate is near the minimum of a bowl."""
    rng = np.random.default_rng(0)
    points = rng.random((40, 3))
    process = process_of(points, ((points - [0.2, 0.7, 0.5]) ** 2).sum(axis=1))
    found = propose(process, points, 0.0, Cube([], 3), rng)[0]
    assert np.abs(found - [0.2, 0.7, 0.5]).max() < 0.15


@settings(max_examples=50)
@given(st.integers(0, 1000))
def test_candidates_are_points_of_the_space(seed: int) -> None:
    """Numbers stay in the unit interval, and of the columns of a choice exactly one is 1."""
    rng = np.random.default_rng(seed)
    cube = Cube([np.array([1, 2, 3])], 5)
    points = cube.draw(30, rng)
    for each in (points, cube.near(points, np.full(30, 0.5), rng)):
        assert ((each >= 0) & (each <= 1)).all()
        assert (np.sort(each[:, 1:4], axis=1) == [0.0, 0.0, 1.0]).all()
