"""Smoothing: how much of the reported values is noise, measured inside a study."""

from __future__ import annotations

import math

import numpy as np

from optuna_hermes.curves import Floats, Places

_LONGEST = 64
"""Differences of a trial that are looked at, the last ones."""
_LEAST_PAIRS = 2
_PRIOR_PAIRS = 20.0
"""Pairs of differences that the assumption of no noise counts for."""
_MOST = 0.8


def smoothing(values: Floats, units: Places) -> float:
    """Measure the weight of the past with which an exponential mean foresees the next values best.

    A curve is taken to be a random walk whose values are reported with independent errors. Its
    differences are then correlated with those before them by ``r = -t / (1 + t**2)``, and the best
    forecast of the next value is the exponential mean that keeps ``t`` of what it was (Muth,
    Journal of the American Statistical Association, 1960). ``r`` is measured in the last half of
    each trial, where curves are nearly flat; where few trials tell of it, it is drawn to 0.

    Args:
        values: of trials [n, units], infinite after a trial's last unit.
        units: how many each has [n].

    Returns:
        A tenth, so that curves are seldom smoothed anew, from 0 (no noise: the last value is what
        counts) to 0.8.

    Example:
        >>> steady = np.linspace(1.0, 0.5, 40)
        >>> noisy = steady + 0.1 * np.random.default_rng(0).standard_normal((5, 40))
        >>> ages = np.full(5, 40)
        >>> smoothing(np.tile(steady, (5, 1)), ages), smoothing(noisy, ages)
        (0.0, 0.5)
    """
    width = min(int(units.max(initial=0)), _LONGEST + 1)
    columns = units[:, None] - width + np.arange(width)
    first = np.maximum(units // 2, units - width)
    there = columns >= first[:, None]
    known = np.take_along_axis(values, np.maximum(columns, 0), axis=1)
    there &= np.isfinite(known)
    known = np.where(there, known, 0.0)
    both = there[:, 1:] & there[:, :-1]
    with np.errstate(over="ignore"):
        steps = np.where(both, known[:, 1:] - known[:, :-1], 0.0)
    largest = np.abs(steps).max(axis=1, initial=0.0)
    tell = (largest > 0) & np.isfinite(largest)
    steps = np.where(tell[:, None], steps, 0.0) / np.where(tell, largest, 1.0)[:, None]
    n_pairs = (both[:, 1:] & both[:, :-1]).sum(axis=1)
    tell &= n_pairs >= _LEAST_PAIRS
    if not tell.any():
        return 0.0
    n_pairs = n_pairs[tell]
    products = (steps[:, 1:] * steps[:, :-1]).sum(axis=1)[tell] / n_pairs
    squares = (steps * steps).sum(axis=1)[tell] / both.sum(axis=1)[tell]
    pooled = float((np.clip(products / squares, -1.0, 1.0) * n_pairs).sum())
    r = min(max(-pooled / float(n_pairs.sum() + _PRIOR_PAIRS), 1e-9), 0.4999)
    past = (1 - math.sqrt(1 - 4 * r * r)) / (2 * r)
    return round(min(past, _MOST), 1)
