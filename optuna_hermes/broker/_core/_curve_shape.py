"""Shape of a curve for a viewer. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

from optuna_hermes.model import Curve

POINTS = 40
"""Most values of a curve that are shown: as many as a line of a screen has room for."""

SLOPE_UNITS = 8
"""Most units over which a slope is measured."""


class CurveShape(NamedTuple):
    """Shape of a curve.

    Args:
        values: of units that are about equally far from each other, the first and the last among
            them; lower is better. None for what is not finite.
        slope: by how much the value has changed in a unit, of late; None if that is unknown.
    """

    values: tuple[float | None, ...]
    slope: float | None


def shape_of(curve: Curve) -> CurveShape:
    """Return the shape of a curve, in few values.

    Example:
        >>> shape_of(Curve(steps=(1, 2), values=(3.0, 1.0), device_seconds=(1.0, 2.0)))
        CurveShape(values=(3.0, 1.0), slope=-2.0)
    """
    values = tuple(v if math.isfinite(v) else None for v in _thinned(curve.values))
    return CurveShape(values, slope_of(curve.values))


def slope_of(values: tuple[float, ...]) -> float | None:
    """Change of values in a unit, over their last half or ``SLOPE_UNITS``.

    Example:
        >>> slope_of((8.0, 4.0, 3.0, 2.0)), slope_of((8.0,))
        (-1.0, None)
    """
    units = min(SLOPE_UNITS, max(1, len(values) // 2))
    if len(values) <= units:
        return None
    slope = (values[-1] - values[-1 - units]) / units
    return slope if math.isfinite(slope) else None


def _thinned(values: tuple[float, ...]) -> tuple[float, ...]:
    last = len(values) - 1
    if last < POINTS:
        return values
    return tuple(values[round(i * last / (POINTS - 1))] for i in range(POINTS))
