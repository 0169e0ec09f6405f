"""SLAQ: the largest predicted loss reduction goes first."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from optuna_hermes.curves import CurveCache
from optuna_hermes.model import Decision, Snapshot, TrialView
from optuna_hermes.policies.base import Policy, opened, place, with_openings

# Reports that a fit looks back on; the weight of older ones would be below 5 %.
WINDOW = 30
# Weight of a report against that of the one after it.
DECAY = 0.9
# Number of reports that a fit needs.
FEWEST = 3
# Distances of the asymptote below the lowest report that are tried, in spans of the reports.
ASYMPTOTES = np.array([0.01, 0.03, 0.1, 0.3, 1.0, 3.0])[:, None]


class Slaq(Policy):
    """Gives the next slice to the trial with the largest predicted normalised fall of its loss.

    Zhang et al., "SLAQ: Quality-Driven Scheduling for Distributed Machine Learning", SoCC 2017:
    a trial's loss changes are divided by its largest change so far, the loss after one more unit
    is predicted by a fit of ``1 / (a k^2 + b k + c) + d`` to its reports in which recent ones
    weigh more, and a new trial counts as 1, the largest value possible. Only the paper's sublinear
    form is fitted here.

    This project's own: ``d`` is taken from a small grid and the rest by least squares in closed
    form; under 3 reports, or where no fit falls all the way, the last fall is expected once more.
    A trial whose last value is NaN or infinite goes last, and one that has stopped improving may
    wait for as long as any other improves. New trials are opened as by ``with_openings``.
    """

    def __init__(self) -> None:
        self._falls = CurveCache(lambda curve: predicted_reduction(curve.values))

    def decide(self, snapshot: Snapshot) -> Decision:
        order = with_openings(snapshot, self._ranked(snapshot))
        return Decision(assignments=place(snapshot, order))

    def _ranked(self, snapshot: Snapshot) -> Iterator[TrialView]:
        waiting = opened(snapshot)
        falls = self._falls.each(trial.curve for trial in waiting)
        # Stable, also in reverse: trials are in the order of their numbers.
        by_fall = sorted(range(len(waiting)), key=falls.__getitem__, reverse=True)
        yield from (waiting[index] for index in by_fall)


def predicted_reduction(values: tuple[float, ...]) -> float:
    """The predicted fall of a curve with its next unit, in parts of its largest change so far.

    1 for a curve of one report or none, -1 where the last value is NaN or infinite.
    """
    if not values:
        return 1.0
    if not math.isfinite(values[-1]):
        return -1.0
    if len(values) == 1:
        return 1.0
    reports = np.array(values)
    units = np.flatnonzero(np.isfinite(reports))
    # Changes between values near the ends of the range are infinite: then there is no forecast.
    with np.errstate(over="ignore"):
        reports = reports[units]
        largest = float(np.abs(np.diff(reports)).max(initial=0.0))
    if not 0 < largest < math.inf:
        return 0.0
    reports = (reports - reports[-1]) / largest
    fitted = _fitted_fall(units[-WINDOW:], reports[-WINDOW:])
    return max(0.0, float(reports[-2])) if fitted is None else fitted


def _fitted_fall(units: NDArray[np.intp], reports: NDArray[np.float64]) -> float | None:
    """The fall of the fitted curve with the next unit, None if no fit falls all the way."""
    lowest, span = float(reports.min()), float(np.ptp(reports))
    if len(reports) < FEWEST or not 0 < span < 1 / _TINY:
        return None
    spread = float(units[-1] - units[0])
    # The last column is the unit to come.
    ages = np.append(units - units[-1], 1.0) / spread
    powers = ages ** np.arange(5)[:, None]
    heights = reports - (lowest - ASYMPTOTES * span)
    recency = DECAY ** (units[-1] - units)
    # The fit is linear in 1 / height: weighting by height ** 4 makes its errors those of heights.
    weights = recency * (heights / span) ** 4
    moments = (weights @ powers[:, :-1].T)[:, _HANKEL]
    moments += _TINY * moments[:, :1, :1] * np.eye(3)
    targets = (weights / heights) @ powers[:3, :-1].T
    inverse = np.linalg.solve(moments, targets[:, :, None])[:, :, 0] @ powers[:3]
    falls = (inverse[:, 0] > 0) & (np.diff(inverse, axis=1) > 0).all(axis=1)
    if not falls.any():
        return None
    fitted = 1 / np.where(falls[:, None], inverse, 1.0)
    errors = recency * (fitted[:, :-1] - heights) ** 2
    best = np.where(falls, errors.sum(axis=1), np.inf).argmin()
    return float(fitted[best, -2] - fitted[best, -1])


# Indices of the sums of powers in the matrix of the normal equations.
_HANKEL = np.add.outer(np.arange(3), np.arange(3))
# Keeps the equations solvable where reports are nearly equal.
_TINY = 1e-12
