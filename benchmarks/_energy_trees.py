"""The highest demand of the next hour, forecast by trees from the demand of the past."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optuna_hermes.cluster.energy import AHEAD_TICKS, DAY_TICKS, LEARNING_TICKS, seasonal_rise

WEEK_TICKS = 7 * DAY_TICKS

# Quantile of demand that is forecast; the buffer covers demand above it.
QUANTILE = 0.5
# Lengths in ticks of the windows over which features are taken.
WINDOWS = (3, 6, 18, 36, DAY_TICKS)

TREES = 60

Array = NDArray[np.float64]


def expected_peak(peaks: Sequence[int]) -> float:
    """The highest demand to expect in the next ``AHEAD_TICKS`` ticks.

    With LightGBM it is a quantile of gradient boosted trees, without it ``seasonal_peak``; while
    the history is too short it is the last peak.

    Args:
        peaks: the highest demand of each tick, oldest first; the last one is over.
    """
    if len(peaks) < LEARNING_TICKS:
        return seasonal_peak(peaks)
    # History begins with a whole day, so that an index modulo ``DAY_TICKS`` is a time of day, and
    # the trees are fitted anew when the past is a day longer.
    model = _fitted(tuple(peaks[: len(peaks) - len(peaks) % DAY_TICKS]))
    if model is None:
        return seasonal_peak(peaks)
    past = np.asarray(peaks, dtype=float)
    now = features(past, np.array([len(past) - 1]))
    return float(past[-1] + max(0.0, model.predict(now)[0]))


def seasonal_peak(peaks: Sequence[int]) -> float:
    """The last peak plus the mean rise of demand at this time of the days before."""
    return float(peaks[-1]) + seasonal_rise(peaks) if peaks else 0.0


def features(past: Array, at: NDArray[np.int64]) -> Array:
    """Features of the history at the ends of ticks [tick, feature]; NaN where it is too short."""
    # The row of tick i must read past[:i + 1] only, or the forecast would know the future.
    here = past[at]
    columns = [here, at % DAY_TICKS]
    for width in WINDOWS:
        window = _before(past, at, width)
        columns += [window.max(axis=1) - here, window.mean(axis=1) - here, here - window[:, 0]]
    for lag in (DAY_TICKS, WEEK_TICKS):
        # The hour after this time of an earlier day is known by now: the horizon is under a day.
        later = _before(past, at - lag + AHEAD_TICKS, AHEAD_TICKS)
        columns += [_before(past, at - lag, 1)[:, 0] - here, later.max(axis=1) - here]
    return np.column_stack(columns)


def _before(past: Array, at: NDArray[np.int64], width: int) -> Array:
    places = at[:, None] - np.arange(width - 1, -1, -1)
    return np.where(places < 0, np.nan, past[np.maximum(places, 0)])


@lru_cache(maxsize=4)
def _fitted(peaks: tuple[int, ...]) -> Any:
    try:
        import lightgbm
    except ImportError:
        return None
    past = np.asarray(peaks, dtype=float)
    # Targets must lie in the history too, so the last ``AHEAD_TICKS`` ticks give no rows.
    at = np.arange(len(past) - AHEAD_TICKS)
    ahead = np.lib.stride_tricks.sliding_window_view(past[1:], AHEAD_TICKS).max(axis=1)
    rises = np.maximum(0.0, ahead - past[at])
    settings = {
        "objective": "quantile",
        "alpha": QUANTILE,
        "num_leaves": 15,
        "min_data_in_leaf": 20,
        "deterministic": True,
        "seed": 0,
        "num_threads": 1,
        "verbose": -1,
    }
    return lightgbm.train(settings, lightgbm.Dataset(features(past, at), rises), TREES)
