"""Predictivity: how much early ranks say about late ones, measured inside a study."""

from __future__ import annotations

import math

import numpy as np
from scipy.special import ndtri

from optuna_hermes.curves import Floats, Places

USUAL = 0.91
"""Correlation of ranks at an age with those at twice that age, before anything is measured.

Over 32 recorded sets that makes 0.60 from the first of 50 units to the last one.
"""
_WEIGHT = 5.0
"""Trials that the usual correlation counts for."""
_LEAST_TRIALS = 4
_LEAST, _MOST = 0.02, 0.995


def predictivity(values: Floats, units: Places, length: int) -> float:
    """Measure by how much more than usual ranks after one unit tell of ranks at the end.

    Args:
        values: of trials [n, units], infinite after a trial's last unit.
        units: how many each has [n].
        length: units of a whole trial.

    Returns:
        Difference of Fisher's z (the inverse hyperbolic tangent of a correlation), 0 as usual.
    """
    usual = USUAL ** math.log2(max(1, length))
    measured = correlation_with_end(values, units, 1, length)
    return math.atanh(min(measured, _MOST)) - math.atanh(min(usual, _MOST))


def correlation_with_end(values: Floats, units: Places, age: int, length: int) -> float:
    """Measure the correlation of ranks at an age with those at the end.

    From each age to twice that age, ranks of the trials that got there are correlated, and the
    correlations multiplied. Who got there was chosen by early ranks, which makes a correlation
    look smaller than it is among all: Thorndike's correction for a restricted range undoes that
    (Personnel Selection, 1949, case 2).

    Args:
        values: of trials [n, units], infinite after a trial's last unit.
        units: how many each has [n].
        age: in units, at least 1.
        length: units of a whole trial.
    """
    measured = 1.0
    while age < length:
        later = min(2 * age, length)
        prior = USUAL ** math.log2(later / age)
        measured *= _correlation(values, units, age, later, prior)
        age = later
    return measured


def _correlation(values: Floats, units: Places, age: int, later: int, prior: float) -> float:
    """Correlation of ranks at two ages, drawn to the prior where few trials tell of it."""
    there = units >= later
    n = int(there.sum())
    if n < _LEAST_TRIALS:
        return prior
    one = _normal_scores(values[units >= age, age - 1], values[there, age - 1])
    other = _normal_scores(values[there, later - 1], values[there, later - 1])
    one, other = one - one.mean(), other - other.mean()
    spread = math.sqrt(one @ one / n)
    product = spread * math.sqrt(other @ other / n)
    if not product > 0:
        return prior
    found = min(float(one @ other) / n / product, 1.0)
    wider = max(1.0, 1.0 / spread)  # normal scores of all have a deviation of 1
    found = found * wider / math.sqrt(1 + found**2 * (wider**2 - 1))
    weight = n - 3
    z = weight * math.atanh(min(max(found, -0.5), _MOST)) + _WEIGHT * math.atanh(prior)
    return max(math.tanh(z / (weight + _WEIGHT)), _LEAST)


def _normal_scores(among: Floats, own: Floats) -> Floats:
    """Quantiles of the normal distribution at the ranks of values among others."""
    ranks = np.sort(among).searchsorted(own) + 0.5
    return np.asarray(ndtri(ranks / len(among)))
