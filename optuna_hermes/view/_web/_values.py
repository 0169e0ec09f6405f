"""Values and states of the web page's JSON; pure functions."""

from __future__ import annotations

import math
from typing import Any

Json = dict[str, Any]

DIGITS = 6
"""Significant digits of values: more than a screen has pixels."""

OVER = ("done", "failed")
LIVE = ("running", "parked")


def rounded(value: float | None) -> float | None:
    """A value for JSON, rounded; None for NaN and infinity, which JSON lacks."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{DIGITS}g}")
