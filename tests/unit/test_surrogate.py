"""The surrogate: a process, the scores that it is fitted to, and proposals by it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import approx_fprime

from optuna_hermes.surrogate import Cube, Process, propose, score
from optuna_hermes.surrogate._process import _loss


def test_a_process_finds_the_dimension_that_matters() -> None:
    """Of two dimensions the one that values depend on gets the shorter length scale."""
    rng = np.random.default_rng(0)
    points = rng.random((60, 2))
    process = Process(points, np.sin(6 * points[:, 0]), np.full(60, 0.01))
    assert process.settings.scales[0] > process.settings.scales[1] + 1
    new = rng.random((50, 2))
    mean, deviation = process.predict(new)
    assert np.abs(mean - np.sin(6 * new[:, 0])).max() < 0.1
    assert (deviation > 0).all()


def test_the_gradient_is_that_of_the_loss() -> None:
    """Length scales and noise are searched along the true gradient."""
    rng = np.random.default_rng(1)
    points, observed = rng.random((12, 3)), rng.normal(size=12)
    squares = (points[:, None, :] - points[None, :, :]) ** 2
    noise = rng.uniform(0.3, 1.3, 12)
    at = np.array([0.3, -0.5, 0.9, -1.0])
    found = _loss(at, squares, observed, noise)[1]
    expected = approx_fprime(at, lambda x: _loss(x, squares, observed, noise)[0], 1e-6)
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_noisy_observations_count_for_less() -> None:
    """Of two values at one place the mean is nearer to the one with less noise."""
    points = np.array([[0.5], [0.5], [0.0], [1.0]])
    values = np.array([0.0, 1.0, 0.5, 0.5])
    mean, _ = Process(points, values, np.array([0.1, 5.0, 1.0, 1.0])).predict(points[:1])
    assert mean[0] < 0.5


def test_equal_values_are_no_problem() -> None:
    """Values without any spread give a process that expects them everywhere."""
    process = Process(np.random.default_rng(0).random((12, 2)), np.ones(12), np.ones(12))
    assert process.predict(np.array([[0.1, 0.9]]))[0] == pytest.approx(1.0)


def test_scores_are_ranks_at_any_age() -> None:
    """A trial that ended lower has a lower score; the younger a trial is, the noisier its score."""
    scores = score([[3.0, 2.0, 1.0], [2.5], [9.0, 8.0, 7.0]], [1.0, None, 7.0])
    assert scores.values[0] < scores.values[1] < scores.values[2]
    assert scores.noise[0] == scores.noise[2] < scores.noise[1]


def test_a_young_trial_is_compared_at_its_age() -> None:
    """One that is lower than all were at its age is before those that are lower now but will not
    be."""
    old = [[9.0, 8.0, 7.9, 7.8], [9.5, 8.5, 7.95, 7.85], [9.9, 9.0, 8.9, 8.8]]
    scores = score([*old, [8.0], [9.8]], [None] * 5)
    assert scores.values[3] < scores.values[2]
    assert scores.values[3] < scores.values[4]


def test_a_trial_without_reports_is_scored_by_its_end() -> None:
    """Objectives that report nothing are ranked by what they return."""
    scores = score([[], [], []], [3.0, 1.0, 2.0])
    assert np.argsort(scores.values).tolist() == [1, 2, 0]


@given(st.lists(st.lists(st.floats(), min_size=1, max_size=5), min_size=1, max_size=12))
def test_any_values_can_be_scored(curves: list[list[float]]) -> None:
    """NaN and infinite values rank last, and give finite scores."""
    scores = score(curves, [None] * len(curves))
    assert np.isfinite(scores.values).all()
    assert (scores.noise > 0).all()
    ranked = [c[-1] if math.isfinite(c[-1]) else math.inf for c in curves]
    if len(set(map(len, curves))) == 1 and len(set(ranked)) == len(ranked):
        assert np.argmin(scores.values) == np.argmin(ranked)


def test_proposals_approach_the_minimum() -> None:
    """The candidate expected to improve most is near the minimum of a bowl."""
    rng = np.random.default_rng(0)
    points = rng.random((40, 3))
    values = ((points - [0.2, 0.7, 0.5]) ** 2).sum(axis=1)
    process = Process(points, values, np.full(40, 0.05))
    best = points[np.argsort(values)]
    found = propose(process, best, Cube([], 3), rng)[0]
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
