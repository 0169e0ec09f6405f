"""Speeds of a trial on other devices and with other batch sizes, fitted to measurements."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from optuna_hermes.model import Elastic, Speed

MAX_GROWTH = 2
"""Largest factor by which a trial's devices and batch may exceed the measured ones."""

HUGE = 1e12
"""Upper bound of seconds and samples, so that sums stay finite."""

EQUAL = 1e-6
"""Batch sizes whose times differ by less are taken to be equal."""

CAUTION = 1e-3
"""Weight of the pull towards 0 of costs that no measurement determines."""

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepModel:
    """Time of a step: ``T(w) = a M / w + b + d (w - 1) + e [more than one host]``.

    ``M`` is the batch, ``w`` the devices: Yu et al., "SMD", INFOCOM 2021, without its parameter
    servers, and with ``e`` of this project's own. A batch that a device does not hold is taken in
    several passes, each of which costs ``b`` again, but not ``d`` and ``e``.

    Args:
        sample_seconds: ``a``, for a sample on its device.
        pass_seconds: ``b``, for a pass of any size.
        device_seconds: ``d``, for each device beyond the first.
        host_seconds: ``e``, once, if there are several hosts.
        device_batch_size: samples a device holds, None for no bound.
    """

    sample_seconds: float
    pass_seconds: float = 0.0
    device_seconds: float = 0.0
    host_seconds: float = 0.0
    device_batch_size: int | None = None

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
    """Fit the model to measured speeds; None if none of them is usable.

    Least squares of the relative errors, no term below zero. Costs that no measurement determines
    are taken to be 0: a trial is tried on more devices once, and measured from then on.

    Args:
        speeds: measurements; those that are not positive and finite are left out.
        device_batch_size: samples a device holds, None for no bound.
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


def batch_choices(elastic: Elastic) -> list[int]:
    """Batch sizes to try: powers of two times the least one, and the limits.

    The most is twice the measured one, so that it grows as the trial trains.
    """
    low, high = elastic.batch_sizes
    known = max((each.batch_size for each in elastic.speeds), default=elastic.batch_size)
    high = max(elastic.batch_size, min(high, MAX_GROWTH * known))
    doublings = range(int(math.log2(high / low)) + 1)
    return sorted({elastic.batch_size, high, *(low << times for times in doublings)})


def worth_of_samples(elastic: Elastic, batch_sizes: Array, *, later: bool = False) -> Array:
    """Progress per sample at these batch sizes, by the gradient noise scale; 1 at the least size.

    Where noise is not known all samples count the same. Noise grows in training: ``later`` takes
    it to be no less than the largest batch that the trial may have.
    """
    noise = elastic.noise_scale
    if noise is None or not math.isfinite(noise) or noise < 0:
        return np.ones_like(batch_sizes)
    noise = min(noise if not later else max(noise, elastic.batch_sizes[1]), HUGE)
    worth: Array = (noise + elastic.batch_sizes[0]) / (noise + batch_sizes)
    return worth


def most_devices(elastic: Elastic, wanted: int) -> int:
    """The most devices a trial may be tried on: twice the measured ones, or those it wants."""
    known = max((each.devices for each in elastic.speeds), default=0)
    most = min(elastic.devices[1], max(MAX_GROWTH * known, wanted))
    return max(most, elastic.devices[0])


def unit_seconds(
    elastic: Elastic, model: StepModel, batch_sizes: Array, devices: Array, *, later: bool = False
) -> Array:
    """Seconds of a unit [batch size, devices, several hosts], per sample if its size is not known.

    Args:
        elastic: the trial's limits.
        model: the time of its steps.
        batch_sizes: samples a step [batch size].
        devices: how many, 1 or more [devices].
        later: whether the units lie in the future, see ``worth_of_samples``.
    """
    rows, columns = batch_sizes[:, None], devices[None, :]
    several = (columns > 1).astype(float)
    steps = [model.step_seconds(columns, rows, apart) for apart in (0.0 * several, several)]
    worth = worth_of_samples(elastic, rows, later=later)
    # Among sizes that seem equal the largest is tried, so that it is measured from then on.
    doubt = 1.0 + EQUAL * np.arange(len(batch_sizes) - 1.0, -1.0, -1.0)
    seconds: Array = np.stack(steps, axis=2) * (doubt[:, None] / (rows * worth))[:, :, None]
    return seconds * (elastic.unit_samples or 1.0)


def pooled(speeds: Iterable[Speed]) -> tuple[Speed, ...]:
    """Measurements of several trials, the mean of those with equal devices, hosts and batch."""
    by_place: dict[tuple[int, int, int], list[float]] = {}
    for each in speeds:
        by_place.setdefault((each.devices, each.hosts, each.batch_size), []).append(
            each.step_seconds
        )
    return tuple(
        Speed(devices=w, hosts=h, batch_size=m, step_seconds=sum(all_) / len(all_))
        for (w, h, m), all_ in sorted(by_place.items())
    )


def _passes(local: Array, device_batch_size: int | None) -> Array:
    if device_batch_size is None:
        return np.ones_like(local)
    passes: Array = np.ceil(local / device_batch_size)
    return passes
