"""Batch sizes and devices that an elastic trial may be tried with, and the time of its units."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from optuna_hermes.model import Elastic, Speed
from optuna_hermes.policies.step_model import HUGE, Array, StepModel

MAX_GROWTH = 2
"""Largest factor by which a trial's devices and batch may exceed the measured ones."""

EQUAL = 1e-6
"""Batch sizes whose times differ by less are taken to be equal."""


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
