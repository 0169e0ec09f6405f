"""Freeze-thaw: curves are extrapolated with uncertainty, and the likeliest improvement goes on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optuna_hermes.curves import CurveCache
from optuna_hermes.model import Curve, Decision, Snapshot, TrialView
from optuna_hermes.policies.base import Policy, opened, place, with_openings

# Exponents of the power laws that are averaged over.
EXPONENTS = np.array([0.15, 0.4, 0.8, 1.5])
# Expected noise of a report, in spans between the median first value and the best one.
NOISE = 0.03
# Weight of that expectation, in reports.
NOISE_REPORTS = 2.0
# Expected size of a curve's fall, past or to come, in such spans.
SPREAD = 1.0
# Bounds of the improvement that a random horizon looks for, as powers of ten, in spans.
IMPROVEMENTS = (-4.0, -1.0)
# Values beyond count as infinite, and no span is below its inverse: squares stay finite.
HUGE = 1e60

Array = NDArray[np.float64]


class FreezeThaw(Policy):
    """Goes on with the trial that, extrapolated, is likeliest to beat the best value seen.

    Swersky, Snoek and Adams, "Freeze-Thaw Bayesian Optimization", arXiv 1406.3896, 2014: training
    curves are extrapolated with uncertainty, trials are paused and resumed, and an acquisition
    function chooses among them. Here it is the probability that a trial is below a target some
    units from now, both drawn anew for every decision, as in Rakotoarison et al., "In-Context
    Freeze-Thaw Bayesian Optimization" (ifBO), ICML 2024.

    This project's own: a curve is a power law ``a + b * unit ** -c`` with noise instead of a
    Gaussian process; ``c`` is averaged over a small grid, and ``a`` and ``b`` have the closed form
    of Bayesian linear regression with a conjugate prior, later reports weighing more. Parameters
    of the trials are not used. A span is the distance between the median first value and the
    best one of all trials. A trial whose last value is NaN or infinite goes last. New trials are
    opened as by ``with_openings``.
    """

    def __init__(self) -> None:
        self._moments = CurveCache(moments_of)
        self._lowest = CurveCache(_lowest)

    def decide(self, snapshot: Snapshot) -> Decision:
        order = with_openings(snapshot, self._ranked(snapshot))
        return Decision(assignments=place(snapshot, order))

    def _ranked(self, snapshot: Snapshot) -> Iterator[TrialView]:
        waiting = [trial for trial in opened(snapshot) if trial.curve.values]
        hopeful = [trial for trial in waiting if _is_number(trial.curve.values[-1])]
        if hopeful:
            scores = self._scores(snapshot, hopeful)
            # Stable: trials are in the order of their numbers, and of equal ones the first leads.
            yield from (hopeful[i] for i in np.argsort(-scores, kind="stable").tolist())
        yield from (trial for trial in waiting if not _is_number(trial.curve.values[-1]))

    def _scores(self, snapshot: Snapshot, trials: Sequence[TrialView]) -> Array:
        best, span, n_units = self._landscape(snapshot)
        moments = self._moments.each(trial.curve for trial in trials)
        # A trial of unknown length is taken to have half of its life before it.
        ages = np.array([trial.curve.units for trial in trials], dtype=float)
        left = np.array(
            [len(r.curve.values) if r.units_left is None else max(r.units_left, 1) for r in trials],
            dtype=float,
        )
        # A new draw once a unit is reported, the same one for the same snapshot.
        rng = np.random.default_rng([abs(snapshot.seed), n_units])
        # The horizon is even up to what the longest trial has left, the improvement from 0.01 % to
        # 10 % of the span even in its logarithm, as in ifBO.
        horizon = rng.integers(1, int(left.max()) + 1)
        target = best - span * 10.0 ** rng.uniform(*IMPROVEMENTS)
        forecast = extrapolate(moments, ages + np.minimum(left, horizon), span)
        # The probability is a growing function of this, so the order is the same.
        likely: Array = (target - forecast.mean) / forecast.deviation
        return likely

    def _landscape(self, snapshot: Snapshot) -> tuple[float, float, int]:
        """The best value seen, the span down to it, and the number of units in all."""
        curves = [
            trial.curve for trial in (*snapshot.trials, *snapshot.finished) if trial.curve.values
        ]
        firsts = [curve.values[0] for curve in curves if _is_number(curve.values[0])]
        best = min(self._lowest.each(curves), default=math.inf)
        span = float(np.median(firsts)) - best if firsts else 0.0
        return best, max(span, 1 / HUGE), sum(curve.units for curve in curves)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Means and standard deviations of forecast values, one for each curve."""

    mean: Array
    deviation: Array


def extrapolate(curves: Sequence[Array], units: Array, span: float) -> Forecast:
    """Forecast curves, given by their moments, at one unit each, as power laws with noise.

    ``span`` is the scale on which curves fall, above 0.
    """
    moments = np.concatenate(curves).reshape(len(curves), 3, -1)
    n = len(EXPONENTS)
    weight, total, square = (moments[:, i, n, None] for i in range(3))
    sum_x, sum_xx, sum_xv = (moments[:, i, :n] for i in range(3))
    last = moments[:, 0, n + 1]
    total, square, sum_xv = total / span, square / span**2, sum_xv / span
    prior = (NOISE / SPREAD) ** 2
    aa, bb = weight + prior, sum_xx + prior
    determinant = aa * bb - sum_x**2
    level = (bb * total - sum_x * sum_xv) / determinant
    factor = (aa * sum_xv - sum_x * total) / determinant
    # Of a curve without noise rounding may leave a little less than 0.
    misfit = np.maximum(square - level * total - factor * sum_xv, 0.0)
    freedom = NOISE_REPORTS + weight
    variance = (NOISE_REPORTS * NOISE**2 + misfit) / freedom
    evidence = -0.5 * (np.log(determinant) + freedom * np.log(variance))
    # The largest is taken away first, so that not all of them underflow to 0.
    chance = np.exp(evidence - evidence.max(axis=1, keepdims=True))
    chance /= chance.sum(axis=1, keepdims=True)
    ahead = units[:, None] ** -EXPONENTS
    means = level + factor * ahead
    doubt = (bb - 2 * sum_x * ahead + aa * ahead**2) / determinant
    mean = (chance * means).sum(axis=1)
    spread = (chance * (variance * (1 + doubt) + (means - mean[:, None]) ** 2)).sum(axis=1)
    return Forecast(mean=last + span * mean, deviation=span * np.sqrt(spread))


def moments_of(curve: Curve) -> Array:
    """Weighted sums over a curve's reports, taken from its last value, which is finite.

    Returns:
        [3 * (exponents + 2)]: for each exponent the sums of x, x * x and x * value, x being
        ``unit ** -exponent``; then those of 1, value and value * value; then the last value.
    """
    reports = np.array(curve.values)
    units = 1.0 + np.flatnonzero(np.abs(reports) < HUGE)
    reports = reports[units.astype(int) - 1]
    last = reports[-1]
    reports = reports - last
    weights = units / units[-1]
    x = units ** -EXPONENTS[:, None]
    rows = np.stack(
        [
            [*(x @ weights), weights.sum(), last],
            [*(x**2 @ weights), weights @ reports, 0.0],
            [*(x @ (weights * reports)), weights @ reports**2, 0.0],
        ]
    ).ravel()
    # The cache hands the same array out again and again.
    rows.flags.writeable = False
    return rows


def _lowest(curve: Curve) -> float:
    return min((value for value in curve.values if _is_number(value)), default=math.inf)


def _is_number(value: float) -> bool:
    return abs(value) < HUGE
