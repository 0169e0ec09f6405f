"""Scores of trials of different ages, for a surrogate: how they rank, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optuna_hermes.curves import Floats, Places, leads, places

NOISE = 0.3, 1.0
"""Variance of a score's noise at a trial's end, and what is added to it at its begin."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of trials, lower is better, and the variances of their noise; both [n]."""

    values: Floats
    noise: Floats


def score(curves: Sequence[Sequence[float]], finals: Sequence[float | None]) -> Scores:
    """Score trials by their rank, by place and lead as ``hermes`` ranks them.

    A trial's score is the value, in some unit, that has its rank among all last values: so what is
    nearly equal stays so. What is worse than the median by more than the best is better counts as
    by so much.

    Args:
        curves: the reported values of each trial, lower is better; at least one value, or a final.
        finals: the value that a trial ended with, None for one that has not ended.
    """
    length = max(1, *map(len, curves))
    values = np.full((len(curves), length), np.inf)
    units = np.empty(len(curves), dtype=np.int64)
    for row, (curve, final) in enumerate(zip(curves, finals, strict=True)):
        values[row, : len(curve)] = curve
        # What ended without reports is as old as the oldest, and was never young.
        units[row] = len(curve) or length
        if final is not None:
            values[row, units[row] - 1] = final
    values[~np.isfinite(values)] = np.inf
    rows = np.arange(len(values))
    last = values[rows, units - 1]
    place = places(last)
    lead = leads(values, rows, units, last, rows)
    share = _shares(units, length, finals)
    order = np.lexsort((place, place * lead))
    ranked = np.empty_like(last)
    ranked[order] = np.sort(last)
    return Scores(values=_bounded(ranked), noise=NOISE[0] + NOISE[1] * (1 - share))


def _bounded(values: Floats) -> Floats:
    """The values, in some unit; those far above the median, or infinite, are put nearer."""
    known = values[np.isfinite(values)]
    if not len(known):
        return np.zeros_like(values)
    unit = float(np.abs(known).max()) or 1.0  # sums of what a float can hold must not overflow
    middle, lowest = float(np.median(known / unit)), float(known.min() / unit)
    return np.asarray(np.minimum(values / unit, middle + (middle - lowest)))


def _shares(units: Places, length: int, finals: Sequence[float | None]) -> Floats:
    """The share of its units that each trial has had, by the longest of them."""
    ended = np.array([final is not None for final in finals])
    return np.asarray(np.where(ended, 1.0, units / length))
