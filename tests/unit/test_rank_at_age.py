"""The rank of a trial at equal age, and its chance to end as the best."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from optuna_hermes.model import Curve
from optuna_hermes.policies import rank_at_age


def curve(*values: float) -> Curve:
    units = tuple(range(1, len(values) + 1))
    return Curve(steps=units, values=values, device_seconds=tuple(map(float, units)))


def test_trials_are_ranked_as_they_were_at_its_age() -> None:
    """Later values of older ones do not count, nor do trials that are younger."""
    curves = {0: curve(0.9, 0.1), 1: curve(0.5), 2: curve(0.7, 0.6), 3: curve(0.6)}
    found = rank_at_age(curves, 1)
    assert found is not None
    assert (found.rank, found.among, found.units) == (1, 4, 1)
    found = rank_at_age(curves, 2)
    assert found is not None
    assert (found.rank, found.among, found.units) == (2, 2, 2)


def test_there_is_none_without_a_finite_value() -> None:
    """Nothing is said of a trial that has not reported, or has diverged."""
    curves = {0: curve(0.9), 1: curve(), 2: curve(0.8, math.nan), 3: curve(math.inf)}
    assert [rank_at_age(curves, number) for number in (1, 2, 3, 4)] == [None] * 4
    assert rank_at_age(curves, 0) is not None


def test_one_trial_alone_is_the_best() -> None:
    """There is no other that could end better."""
    found = rank_at_age({5: curve(0.3)}, 5)
    assert found is not None
    assert (found.rank, found.among, found.chance) == (1, 1, 1.0)


def test_the_chance_falls_with_the_rank_and_is_shared_by_all() -> None:
    """Of trials of equal age the first is the likeliest, and all chances make up about one."""
    curves = {number: curve(0.5 + number / 100) for number in range(50)}
    curves[50] = curve(2.0, *np.linspace(1.9, 1.0, 29).tolist())  # how long a training is
    chances = []
    for number in range(50):
        found = rank_at_age(curves, number, length=30)
        assert found is not None
        chances.append(found.chance)
    assert chances == sorted(chances, reverse=True)
    assert 0.7 < sum(chances) < 1.3
    assert chances[0] > 5 / 50


def test_the_oldest_that_leads_is_the_likeliest() -> None:
    """It is compared with those that are younger as it was at their age."""
    curves = {number: curve(*[0.5 + number / 10] * 5) for number in range(1, 10)}
    curves[0] = curve(*np.linspace(0.4, 0.1, 20).tolist())
    found = rank_at_age(curves, 0)
    assert found is not None
    assert (found.rank, found.among) == (1, 1)
    assert found.chance > 0.5


def test_one_unit_settles_nothing() -> None:
    """The first may still be overtaken where all have trained one unit of many."""
    curves = {number: curve(0.1 + number / 10) for number in range(10)}
    for length, most in ((27, 0.5), (None, 0.9)):
        found = rank_at_age(curves, 0, length)
        assert found is not None
        assert 0.2 < found.chance < most


@given(
    st.lists(
        st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=9),
        min_size=1,
        max_size=12,
    )
)
def test_any_curves_have_ranks_within_bounds(values: list[list[float]]) -> None:
    """Ranks are among those there are, and chances are probabilities."""
    curves = {number: curve(*each) for number, each in enumerate(values)}
    for number in curves:
        found = rank_at_age(curves, number)
        assert (found is None) == (not math.isfinite(values[number][-1]))
        if found is not None:
            assert 1 <= found.rank <= found.among <= len(values)
            assert 0 <= found.chance <= 1
