"""Trainings whose devices and batch size may change: how fast they go, and what they are worth."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.simulator._elastic_times import Shape, StepTimes


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """A training at one batch size, an entry an epoch.

    Args:
        progress: what had been trained by its end, in steps of the smallest batch size.
        steps: how many steps of this batch size that took.
        metric: what was measured then.
        grad_sqr: squared norm of the true gradient, by estimate.
        grad_var: variance of a gradient over a batch of the smallest size, by estimate.
    """

    progress: tuple[float, ...]
    steps: tuple[int, ...]
    metric: tuple[float, ...]
    grad_sqr: tuple[float, ...]
    grad_var: tuple[float, ...]


class Application:
    """One kind of training: step times, and how much a step is worth, by batch size.

    An amount of training is counted in steps of the smallest batch size that was trained with. The
    work of a job is the amount after which every training has had as many epochs as the shortest
    has; their metrics agree by then, whatever the batch size, so all is one amount of work.

    What a step is worth is measured: an epoch's progress by its steps. Between two batch sizes
    steps for a given amount are linear in ``1 / batch``: with a gradient noise scale ``phi`` a
    step of ``b`` samples is worth ``(phi + b0) / (phi + b) * b / b0`` steps of ``b0`` (McCandlish
    et al., 2018; Johnson et al., "AdaScale SGD", 2020), whose inverse is just that. Below the
    smallest and beyond the largest batch size nothing is known, and is refused.

    Args:
        name: of the application.
        times: what a step takes.
        validations: one training for each batch size, two at least.

    Raises:
        InvalidInputError: there are fewer, or one is empty or does not ascend.
    """

    def __init__(self, name: str, times: StepTimes, validations: Mapping[int, Validation]) -> None:
        if len(validations) < 2:
            raise InvalidInputError(
                f"{name} must have trainings at two batch sizes at least but has "
                f"{len(validations)}."
            )
        self.name = name
        self.times = times
        self._batches = sorted(validations)
        self._validations = [validations[batch] for batch in self._batches]
        for batch, validation in zip(self._batches, self._validations, strict=True):
            _check(f"{name} at batch size {batch}", validation)
        self.speed = lru_cache(maxsize=None)(self._speed)
        self.plan = lru_cache(maxsize=None)(self._plan)

    @property
    def batch_sizes(self) -> tuple[int, int]:
        """The least and the most samples a step."""
        return self._batches[0], self._batches[-1]

    @cached_property
    def ends(self) -> tuple[float, ...]:
        """The amount of training by the end of each epoch, the work of a job being the last."""
        n_epochs = min(len(each.progress) for each in self._validations)
        return tuple(
            min(each.progress[epoch] for each in self._validations) for epoch in range(n_epochs)
        )

    def epoch(self, done: float) -> int:
        """The epoch that an amount of training falls into, from 0; the last one if it is over."""
        return min(bisect_right(self.ends, done), len(self.ends) - 1)

    def worth(self, epoch: int, batch_size: int) -> float:
        """How much a step is worth in an epoch, in steps of the smallest batch size."""
        self._check_batch(batch_size)
        right = bisect_left(self._batches, batch_size)
        if self._batches[right] == batch_size:
            return 1.0 / self._steps_needed(right, epoch)
        low, high = self._batches[right - 1], self._batches[right]
        part = (1 / batch_size - 1 / low) / (1 / high - 1 / low)
        few, many = self._steps_needed(right - 1, epoch), self._steps_needed(right, epoch)
        return 1.0 / (few + part * (many - few))

    def noise_scale(self, done: float, batch_size: int) -> float | None:
        """The gradient noise scale, in samples, measured in the last epoch that is over.

        It is that of the training at the nearest smaller batch size; None before the first epoch
        is over, and where no gradient was left to measure.
        """
        epoch = bisect_right(self.ends, done) - 1
        if epoch < 0:
            return None
        self._check_batch(batch_size)
        training = self._validations[bisect_right(self._batches, batch_size) - 1]
        sqr, var = training.grad_sqr[epoch], training.grad_var[epoch]
        return self._batches[0] * var / sqr if sqr > 0 else None

    @cached_property
    def unit_samples(self) -> float:
        """Samples of an epoch at the smallest batch size."""
        return self._batches[0] * self.ends[-1] / len(self.ends)

    def loss(self, epoch: int, batch_size: int) -> float:
        """What was measured at the end of an epoch, at the nearest smaller batch size.

        Lower is better: a metric that rises over the training at the smallest batch size is turned
        round.
        """
        self._check_batch(batch_size)
        first = self._validations[0].metric
        value = self._validations[bisect_right(self._batches, batch_size) - 1].metric[epoch]
        return -value if first[-1] > first[0] else value

    def _plan(self, shape: Shape, batch_size: int) -> tuple[int, float] | None:
        """Samples a step and seconds a step on some devices, None where that was not measured.

        Each device takes its part, rounded up, in as few passes as it holds, and at least as much
        as was measured: a step may have some samples more than were asked for.

        Args:
            shape: devices on each host, ascending.
            batch_size: samples a step that are asked for.
        """
        limits = self.times.limits(shape)
        if limits is None:
            return None
        least, most = limits
        part = math.ceil(batch_size / sum(shape))
        passes = math.ceil(part / most)
        local_batch = max(math.ceil(part / passes), least)
        samples = local_batch * passes * sum(shape)
        if samples - passes * sum(shape) >= self.batch_sizes[1]:
            return None
        seconds = self.times.at(shape, local_batch).accumulated(passes)
        return min(samples, self.batch_sizes[1]), seconds

    def _speed(self, epoch: int, shape: Shape, batch_size: int) -> float:
        """Progress a second.

        Raises:
            ValueError: that was not measured.
        """
        planned = self.plan(shape, batch_size)
        if planned is None:
            raise ValueError(
                f"{self.name} was not measured with batch size {batch_size} on {shape} devices."
            )
        samples, seconds = planned
        return self.worth(epoch, samples) / seconds

    def _steps_needed(self, index: int, epoch: int) -> float:
        """Steps for each amount of training in an epoch, at a batch size that was trained with."""
        each = self._validations[index]
        before = (each.progress[epoch - 1], each.steps[epoch - 1]) if epoch else (0.0, 0)
        return (each.steps[epoch] - before[1]) / (each.progress[epoch] - before[0])

    def _check_batch(self, batch_size: int) -> None:
        low, high = self.batch_sizes
        if not low <= batch_size <= high:
            raise ValueError(f"{self.name} was trained with {low} to {high} but got {batch_size}.")


def _check(where: str, validation: Validation) -> None:
    lengths = {
        len(column)
        for column in (
            *(validation.progress, validation.steps, validation.metric),
            *(validation.grad_sqr, validation.grad_var),
        )
    }
    if len(lengths) != 1 or lengths == {0}:
        raise InvalidInputError(f"{where} must have an epoch at least, with all its figures.")
    for column in (validation.progress, validation.steps):
        if not _ascends((0.0, *column)):
            raise InvalidInputError(f"{where} must have progress and iterations that ascend.")


def _ascends(column: Sequence[float]) -> bool:
    return all(low < high < math.inf for low, high in pairwise(column))
