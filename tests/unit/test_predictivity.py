"""Predictivity of early ranks for late ones, measured."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optuna_hermes.policies._predictivity import USUAL, Predictivity, correlation

LENGTH = 16
N = 60


def curves(correlation: float, seed: int = 0) -> np.ndarray:
    """Curves of 60 trials whose values at an age and at twice that age are so much alike."""
    rng = np.random.default_rng(seed)
    values, one = np.empty((N, LENGTH)), rng.normal(size=N)
    for unit in range(LENGTH):
        step = np.log2((unit + 1) / max(unit, 1))
        kept = correlation**step
        one = kept * one + np.sqrt(1 - kept**2) * rng.normal(size=N)
        values[:, unit] = one
    return values


def measured(values: np.ndarray, units: np.ndarray | None = None) -> float:
    units = np.full(len(values), LENGTH) if units is None else units
    table = np.where(np.arange(LENGTH) < units[:, None], values, np.inf)
    return Predictivity().beyond_usual(table.ravel(), starts(len(table)), units, LENGTH)


def starts(n: int) -> np.ndarray:
    """Starts of the rows of a table in one array."""
    return np.arange(n) * LENGTH


def test_ranks_that_stay_say_more_than_usual() -> None:
    """Trials that keep their order raise the measure, those that lose it lower it."""
    assert measured(curves(0.99)) > 0.3
    assert measured(curves(0.3)) < -0.3
    assert measured(curves(0.99)) > measured(curves(0.8)) > measured(curves(0.3))


def test_a_reversed_order_says_less_than_usual() -> None:
    """Early ranks say nothing where the first are the last in the end."""
    slopes = np.linspace(0, 1, N)
    values = (1 - slopes)[:, None] + (2 * slopes - 1)[:, None] * np.linspace(0, 1, LENGTH)
    assert measured(values) < -0.3


def test_few_trials_are_as_usual() -> None:
    """Nothing is concluded from fewer than four trials that got old enough."""
    units = np.ones(N, dtype=np.int64)
    units[:3] = LENGTH
    assert measured(curves(0.3), units) == pytest.approx(0.0)


def test_a_restricted_range_is_corrected_for() -> None:
    """If only the best third by first values went on, ranks still say what they say among all."""
    values = curves(0.9, seed=1)
    chosen = np.flatnonzero(values[:, 0] <= np.quantile(values[:, 0], 1 / 3))
    there = np.isin(np.arange(N), chosen)
    uncorrected = np.corrcoef(values[chosen, 0], values[chosen, 1])[0, 1]
    corrected = correlation(values[:, 0], there, values[chosen, 1], USUAL)
    assert uncorrected < corrected < 1
    assert corrected == pytest.approx(0.9, abs=0.05)


@given(st.integers(0, 1000), st.permutations(range(20)))
def test_only_the_order_of_values_counts(seed: int, order: list[int]) -> None:
    """A change of scale changes nothing, nor do equal or diverged values break anything."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 5, size=(20, LENGTH)).astype(float)
    values[rng.random(values.shape) < 0.1] = np.inf
    units = rng.integers(1, LENGTH + 1, size=20)
    found = measured(values, units)
    assert np.isfinite(found)
    assert measured(np.exp(values), units) == pytest.approx(found)
    assert measured(values[order], units[order]) == pytest.approx(found)


def test_equal_values_are_as_usual() -> None:
    """Ranks that are all equal tell nothing, however the mean of their scores is rounded."""
    rng = np.random.default_rng(0)
    for n in range(4, 257):
        there, others = np.ones(n, dtype=bool), rng.random(n)
        assert correlation(np.zeros(n), there, others, USUAL) == USUAL
        assert correlation(others, there, np.zeros(n), USUAL) == USUAL


def test_nothing_is_known_that_is_not_seen() -> None:
    """An earlier measure changes no later one, of more trials or of others."""
    again = Predictivity()
    for n, alike, age in [(9, 0.3, 4), (20, 0.3, 4), (20, 0.3, 16), (20, 0.9, 16)]:
        table = curves(alike).ravel(), starts(n), np.full(n, age), LENGTH
        found = again.beyond_usual(*table)
        assert found == Predictivity().beyond_usual(*table)
        assert found != 0


def test_a_study_of_unknown_length_keeps_no_more() -> None:
    """Each length has a last correlation of its own, which the next one replaces."""
    grows, values = Predictivity(), curves(0.9).ravel()
    for length in range(9, LENGTH + 1):
        grows.beyond_usual(values, starts(N), np.full(N, length), length)
    assert set(grows._known) == {(1, 2), (2, 4), (4, 8), (8, 16)}
