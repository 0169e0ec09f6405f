"""What curves show at an age."""

from __future__ import annotations

import math

import pytest

from optuna_hermes.curves import Signal, signals_at
from optuna_hermes.model import Curve


def curve(*values: float) -> Curve:
    steps = tuple(range(1, len(values) + 1))
    return Curve(steps=steps, values=values, device_seconds=tuple(map(float, steps)))


def signal_at(each: Curve, age: int, signal: Signal = "value") -> float:
    """The reading of one curve."""
    return float(signals_at([each], age, signal)[0])


@pytest.mark.parametrize(
    ("signal", "age", "reading"),
    [
        ("value", 1, 8.0),
        ("value", 5, 1.5),
        ("descent", 1, 0.0),
        ("descent", 3, -5.0),
        ("descent", 5, -6.5),
        ("slope", 1, 0.0),
        ("slope", 2, -3.0),
        ("slope", 4, -2.0),
        ("slope", 5, (1.5 - 5.0) / 3),
    ],
)
def test_a_signal_is_read_at_an_age(signal: Signal, age: int, reading: float) -> None:
    """Each signal is the level, the change since the first report or the recent change a unit."""
    assert signal_at(curve(8.0, 5.0, 3.0, 2.0, 1.5), age, signal) == pytest.approx(reading)


def test_a_later_report_changes_nothing_earlier() -> None:
    """What a curve showed at an age stays what it was when the curve goes on."""
    assert signal_at(curve(3.0, 2.0), 2) == signal_at(curve(3.0, 2.0, 9.0), 2)


@pytest.mark.parametrize("signal", ["value", "descent", "slope"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_diverged_is_infinite(signal: Signal, value: float) -> None:
    """NaN and either infinity read as the worst there is, at every age."""
    assert signal_at(curve(value), 1, signal) == math.inf
    assert signal_at(curve(1.0, value), 2, signal) == math.inf


def test_a_curve_that_recovered_is_read_as_it_is() -> None:
    """One NaN report does not spoil the level at later ages, only what is compared with it."""
    assert signal_at(curve(math.nan, 2.0), 2) == 2.0
    assert signal_at(curve(math.nan, 2.0), 2, "descent") == math.inf


def test_curves_are_read_together() -> None:
    """Readings come in the order of the curves, and one that diverged spoils no other."""
    together = signals_at([curve(3.0, 2.0), curve(1.0, math.nan), curve(5.0, 4.5)], 2, "descent")
    assert together.tolist() == [-1.0, math.inf, -0.5]
    assert signals_at([], 1).tolist() == []


def test_huge_values_do_not_warn() -> None:
    """A difference beyond all numbers is a divergence and no warning."""
    assert signal_at(curve(-1.7e308, 1.7e308), 2, "descent") == math.inf


@pytest.mark.parametrize("age", [-1, 0, 3])
def test_an_age_that_a_curve_has_not_is_refused(age: int) -> None:
    """An age outside the curve is an error, not the value at its other end."""
    with pytest.raises(ValueError, match=rf"between 1 and 2 but got {age}"):
        signals_at([curve(2.0, 1.0), curve(3.0, 2.0, 1.0)], age)
