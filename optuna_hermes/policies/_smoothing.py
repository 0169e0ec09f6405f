"""Smoothing: how much of the reported values is noise, measured inside a study."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from optuna_hermes.model import Curve

_LONGEST = 64
"""Differences of a trial that are looked at, the last ones."""
_LEAST_PAIRS = 2
_PRIOR_PAIRS = 20.0
"""Pairs of differences that the assumption of no noise counts for."""
_MOST = 0.8


class Noise(NamedTuple):
    """Evidence of noise in one curve.

    Args:
        correlation: of differences between values with the differences before them, from -1 to 1.
        pairs: of differences that it was measured on, 0 where it tells nothing.
    """

    correlation: float
    pairs: int


def noise(curve: Curve) -> Noise:
    """Correlate the differences in the last half of a curve, where it is nearly flat.

    A difference from or to a value that is not finite counts as none.
    """
    values = np.array(curve.values[max(curve.units // 2, curve.units - _LONGEST - 1) :])
    known = np.isfinite(values)
    both = known[1:] & known[:-1]
    pairs = int((both[1:] & both[:-1]).sum())
    if pairs < _LEAST_PAIRS:
        return Noise(0.0, 0)
    values[~known] = 0.0
    with np.errstate(over="ignore"):
        steps = np.where(both, values[1:] - values[:-1], 0.0)
    largest = np.abs(steps).max()
    if not 0 < largest < math.inf:
        return Noise(0.0, 0)
    steps /= largest
    product, square = float(steps[1:] @ steps[:-1]) / pairs, float(steps @ steps) / int(both.sum())
    return Noise(min(max(product / square, -1.0), 1.0), pairs)


def smoothing(noises: Iterable[Noise]) -> float:
    """Measure the weight of the past with which an exponential mean foresees the next values best.

    A curve is taken to be a random walk whose values are reported with independent errors. Its
    differences are then correlated with those before them by ``r = -t / (1 + t**2)``, and the best
    forecast of the next value is the exponential mean that keeps ``t`` of what it was (Muth,
    Journal of the American Statistical Association, 1960). Where few trials tell of ``r``, it is
    drawn to 0.

    Args:
        noises: of the study's curves.

    Returns:
        A tenth, so that curves are seldom smoothed anew, from 0 (no noise: the last value is what
        counts) to 0.8.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> def curve(values):
        ...     units = tuple(range(1, len(values) + 1))
        ...     return Curve(steps=units, values=tuple(values), device_seconds=units)
        >>> steady = np.linspace(1.0, 0.5, 40)
        >>> noisy = [curve(steady + 0.1 * rng.standard_normal(40)) for _ in range(5)]
        >>> smoothing(map(noise, [curve(steady)])), smoothing(map(noise, noisy))
        (0.0, 0.5)
    """
    pooled, pairs = 0.0, 0
    for each in noises:
        pooled += each.correlation * each.pairs
        pairs += each.pairs
    r = min(max(-pooled / (pairs + _PRIOR_PAIRS), 1e-9), 0.4999)
    past = (1 - math.sqrt(1 - 4 * r * r)) / (2 * r)
    return round(min(past, _MOST), 1)
