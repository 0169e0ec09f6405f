"""What curves show at an age: pure arithmetic on reported values, lower is better."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from optuna_hermes.model import Curve

Signal = Literal["value", "descent", "slope"]
"""``value``: the level. ``descent``: the change since the first report. ``slope``: the change a
unit over the last ``SLOPE_WINDOW`` units."""

SLOPE_WINDOW = 3


def signals_at(curves: Sequence[Curve], age: int, signal: Signal = "value") -> NDArray[np.float64]:
    """Read curves as they were after their first ``age`` units.

    Args:
        curves: the reports of some runs, at least ``age`` units of each.
        age: units, at least 1.
        signal: what to read.

    Returns:
        A reading for each curve, lower is better: the more a curve fell, the more negative its
        ``descent`` or ``slope``, and both are 0 at age 1. Infinity where the value, or the one it
        is compared with, is NaN or infinite.

    Raises:
        ValueError: ``age`` is below 1, or a curve is younger.
    """
    youngest = min((curve.units for curve in curves), default=age)
    if not 1 <= age <= youngest:
        raise ValueError(f"age must be between 1 and {youngest} but got {age}.")
    readings = _values(curves, age)
    if signal != "value":
        span = age - 1 if signal == "descent" else min(SLOPE_WINDOW, age - 1)
        # The difference of two infinite values is NaN, and that of two huge ones infinite.
        with np.errstate(invalid="ignore", over="ignore"):
            readings -= _values(curves, age - span)
        if signal == "slope":
            readings /= max(span, 1)
    readings[~np.isfinite(readings)] = np.inf
    return readings


def _values(curves: Sequence[Curve], age: int) -> NDArray[np.float64]:
    return np.array([curve.values[age - 1] for curve in curves], dtype=np.float64)
