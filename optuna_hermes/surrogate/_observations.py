"""Observations of trials at several ages, for a surrogate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optuna_hermes.curves import Floats, Places

FARTHEST = 5.0
"""Nearer, what bad trials have in common is lost; farther, the differences of good ones are."""


@dataclass(frozen=True, kw_only=True)
class Observations:
    """Values of trials at some ages, those of one trial following one another.

    Args:
        trials: the index of each observation's trial [n].
        ages: binary logarithms of ages in units, ascending within a trial [n].
        values: lower is better, finite, in some unit [n].
        end: the largest age that any trial has.
    """

    trials: Places
    ages: Floats
    values: Floats
    end: float

    def of(self, trials: Sequence[int]) -> Observations:
        """Return the observations of some trials, which are counted in this order."""
        rows = [np.flatnonzero(self.trials == trial) for trial in trials]
        at = np.concatenate(rows)
        numbers = np.repeat(np.arange(len(rows)), [len(each) for each in rows])
        return Observations(
            trials=numbers, ages=self.ages[at], values=self.values[at], end=self.end
        )

    def last(self) -> tuple[Floats, Floats]:
        """Return the last age of each trial, and its value then [number of trials]."""
        rows = np.searchsorted(self.trials, np.arange(self.trials[-1] + 1), side="right") - 1
        return self.ages[rows], self.values[rows]

    def and_at_end(self, values: Floats) -> Observations:
        """Return these and one more trial for each of some values that it has at the end."""
        first = int(self.trials[-1]) + 1
        return Observations(
            trials=np.append(self.trials, np.arange(first, first + len(values))),
            ages=np.append(self.ages, np.full(len(values), self.end)),
            values=np.append(self.values, values),
            end=self.end,
        )


def observe(curves: Sequence[Sequence[float]], finals: Sequence[float | None]) -> Observations:
    """Observe each trial after 1, 2, 4, ... units and after its last one.

    What is worse than the median by more than ``FARTHEST`` times as much as the best is better
    counts as by so much. NaN and infinite values count as worse than the median by as much as the
    best is better: what fails near a border says little of what is beside it.

    Args:
        curves: the reported values of each trial, lower is better; at least one value, or a final.
        finals: the value that a trial ended with, None for one that has not ended.
    """
    length = max(1, *map(len, curves))
    trials, ages, values = [], [], []
    for number, (curve, final) in enumerate(zip(curves, finals, strict=True)):
        # What ended without reports is as old as the oldest, and was never young.
        units = len(curve) or length
        seen = [2**power for power in range(units.bit_length()) if 2**power < units and curve]
        trials += [number] * (len(seen) + 1)
        ages += [math.log2(unit) for unit in (*seen, units)]
        values += [curve[unit - 1] for unit in seen]
        values.append(curve[-1] if final is None else final)
    return Observations(
        trials=np.array(trials, dtype=np.int64),
        ages=np.array(ages),
        values=_bounded(np.array(values, dtype=np.float64)),
        end=math.log2(length),
    )


def _bounded(values: Floats) -> Floats:
    """The values' distances from their median, in some unit; far or infinite ones are less."""
    known = values[np.isfinite(values)]
    if not len(known):
        return np.zeros_like(values)
    unit = float(np.abs(known).max()) or 1.0  # sums of what a float can hold must not overflow
    middle, lowest = float(np.median(known / unit)), float(known.min() / unit)
    # Where half of all are the best, what is worse keeps its place.
    better = middle - lowest or float(np.ptp(known / unit)) / FARTHEST
    finite = np.where(np.isfinite(values), values / unit, middle + better)
    apart = np.minimum(finite, middle + FARTHEST * better) - middle
    # Anew: beside a huge value, which is near now, or beside their own size, as of energies, their
    # differences were all but 0.
    return np.asarray(apart / (float(np.abs(apart).max()) or 1.0))
