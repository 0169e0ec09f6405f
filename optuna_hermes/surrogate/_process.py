"""Gaussian process over parameters and age: how trials go on, from partial curves of others."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_solve, solve_triangular
from scipy.linalg.lapack import dpotri
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
        ages, scaled = np.array([age]), points * np.exp(self.settings.scales)
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
        """Covariance of points [m, d] with what was observed, of other trials.

        Args:
            scaled: the points, scaled as those of the observations [m, d].
            ages: of the points [m], or one for all of them [1].
            close: what ``_closeness`` has for the ages.
        """
        same, changing, *_, walk, _ = np.exp(self.settings.others)
        kernel = _matern(_distances(scaled, self._scaled))
        kernel *= same + changing * close
        kernel *= self._spread(ages)[:, None]
        kernel *= self._spread(self._ages)
        kernel += walk * np.minimum(ages[:, None], self._ages)
        return kernel

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


class _Pairs:
    """Pairs of observations, each with itself too, as the covariance's lower triangle has them.

    Args:
        points: of the observations [n, d].
        ages: of them [n].
        trials: that they are of [n].

    Attributes:
        rows: the index of one of each pair [p].
        columns: that of the other [p].
        places: those of the pairs in a matrix of all observations, row by row [p].
        squares: squared differences of their coordinates [p, d].
        apart: differences of their ages [p].
        lesser: the lesser of their ages [p].
        sums: of their ages [p].
        together: 1 where both are of one trial, else 0 [p].
        alone: 1 where both are the same, else 0 [p].
    """

    def __init__(self, points: Floats, ages: Floats, trials: Places) -> None:
        self.rows, self.columns = rows, columns = np.tril_indices(len(ages))
        self.places = rows * len(ages) + columns
        self.squares = (points[rows] - points[columns]) ** 2
        self.apart = np.abs(ages[rows] - ages[columns])
        self.lesser = np.minimum(ages[rows], ages[columns])
        self.sums = ages[rows] + ages[columns]
        self.together = (trials[rows] == trials[columns]).astype(np.float64)
        self.alone = (rows == columns).astype(np.float64)


def _fit(points: Floats, ages: Floats, trials: Places, values: Floats) -> KernelSettings:
    n_dimensions = points.shape[1]
    start = KernelSettings.prior(n_dimensions)
    found = minimize(
        _loss, np.concatenate([start.scales, start.others]), jac=True, method="L-BFGS-B",
        args=(_Pairs(points, ages, trials), values), options={"maxiter": _STEPS},
        bounds=[_SCALE_BOUNDS] * n_dimensions + list(_BOUNDS),
    )  # fmt: skip
    return KernelSettings(scales=found.x[:n_dimensions], others=found.x[n_dimensions:])


def _loss(settings: Floats, pairs: _Pairs, values: Floats) -> tuple[float, Floats]:
    """Negative logarithm of the posterior density of the settings, up to a constant; gradient.

    See Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2006, chapter 5.

    Args:
        settings: scales and others in one array [d + 7].
        pairs: of the observations.
        values: of the observations [n].
    """
    n, n_dimensions = len(values), pairs.squares.shape[1]
    weights = 5.0 * np.exp(2 * settings[:n_dimensions])
    same, changing, own, doublings, noise, walk, rate = np.exp(settings[n_dimensions:])
    distances = np.sqrt(pairs.squares @ weights)
    decay = np.exp(-distances)
    slope = -(1 + distances) * decay / 3
    kernel = distances**2 / 3 * decay - 3 * slope
    close = np.exp(-pairs.apart / doublings)
    amplitude = same + changing * close
    left = np.exp(-rate * pairs.sums)
    its_own = pairs.together * close
    shrinking = (amplitude * kernel + own * its_own + noise * pairs.alone) * left
    covariance = np.zeros(n * n)
    covariance[pairs.places] = shrinking + walk * pairs.lesser + _JITTER * pairs.alone
    lower = np.linalg.cholesky(covariance.reshape(n, n))
    dual = cho_solve((lower, True), values)
    inverse = dpotri(lower.T)[0].T  # its lower triangle: LAPACK's matrices are transposed
    # The loss's slope in each entry of the covariance, doubled for those of both triangles.
    outer = inverse.take(pairs.places) - dual[pairs.rows] * dual[pairs.columns]
    outer *= 2.0 - pairs.alone
    of_walk, of_rate = outer @ pairs.lesser, (outer * shrinking) @ pairs.sums
    outer *= left
    gradient = np.empty_like(settings)
    # Of the kernel by the logarithm of each inverse length scale.
    gradient[:n_dimensions] = 0.5 * weights * ((outer * amplitude * slope) @ pairs.squares)
    shared, alone = outer * kernel, outer * its_own
    gradient[n_dimensions:] = 0.5 * np.array([
        same * shared.sum(),
        changing * (shared @ close),
        own * alone.sum(),
        (changing * shared * close + own * alone) @ pairs.apart / doublings,
        noise * (outer @ pairs.alone),
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
    squares = one @ (-10.0 * other.T)
    squares += 5.0 * (one**2).sum(axis=1)[:, None]  # in place: there are hundreds of thousands
    squares += 5.0 * (other**2).sum(axis=1)
    np.maximum(squares, 0.0, out=squares)
    return np.asarray(np.sqrt(squares, out=squares))


def _matern(distances: Floats) -> Floats:
    """Matern 5/2, of distances with its factor."""
    kernel = distances / 3
    kernel += 1
    kernel *= distances
    kernel += 1
    kernel *= np.exp(-distances)
    return np.asarray(kernel)


def _decay(apart: Floats, doublings: float) -> Floats:
    return np.asarray(np.exp(-np.abs(apart) / doublings))
