"""Predictivity: how much early ranks say about late ones, measured inside a study."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from optuna_hermes.curves import Floats, Places

Flags = NDArray[np.bool_]

USUAL = 0.91
"""Correlation of ranks at an age with those at twice that age, before anything is measured.

Over 32 recorded sets that makes 0.60 from the first of 50 units to the last one.
"""
_WEIGHT = 5.0
"""Trials that the usual correlation counts for."""
_LEAST_TRIALS = 4
_LEAST, _MOST = 0.02, 0.995


class Predictivity:
    """Measures how much early ranks say about late ones, of the same study again and again.

    A correlation is worked out anew only when another trial has got to one of its ages.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[bytes, float]] = {}

    def beyond_usual(self, values: Floats, starts: Places, units: Places, length: int) -> float:
        """Measure by how much more than usual ranks after one unit tell of ranks at the end.

        Args:
            values: of a table of curves [start + unit - 1].
            starts: of trials in it [n].
            units: how many each of them has [n].
            length: units of a whole trial.

        Returns:
            Difference of Fisher's z (the inverse hyperbolic tangent of a correlation), 0 as usual.
        """
        usual = USUAL ** math.log2(max(1, length))
        measured = self.with_end(values, starts, units, 1, length)
        return math.atanh(min(measured, _MOST)) - math.atanh(min(usual, _MOST))

    def with_end(
        self, values: Floats, starts: Places, units: Places, age: int, length: int
    ) -> float:
        """Measure the correlation of ranks at an age with those at the end.

        From each age to twice that age, ranks of the trials that got there are correlated, and the
        correlations multiplied. Who got there was chosen by early ranks, which makes a correlation
        look smaller than it is among all: Thorndike's correction for a restricted range undoes
        that (Personnel Selection, 1949, case 2).

        Args:
            values: of a table of curves [start + unit - 1].
            starts: of trials in it [n].
            units: how many each of them has [n].
            age: in units, at least 1.
            length: units of a whole trial.
        """
        measured = 1.0
        # What is not asked for again is forgotten: a study of unknown length grows with each unit.
        before, self._known = self._known, {}
        while age < length:
            later = min(2 * age, length)
            prior = USUAL ** math.log2(later / age)
            there = units >= later
            if there.sum() < _LEAST_TRIALS:
                measured *= prior
            else:
                had = units >= age
                then, now = values[starts[had] + age - 1], values[starts[there] + later - 1]
                seen = then.tobytes() + there.tobytes() + now.tobytes()
                known = before.get((age, later))
                if known is None or known[0] != seen:
                    known = seen, correlation(then, there[had], now, prior)
                self._known[age, later] = known
                measured *= known[1]
            age = later
        return measured


def correlation(then: Floats, there: Flags, now: Floats, prior: float) -> float:
    """Correlation of ranks at two ages, drawn to the prior where few trials tell of it.

    Args:
        then: values of trials at an age [n].
        there: which of them got to a later age [n].
        now: the values of those at that age.
        prior: as it is usually.
    """
    one, other = _normal_scores(then, then[there]), _normal_scores(now, now)
    # Equal ranks tell nothing. Compared as they are: their mean may be off by rounding.
    if one.min() == one.max() or other.min() == other.max():
        return prior
    one, other = one - one.mean(), other - other.mean()
    spread = math.sqrt(one @ one / len(now))
    product = spread * math.sqrt(other @ other / len(now))
    found = min(float(one @ other) / len(now) / product, 1.0)
    wider = max(1.0, 1.0 / spread)  # normal scores of all have a deviation of 1
    found = found * wider / math.sqrt(1 + found**2 * (wider**2 - 1))
    weight = len(now) - 3
    z = weight * math.atanh(min(max(found, -0.5), _MOST)) + _WEIGHT * math.atanh(prior)
    return max(math.tanh(z / (weight + _WEIGHT)), _LEAST)


def _normal_scores(among: Floats, own: Floats) -> Floats:
    """Quantiles of the normal distribution at the ranks of values among others."""
    ranks = np.sort(among).searchsorted(own) + 0.5
    return np.asarray(ndtri(ranks / len(among)))
