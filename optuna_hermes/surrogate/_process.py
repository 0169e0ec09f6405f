"""Gaussian process over parameters and age: how trials go on, from partial curves of others."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_solve, solve_triangular
from scipy.optimize import minimize

from optuna_hermes.curves import Floats, Places
from optuna_hermes.surrogate._observations import Observations

MOST_FITTED = 120
"""Observations that settings are fitted to: more would not change them much."""
OPTIMISM = 1.0
"""Standard deviations by which a trial may be better than expected."""
_JITTER = 1e-6
_STEPS = 20
# Amplitudes are variances of observations whose variance is 1. A dimension matters little until
# the observations say otherwise, and so does what a trial has of its own.
_SCALE = math.log(1.2)
_OTHERS = tuple(map(math.log, (0.5, 0.5, 0.1, 3.0, 0.02, 0.3, 0.2)))
_DEVIATIONS = (1.0, 1.0, 1.0, 1.0, 1.5, 1.0, 0.7)
_SCALE_BOUNDS = math.log(0.05), math.log(20.0)
_AMPLITUDE = 1e-3, 10.0
_BOUNDS = tuple(
    (math.log(low), math.log(high))
    for low, high in (
        _AMPLITUDE, _AMPLITUDE, _AMPLITUDE, (0.3, 60.0), (1e-4, 1.0), _AMPLITUDE, (0.02, 1.5),
    )
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class KernelSettings:
    """Logarithms of what the kernel is made of.

    Args:
        scales: inverse length scales of the parameters [d].
        others: variances of what stays the same at all ages, of what changes with age, and of what
            a trial has of its own; doublings of age in which the latter two change; variance of
            the noise; the variance by which the mean of all trials changes in a doubling; and the
            rate at which all but that mean shrinks with a doubling [7].
    """

    scales: Floats
    others: Floats

    @staticmethod
    def prior(n_dimensions: int) -> KernelSettings:
        """The settings without any observation."""
        return KernelSettings(scales=np.full(n_dimensions, _SCALE), others=np.array(_OTHERS))


class Process:
    """Gaussian process on values of trials at several ages, over their parameters and age.

    The covariance of two observations is ``(a + b * c) * m``, where ``m`` is the Matern 5/2 kernel
    of the parameters with a length scale for each and ``c`` falls exponentially with the distance
    of the logarithms of their ages; two of one trial have ``e * c`` more. So what parameters do
    may change with age, and how is learned from all trials, those that are young among them. All
    this, and the noise, is less by ``exp(-r)`` for each doubling of age: losses come nearer to
    each other while they fall, and differences of old trials count for what they are there. The
    mean of all trials walks at random from one age to the next: two observations have ``g`` times
    the lesser of their logarithmic ages more. It is found together with the rest, since trials
    that grow old were better than others while they were young. The idea is that of Swersky, Snoek
    and Adams, "Freeze-Thaw Bayesian Optimization", 2014; the kernel is this project's own.

    Args:
        points: of the unit cube, one for each observation [n, d].
        observed: the observations, at least one.
        settings: the most probable ones if None.

    Example:
        >>> import numpy as np
        >>> from optuna_hermes.surrogate import observe
        >>> points = np.linspace(0, 1, 9)[:, None]
        >>> observed = observe([[value] for value in np.sin(3 * points[:, 0])], [None] * 9)
        >>> process = Process(points[observed.trials], observed)
        >>> mean, deviation = process.predict(np.array([[0.1], [0.5]]), age=0.0)
        >>> bool(mean[0] < mean[1])
        True
    """

    def __init__(
        self, points: Floats, observed: Observations, settings: KernelSettings | None = None
    ) -> None:
        self._ages = observed.ages
        # Where the walk begins. A line through means of all ages would follow the survivors, which
        # are the best, and promise all trials that they will be as good once they are as old.
        young = observed.values[observed.ages == 0.0]
        self._mean = float((young if len(young) else observed.values).mean())
        spread = float(observed.values.std())
        self._unit = spread if spread > 1e-9 else 1.0
        values = (observed.values - self._mean) / self._unit
        if settings is None:
            if spread > 1e-9:
                some = _fitted(observed)
                settings = _fit(points[some], observed.ages[some], observed.trials[some],
                                values[some])  # fmt: skip
            else:  # equal values tell nothing
                settings = KernelSettings.prior(points.shape[1])
        self.settings = settings
        self._scaled = points * np.exp(settings.scales)
        own, noise = np.exp(settings.others[[2, 4]])
        close = self._closeness(self._ages)
        covariance = self._shared(self._scaled, self._ages, close)
        spread_then = self._spread(self._ages)
        covariance += (
            own * (observed.trials[:, None] == observed.trials) * close
            * np.outer(spread_then, spread_then)
        )  # fmt: skip
        covariance[np.diag_indices(len(values))] += noise * spread_then**2 + _JITTER
        self._factor = np.linalg.cholesky(covariance)
        self._weights = cho_solve((self._factor, True), values)

    def predict(self, points: Floats, age: float) -> tuple[Floats, Floats]:
        """Mean and standard deviation of new trials at points [m, d] and a logarithmic age."""
        ages, scaled = np.full(len(points), age), points * np.exp(self.settings.scales)
        between = self._shared(scaled, ages, self._closeness(ages))
        known = solve_triangular(self._factor, between.T, lower=True)
        same, changing, *_, walk, rate = np.exp(self.settings.others)
        prior = (same + changing) * np.exp(-2 * rate * age) + walk * age
        variance = np.maximum(prior - (known**2).sum(axis=0), 1e-9)
        mean = self._mean + self._unit * (between @ self._weights)
        return mean, self._unit * np.sqrt(variance)

    def lower_bound(self, points: Floats, age: float) -> Floats:
        """Values of new trials at points [m, d] and an age, ``OPTIMISM`` deviations below the mean.

        See Cox and John, "A statistical method for global optimization", 1992.
        """
        mean, deviation = self.predict(points, age)
        return np.asarray(mean - OPTIMISM * deviation)

    def _shared(self, scaled: Floats, ages: Floats, close: Floats) -> Floats:
        """Covariance of points [m, d] of some ages [m] with what was observed, of other trials."""
        same, changing, *_, walk, _ = np.exp(self.settings.others)
        kernel = (same + changing * close) * _matern(_distances(scaled, self._scaled))
        kernel *= np.outer(self._spread(ages), self._spread(self._ages))
        return np.asarray(kernel + walk * np.minimum(ages[:, None], self._ages))

    def _spread(self, ages: Floats) -> Floats:
        """Share of the differences between trials after one unit that is left at some ages."""
        return np.asarray(np.exp(-math.exp(self.settings.others[6]) * ages))

    def _closeness(self, ages: Floats) -> Floats:
        return _decay(ages[:, None] - self._ages, math.exp(self.settings.others[3]))


def _fitted(observed: Observations) -> Places:
    """The observations that settings are fitted to: of the oldest trials, and of others evenly."""
    n_each = np.bincount(observed.trials)
    trials = np.flatnonzero(n_each)
    if len(observed.values) <= MOST_FITTED:
        return np.arange(len(observed.values))
    # Those of a trial follow one another, the youngest first: more of them, an older trial.
    old = trials[np.argsort(-n_each[trials], kind="stable")]
    order = np.concatenate([old[: len(old) // 4], _spread_out(np.sort(old[len(old) // 4 :]))])
    room = int(np.searchsorted(np.cumsum(n_each[order]), MOST_FITTED, side="right"))
    return np.flatnonzero(np.isin(observed.trials, order[: max(1, room)]))


def _spread_out(numbers: Places) -> Places:
    """The numbers in an order of which every beginning is spread over all of them."""
    fractions = np.arange(len(numbers)) * 0.6180339887498949 % 1.0  # the golden ratio's
    return np.asarray(numbers[np.argsort(fractions, kind="stable")])


def _fit(points: Floats, ages: Floats, trials: Places, values: Floats) -> KernelSettings:
    n_dimensions = points.shape[1]
    start = KernelSettings.prior(n_dimensions)
    found = minimize(
        _loss, np.concatenate([start.scales, start.others]), jac=True, method="L-BFGS-B",
        args=(
            (points[:, None, :] - points) ** 2,
            np.abs(ages[:, None] - ages),
            np.minimum(ages[:, None], ages),
            ages[:, None] + ages,
            (trials[:, None] == trials).astype(np.float64),
            values,
        ),
        options={"maxiter": _STEPS}, bounds=[_SCALE_BOUNDS] * n_dimensions + list(_BOUNDS),
    )  # fmt: skip
    return KernelSettings(scales=found.x[:n_dimensions], others=found.x[n_dimensions:])


def _loss(
    settings: Floats,
    squares: Floats,
    apart: Floats,
    lesser: Floats,
    sums: Floats,
    together: Floats,
    values: Floats,
) -> tuple[float, Floats]:
    """Negative logarithm of the posterior density of the settings, up to a constant; gradient.

    See Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2006, chapter 5.

    Args:
        settings: scales and others in one array [d + 7].
        squares: squared differences of the observations' coordinates [n, n, d].
        apart: differences of their ages [n, n].
        lesser: the lesser of their ages [n, n].
        sums: of their ages [n, n].
        together: 1 where both are of one trial, else 0 [n, n].
        values: of the observations [n].
    """
    n, n_dimensions = len(values), squares.shape[2]
    weights = 5.0 * np.exp(2 * settings[:n_dimensions])
    same, changing, own, doublings, noise, walk, rate = np.exp(settings[n_dimensions:])
    distances = np.sqrt(squares @ weights)
    decay = np.exp(-distances)
    kernel = (1 + distances + distances**2 / 3) * decay
    close = _decay(apart, doublings)
    amplitude = same + changing * close
    left = np.exp(-rate * sums)
    shrinking = (amplitude * kernel + own * together * close) * left
    shrinking[np.diag_indices(n)] += noise * np.diag(left)
    covariance = shrinking + walk * lesser
    covariance[np.diag_indices(n)] += _JITTER
    lower = np.linalg.cholesky(covariance)
    inverse = cho_solve((lower, True), np.eye(n))
    dual = inverse @ values
    outer = inverse - np.outer(dual, dual)
    of_walk, of_rate = (outer * lesser).sum(), (outer * shrinking * sums).sum()
    outer *= left
    gradient = np.empty_like(settings)
    # Of the kernel by the logarithm of each inverse length scale.
    slope = -(1 + distances) * decay / 3
    gradient[:n_dimensions] = 0.5 * weights * np.tensordot(outer * amplitude * slope, squares, 2)
    shared, alone = outer * kernel, outer * together
    gradient[n_dimensions:] = 0.5 * np.array([
        same * shared.sum(),
        changing * (shared * close).sum(),
        own * (alone * close).sum(),
        ((changing * shared + own * alone) * close * apart).sum() / doublings,
        noise * np.trace(outer),
        walk * of_walk,
        -rate * of_rate,
    ])  # fmt: skip
    prior = KernelSettings.prior(n_dimensions)
    deviations = np.append(np.ones(n_dimensions), _DEVIATIONS)
    away = (settings - np.append(prior.scales, prior.others)) / deviations
    loss = 0.5 * float(values @ dual) + float(np.log(np.diag(lower)).sum())
    gradient += away / deviations
    return loss + 0.5 * float(away @ away), gradient


def _distances(one: Floats, other: Floats) -> Floats:
    """Scaled distances of scaled points [n, d] and [m, d], as the kernel takes them [n, m]."""
    squares = (one**2).sum(axis=1)[:, None] + (other**2).sum(axis=1) - 2 * one @ other.T
    return np.asarray(np.sqrt(5.0 * np.maximum(squares, 0.0)))


def _matern(distances: Floats) -> Floats:
    """Matern 5/2, of distances with its factor."""
    return np.asarray((1 + distances + distances**2 / 3) * np.exp(-distances))


def _decay(apart: Floats, doublings: float) -> Floats:
    return np.asarray(np.exp(-np.abs(apart) / doublings))
