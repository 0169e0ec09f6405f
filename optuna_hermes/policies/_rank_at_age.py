"""Rank of a trial among those of its study at equal age, and what that promises."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, ndtri

from optuna_hermes.curves import CurveTable
from optuna_hermes.model import Curve
from optuna_hermes.policies._predictivity import Predictivity
from optuna_hermes.policies._smoothing import noise, smoothing


@dataclass(frozen=True, kw_only=True)
class RankAtAge:
    """Rank of a trial among those that were as old as it is, by their smoothed values.

    Args:
        rank: 1 and the number of those that were lower then.
        among: their number, itself included.
        units: its age.
        chance: estimated probability that it ends as the best of all that have begun.
    """

    rank: int
    among: int
    units: int
    chance: float


def rank_at_age(
    curves: Mapping[int, Curve], number: int, length: int | None = None
) -> RankAtAge | None:
    """Rank a trial among all of a study; None if it has no finite value.

    The chance is that of its place among all, each pair compared at the age of the younger one.
    Places now and at the end, on a normal scale, are taken to be jointly normal, correlated as
    ranks were found to be in this study.

    Args:
        curves: of all trials by number, lower is better.
        number: of the trial.
        length: units of a whole training; if None, twice as many as the oldest trial has.

    Example:
        >>> def curve(*values):
        ...     units = tuple(range(1, len(values) + 1))
        ...     return Curve(steps=units, values=values, device_seconds=units)
        >>> rank_at_age({0: curve(0.9, 0.7), 1: curve(0.5), 2: curve(0.8, 0.8)}, 2).rank
        2
    """
    known = {each: curve for each, curve in curves.items() if curve.values}
    if number not in known or not math.isfinite(known[number].values[-1]):
        return None
    table = CurveTable()
    rows = table.rows(list(known.values()))
    starts, units = table.starts[rows], table.units[rows]
    means = table.smoothed(smoothing(map(noise, known.values())))
    age = known[number].units
    start = starts[list(known).index(number)]
    then = means[starts[units >= age] + age - 1]
    rank = 1 + int((then < means[start + age - 1]).sum())
    oldest = int(units.max())
    length = 2 * oldest if length is None else max(length, oldest)
    found = Predictivity().with_end(table.values, starts, units, age, length)
    # Those that got as old as it is were chosen for their ranks: among them its rank says less.
    ages = np.minimum(units, age) - 1
    ahead = int((means[starts + ages] < means[start + ages]).sum())
    score = -float(ndtri((ahead + 0.5) / len(known)))
    best = -float(ndtri(1 / len(known)))
    chance = float(ndtr((found * score - best) / math.sqrt(max(1 - found**2, 1e-6))))
    return RankAtAge(rank=rank, among=len(then), units=age, chance=chance)
