"""Standing of a trial among those of its study: its rank at equal age, and what that promises."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from scipy.special import ndtr, ndtri

from optuna_hermes.curves import CurveTable
from optuna_hermes.model import Curve
from optuna_hermes.policies._predictivity import Predictivity
from optuna_hermes.policies._smoothing import noise, smoothing


@dataclass(frozen=True, kw_only=True)
class Standing:
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


def standing(curves: Mapping[int, Curve], number: int) -> Standing | None:
    """Rank a trial among all of a study; None if it has no finite value.

    Ranks now and at the end, on a normal scale, are taken to be jointly normal, correlated as
    they were found to be in this study.

    Args:
        curves: of all trials by number, lower is better.
        number: of the trial.

    Example:
        >>> def curve(*values):
        ...     units = tuple(range(1, len(values) + 1))
        ...     return Curve(steps=units, values=values, device_seconds=units)
        >>> standing({0: curve(0.9, 0.7), 1: curve(0.5), 2: curve(0.8, 0.8)}, 2).rank
        2
    """
    known = {each: curve for each, curve in curves.items() if curve.values}
    if number not in known or not math.isfinite(known[number].values[-1]):
        return None
    table = CurveTable()
    rows = table.rows(list(known.values()))
    units = table.units[rows]
    means = table.smoothed(smoothing(map(noise, known.values())))[rows]
    age = known[number].units
    then = means[units >= age, age - 1]
    rank = 1 + int((then < means[list(known).index(number), age - 1]).sum())
    found = Predictivity().with_end(table.values, rows, units, age, int(units.max()))
    score = -float(ndtri((rank - 0.5) / len(then)))
    best = -float(ndtri(1 / len(known))) if len(known) > 1 else -math.inf
    chance = float(ndtr((found * score - best) / math.sqrt(max(1 - found**2, 1e-6))))
    return Standing(rank=rank, among=len(then), units=age, chance=chance)
