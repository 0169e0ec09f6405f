"""Gaussian process over the unit cube, for observations whose noise differs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.optimize import minimize

from optuna_hermes.curves import Floats

MOST_FITTED = 80
"""Observations that length scales are fitted to: more would not change them much."""
_JITTER = 1e-6
_BOUNDS = math.log(0.05), math.log(20.0)
_NOISE_BOUNDS = math.log(0.02), math.log(5.0)
# Logarithms are drawn to these means, with these deviations: a dimension matters little until the
# observations say otherwise.
_SCALE_PRIOR = math.log(0.8), 1.0
_NOISE_PRIOR = math.log(0.4), 1.0
_STEPS = 25


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Logarithms of the inverse length scales [d], and of the factor of all noise."""

    scales: Floats
    noise: float

    @staticmethod
    def prior(n_dimensions: int) -> Settings:
        """The settings without any observation."""
        return Settings(scales=np.full(n_dimensions, _SCALE_PRIOR[0]), noise=_NOISE_PRIOR[0])


class Process:
    """Gaussian process regression with a Matern 5/2 kernel and a length scale per dimension.

    The amplitude has its most likely value; see Rasmussen and Williams, "Gaussian Processes for
    Machine Learning", 2006, chapters 2, 4 and 5. The mean is that of the observations.

    Args:
        points: observed points of the unit cube [n, d], at least one.
        values: their values [n].
        noise: variances of their noise, up to a common factor [n].
        settings: length scales and noise; the most probable ones if None.

    Example:
        >>> import numpy as np
        >>> points = np.linspace(0, 1, 9)[:, None]
        >>> process = Process(points, np.sin(3 * points[:, 0]), np.full(9, 0.01))
        >>> mean, deviation = process.predict(np.array([[0.55]]))
        >>> abs(mean[0] - np.sin(3 * 0.55)) < 0.05
        True
    """

    def __init__(
        self, points: Floats, values: Floats, noise: Floats, settings: Settings | None = None
    ) -> None:
        self._points = points
        self._noise = noise
        self._mean = float(values.mean())
        spread = float(values.std())
        self._unit = spread or 1.0
        observed = (values - self._mean) / self._unit
        if settings is None:
            # Equal values tell nothing of length scales.
            settings = _fit(points, observed, noise) if spread else Settings.prior(points.shape[1])
        self.settings = settings
        self._scaled = points * np.exp(self.settings.scales)
        covariance = _kernel(_distances(self._scaled, self._scaled))
        covariance[np.diag_indices(len(points))] += noise * math.exp(self.settings.noise) + _JITTER
        self._factor = cho_factor(covariance, lower=True)
        self._weights = cho_solve(self._factor, observed)
        self._variance = max(float(observed @ self._weights) / len(points), 0.05)

    def predict(self, points: Floats) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the function at points [m, d], without noise."""
        between = _kernel(_distances(points * np.exp(self.settings.scales), self._scaled))
        known = solve_triangular(self._factor[0], between.T, lower=True)
        left = np.maximum(1.0 - (known**2).sum(axis=0), 1e-9)
        mean = self._mean + self._unit * (between @ self._weights)
        return mean, self._unit * np.sqrt(self._variance * left)


def _fit(points: Floats, observed: Floats, noise: Floats) -> Settings:
    """The most probable settings, on evenly chosen observations in the order of their values."""
    if len(points) > MOST_FITTED:
        order = np.argsort(observed, kind="stable")
        chosen = order[np.linspace(0, len(order) - 1, MOST_FITTED).astype(int)]
        points, observed, noise = points[chosen], observed[chosen], noise[chosen]
    n_dimensions = points.shape[1]
    squares = (points[:, None, :] - points[None, :, :]) ** 2
    start = Settings.prior(n_dimensions)
    found = minimize(
        _loss, np.append(start.scales, start.noise), args=(squares, observed, noise), jac=True,
        method="L-BFGS-B", options={"maxiter": _STEPS},
        bounds=[_BOUNDS] * n_dimensions + [_NOISE_BOUNDS],
    )  # fmt: skip
    return Settings(scales=found.x[:-1], noise=float(found.x[-1]))


def _loss(
    settings: Floats, squares: Floats, observed: Floats, noise: Floats
) -> tuple[float, Floats]:
    """Negative logarithm of the posterior density of the settings, up to a constant; gradient."""
    n = len(observed)
    weights = 5.0 * np.exp(2 * settings[:-1])
    distances = np.sqrt(squares @ weights)
    decay = np.exp(-distances)
    own_noise = noise * math.exp(settings[-1])
    covariance = (1 + distances + distances**2 / 3) * decay
    covariance[np.diag_indices(n)] += own_noise + _JITTER
    lower = np.linalg.cholesky(covariance)
    inverse = cho_solve((lower, True), np.eye(n))
    dual = inverse @ observed
    fit = float(observed @ dual)
    outer = inverse - (n / fit) * np.outer(dual, dual)
    # Of the kernel by the logarithm of each inverse length scale.
    slope = -(1 + distances) * decay / 3
    gradient = np.empty_like(settings)
    gradient[:-1] = 0.5 * weights * np.einsum("ij,ijd->d", outer * slope, squares)
    gradient[-1] = 0.5 * float(np.diag(outer) @ own_noise)
    away = settings[:-1] - _SCALE_PRIOR[0], settings[-1] - _NOISE_PRIOR[0]
    loss = 0.5 * n * math.log(fit / n) + float(np.log(np.diag(lower)).sum())
    loss += 0.5 * float((away[0] ** 2).sum()) / _SCALE_PRIOR[1] ** 2
    loss += 0.5 * float(away[1] ** 2) / _NOISE_PRIOR[1] ** 2
    gradient[:-1] += away[0] / _SCALE_PRIOR[1] ** 2
    gradient[-1] += away[1] / _NOISE_PRIOR[1] ** 2
    return loss, gradient


def _distances(one: Floats, other: Floats) -> Floats:
    """Scaled distances of scaled points [n, d] and [m, d], as the kernel takes them [n, m]."""
    squares = (one**2).sum(axis=1)[:, None] + (other**2).sum(axis=1) - 2 * one @ other.T
    return np.asarray(np.sqrt(5.0 * np.maximum(squares, 0.0)))


def _kernel(distances: Floats) -> Floats:
    """Matern 5/2, of distances with its factor."""
    return np.asarray((1 + distances + distances**2 / 3) * np.exp(-distances))
