"""Time of a training step on other devices and with other batch sizes, fitted to measurements."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from optuna_hermes.model import Speed

# Upper bound of seconds and samples, so that sums stay finite.
HUGE = 1e12
# Weight of the pull towards 0 of costs that no measurement determines.
CAUTION = 1e-3

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepModel:
    """Time of a step: ``T(w) = a M / w + b + d (w - 1) + e [more than one host]``.

    ``M`` is the batch, ``w`` the devices: Yu et al., "SMD", INFOCOM 2021, without its parameter
    servers, and with ``e`` of this project's own. A batch that a device does not hold is taken in
    several passes, each of which costs ``b`` again, but not ``d`` and ``e``.
    """

    sample_seconds: float  # ``a``, for a sample on its device
    pass_seconds: float = 0.0  # ``b``, for a pass of any size
    device_seconds: float = 0.0  # ``d``, for each device beyond the first
    host_seconds: float = 0.0  # ``e``, once, if there are several hosts
    device_batch_size: int | None = None  # samples a device holds, None for no bound

    def step_seconds(self, devices: Array, batch_sizes: Array, several: Array) -> Array:
        """Seconds of a step, elementwise; ``several`` is 1 on more than one host, otherwise 0."""
        local = np.ceil(batch_sizes / devices)
        passes = _passes(local, self.device_batch_size)
        seconds: Array = (
            self.sample_seconds * local
            + self.pass_seconds * passes
            + self.device_seconds * (devices - 1)
            + self.host_seconds * several
        )
        return seconds


@lru_cache(maxsize=4096)
def fit_steps(speeds: tuple[Speed, ...], device_batch_size: int | None) -> StepModel | None:
    """Fit the model to measured speeds; None if none of them is positive and finite.

    Least squares of the relative errors, no term below zero.
    """
    good = [each for each in speeds if 0 < each.step_seconds < HUGE]
    if not good:
        return None
    seconds = np.array([each.step_seconds for each in good])
    devices = np.array([each.devices for each in good], dtype=float)
    local = np.ceil(np.array([each.batch_size for each in good]) / devices)
    passes = _passes(local, device_batch_size)
    several = np.array([each.hosts > 1 for each in good], dtype=float)
    columns = np.stack([local, passes, devices - 1, several], axis=1) / seconds[:, None]
    scale = np.maximum(columns.max(axis=0), 1 / HUGE)
    # Costs that no measurement determines become 0: a trial is tried on more devices once, and
    # measured from then on.
    caution = np.diag([0.0, CAUTION, CAUTION, CAUTION])
    from scipy.optimize import nnls  # takes a third of a second; most policies do without

    terms, _ = nnls(
        np.concatenate([columns / scale, caution]),
        np.concatenate([np.ones(len(good)), np.zeros(4)]),
    )
    a, b, d, e = (terms / scale).tolist()
    return StepModel(
        sample_seconds=a,
        pass_seconds=b,
        device_seconds=d,
        host_seconds=e,
        device_batch_size=device_batch_size,
    )


def _passes(local: Array, device_batch_size: int | None) -> Array:
    if device_batch_size is None:
        return np.ones_like(local)
    return np.ceil(local / device_batch_size)
