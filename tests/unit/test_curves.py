"""Curves as rows of an array, and where they go."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optuna_hermes.curves import CurveCache, CurveTable, reach
from optuna_hermes.model import Curve


def curve(*values: float) -> Curve:
    steps = tuple(range(1, len(values) + 1))
    return Curve(steps=steps, values=values, device_seconds=tuple(map(float, steps)))


def test_a_table_of_long_curves_is_asked_for_none() -> None:
    """Other curves that it keeps do not matter."""
    table = CurveTable()
    table.rows([curve(*[0.5] * 5000)])
    assert table.rows([]).tolist() == []


def values_of(table: CurveTable, row: int) -> list[float]:
    """Return the values of one curve of a table."""
    start = table.starts[row]
    return table.values[start : start + table.units[row]].tolist()


def reach_of(*values: float) -> float:
    """Return the reach of one curve."""
    last, before = values[-1], values[-1 - len(values) // 2]
    return float(reach(np.array([last]), np.array([before]), np.array([len(values)]))[0])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((8.0,), 8.0),
        ((8.0, 5.0), 2.0),
        ((8.0, 5.0, 3.0), 0.0),
        ((8.0, 5.0, 3.0, 2.0), -1.0),
        ((8.0, 9.0), 9.0),
        ((3.0, 3.0), 3.0),
        ((math.inf, 2.0), 2.0),
        ((1.0, math.inf), math.inf),
        ((1.7e308, -1.7e308), -1.7e308),
    ],
)
def test_a_curve_goes_on_as_over_its_last_half(values: tuple[float, ...], expected: float) -> None:
    """A fall goes on for half as many units as there are; a rise or a divergence does not."""
    assert reach_of(*values) == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_diverged_is_infinite(value: float) -> None:
    """NaN and either infinity are the worst there is, and spoil no other report."""
    table = CurveTable()
    rows = table.rows([curve(value), curve(1.0, value, 2.0)])
    assert [values_of(table, row) for row in rows] == [[math.inf], [1.0, math.inf, 2.0]]


@given(
    st.lists(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=99), max_size=40), max_size=6)
)
def test_a_table_that_remembers_is_one_that_was_made_now(calls: list[list[list[float]]]) -> None:
    """Whatever was asked before, curves stand in the table as they are."""
    table, kept = CurveTable(), [curve(0.5, 0.25)]
    for lists in calls:
        curves = [*kept, *(curve(*values) for values in lists)]
        rows = table.rows(curves)
        assert len(set(rows.tolist())) == len(curves)
        for row, each in zip(rows.tolist(), curves, strict=True):
            assert tuple(values_of(table, row)) == each.values
            assert table.seconds[row] == len(each.values)
        kept = curves[::2]


def test_a_table_forgets_what_is_not_asked_for() -> None:
    """Years of reports leave no more rows than there are runs, and some to spare."""
    table = CurveTable()
    for _ in range(1000):
        table.rows([curve(0.5), curve(0.25)])
    assert len(table.units) < 300


def test_a_table_forgets_the_shorter_curves_of_a_trial_that_reports_for_long() -> None:
    """One trial of many units takes as much as a few of them, not as one for each report."""
    table = CurveTable()
    for _ in range(60):
        (row,) = table.rows([curve(*[0.5] * 5000)])
        assert table.units[row] == 5000
    assert table.values.nbytes < 10e6
    assert len(table._curves) < 5


def test_one_long_curve_among_many_short_ones() -> None:
    """The table takes what the values take, not as if all were as long as the longest."""
    curves = [curve(*[0.5] * (20 if number else 5000)) for number in range(501)]
    table = CurveTable()
    for place in [*range(501)] * 3:
        curves[place] = curve(*curves[place].values)
        table.rows(curves)
    assert table.values.nbytes < 3 * 15_000 * 8


def test_what_is_asked_again_is_worked_out_once() -> None:
    """Of a curve that was asked for at the last time nothing is worked out again."""
    asked: list[Curve] = []

    def count(each: Curve) -> int:
        asked.append(each)
        return each.units

    table, one, two = CurveCache(count), curve(0.5), curve(0.5, 0.25)
    assert table.each([one, two]) == [1, 2]
    assert table.each([two, one, two]) == [2, 1, 2]
    assert asked == [one, two]


def test_what_is_not_asked_again_is_forgotten() -> None:
    """A trial's earlier curves are let go, however often it reports."""
    table = CurveCache(lambda each: each.units)
    for units in range(1, 100):
        table.each([curve(*[0.5] * units)])
    assert len(table._known) == 1
