"""Noise of the reported values, measured, and curves without it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optuna_hermes.curves import CurveTable, Floats, exponential_means
from optuna_hermes.model import Curve
from optuna_hermes.policies._smoothing import noise, smoothing

N, LENGTH = 40, 50


def walks(step: float, error: float, seed: int = 0) -> Floats:
    """Random walks, reported with errors."""
    rng = np.random.default_rng(seed)
    true = np.cumsum(step * rng.standard_normal((N, LENGTH)), axis=1)
    return true + error * rng.standard_normal((N, LENGTH))


def measured(values: Floats, units: list[int] | None = None) -> float:
    ages = [values.shape[1]] * len(values) if units is None else units
    return smoothing(
        noise(curve(*each[:age])) for each, age in zip(values.tolist(), ages, strict=True)
    )


def curve(*values: float) -> Curve:
    steps = tuple(range(1, len(values) + 1))
    return Curve(steps=steps, values=values, device_seconds=tuple(map(float, steps)))


@pytest.mark.parametrize("error", [0.5, 1.0, 2.0])
def test_what_foresees_a_walk_best_is_found(error: float) -> None:
    """Nearly Muth's weight, which follows from both deviations."""
    ratio = 1 / error**2  # of the variance of a step to that of an error
    best = 1 + ratio / 2 - math.sqrt(ratio + ratio**2 / 4)
    found = [measured(walks(1.0, error, seed)) for seed in range(5)]
    assert sum(found) / 5 == pytest.approx(best, abs=0.1)


def test_curves_without_noise_are_left_alone() -> None:
    """Falling ones, whose steps are alike, walks, and those that do not move at all."""
    ages = np.arange(1, LENGTH + 1)
    assert measured(np.outer(np.linspace(1, 2, N), 1 / np.sqrt(ages))) == 0
    assert measured(walks(1.0, 0.0)) == 0
    assert measured(np.ones((N, LENGTH))) == 0


def test_a_few_reports_tell_nothing() -> None:
    """Until there are pairs of steps, and enough of them."""
    noise = walks(0.0, 1.0)
    assert measured(noise[:0]) == 0
    assert measured(noise, [1] * N) == 0
    assert measured(noise, [2] * N) == 0
    assert measured(noise[:1, :8]) <= 0.1 < 0.5 <= measured(noise)


def test_failed_units_are_no_steps() -> None:
    """Neither from nor to a value that is not finite, and other trials count all the same."""
    noise = walks(0.0, 1.0)
    broken = noise.copy()
    broken[::2, 30] = np.inf
    assert measured(broken) == pytest.approx(measured(noise), abs=0.11)
    assert measured(np.full((N, LENGTH), np.inf)) == 0
    assert measured(np.where(np.arange(LENGTH) % 2, 1e308, -1e308) * np.ones((N, 1))) == 0


def test_the_last_steps_are_looked_at() -> None:
    """However long a curve is, and whatever it was at first."""
    fallen = np.linspace(1e6, 0.0, 500) * np.ones((N, 1))
    noise = [walks(0.0, 1.0, seed) for seed in (1, 2)]
    assert measured(np.concatenate([fallen, *noise], axis=1)) >= 0.5
    assert measured(np.concatenate([walks(0.0, 1.0), fallen], axis=1)) == 0


@given(st.lists(st.lists(st.floats(), min_size=1, max_size=9), min_size=1, max_size=9))
def test_any_values_give_a_tenth(curves: list[list[float]]) -> None:
    """From 0 to 0.8, whatever was reported."""
    found = smoothing(noise(curve(*values)) for values in curves)
    assert 10 * found == pytest.approx(round(10 * found))
    assert 0 <= found <= 0.8


@given(
    st.lists(st.lists(st.floats(), min_size=1, max_size=70), min_size=1, max_size=70),
    st.sampled_from([0.0, 0.3, 0.8]),
)
def test_a_table_keeps_the_means_of_its_curves(curves: list[list[float]], past: float) -> None:
    """Also as it grows, and when another weight was asked for between."""
    table, known = CurveTable(), [curve(*values) for values in curves]
    for n in range(1, len(known) + 1, 7):
        rows = table.rows(known[:n])
        for other in (0.5, 0.6, past):
            means = table.smoothed(other)
        for row, each in zip(rows, known, strict=False):
            reported = np.where(np.isfinite(each.values), each.values, np.inf)
            expected = exponential_means(reported, past) if past else reported.tolist()
            start = table.starts[row]
            assert means[start : start + each.units].tolist() == expected
