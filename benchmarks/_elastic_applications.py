"""Elastic trainings: step times and statistical efficiency by devices and batch size."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cache, cached_property, lru_cache
from itertools import pairwise

from optuna_hermes.errors import InvalidInputError

Shape = tuple[int, ...]
"""Numbers of devices on each host of a training, ascending."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """A step time, of which ``sync_seconds`` average gradients, as accumulation need not."""

    step_seconds: float
    sync_seconds: float

    def accumulated(self, passes: int) -> float:
        """Seconds of a step that takes its batch in ``passes`` passes."""
        return passes * self.step_seconds - (passes - 1) * self.sync_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A measured step time; ``local_batch`` is samples per device and pass."""

    # None where only the numbers of hosts and devices were recorded.
    shape: Shape | None
    hosts: int
    devices: int
    local_batch: int
    time: StepTime


class _TimesByBatch:
    """Step times of one placement by samples a device, linear between measurements."""

    def __init__(self, points: Iterable[Measured]) -> None:
        by_batch: defaultdict[int, list[StepTime]] = defaultdict(list)
        for point in points:
            by_batch[point.local_batch].append(point.time)
        self.batches = sorted(by_batch)
        self.times = [_mean(by_batch[batch]) for batch in self.batches]

    def at(self, local_batch: float) -> StepTime:
        right = bisect_left(self.batches, local_batch)
        if self.batches[right] == local_batch:
            return self.times[right]
        low, high = self.batches[right - 1], self.batches[right]
        return _between(
            self.times[right - 1], self.times[right], (local_batch - low) / (high - low)
        )


class StepTimes:
    """Step times of one application.

    A measured shape has its own line, linear between two batch sizes. Others are interpolated
    between four lines: those of the next smaller and larger number of hosts, and on each of them
    of devices, at the same number of devices a host. Shapes beyond the measurements are refused.
    """

    def __init__(self, table: Sequence[Measured]) -> None:
        if not table:
            raise InvalidInputError("A table of step times must have a line at least but has none.")
        shapes: defaultdict[Shape, list[Measured]] = defaultdict(list)
        grid: defaultdict[tuple[int, int], list[Measured]] = defaultdict(list)
        for each in table:
            if each.shape is not None:
                shapes[each.shape].append(each)
            grid[each.hosts, each.devices].append(each)
        self._shapes = {shape: _TimesByBatch(points) for shape, points in shapes.items()}
        self._grid = {place: _TimesByBatch(points) for place, points in grid.items()}
        self._hosts = sorted({hosts for hosts, _ in grid})
        self._devices = {
            hosts: sorted(devices for at, devices in grid if at == hosts) for hosts in self._hosts
        }
        self.lines = cache(self._lines)
        self.limits = cache(self._limits)

    def at(self, shape: Shape, local_batch: float) -> StepTime:
        """The time of a step; samples a device and pass must lie within ``limits(shape)``."""
        parts = [(line.at(local_batch), weight) for line, weight in self.lines(shape)]
        return StepTime(
            step_seconds=sum(time.step_seconds * weight for time, weight in parts),
            sync_seconds=sum(time.sync_seconds * weight for time, weight in parts),
        )

    def largest(self) -> int | None:
        """The most samples measured on a single device; None if that was not measured."""
        limits = self.limits((1,))
        return None if limits is None else limits[1]

    def _limits(self, shape: Shape) -> tuple[int, int] | None:
        lines = [line for line, _ in self.lines(shape)]
        if not lines:
            return None
        # What all lines have: none is extended beyond its measurements.
        least = max(line.batches[0] for line in lines)
        most = min(line.batches[-1] for line in lines)
        return (least, most) if least <= most else None

    def _lines(self, shape: Shape) -> tuple[tuple[_TimesByBatch, float], ...]:
        """The lines between which a shape lies, with their weights; empty if it lies outside."""
        if shape in self._shapes:
            return ((self._shapes[shape], 1.0),)
        found: list[tuple[_TimesByBatch, float]] = []
        density = sum(shape) / len(shape)
        for hosts, weight in _around(self._hosts, len(shape)):
            around = _around(self._devices[hosts], density * hosts)
            if not around:
                return ()
            found += [(self._grid[hosts, count], weight * part) for count, part in around]
        return tuple((line, weight) for line, weight in found if weight > 0)


def _around(known: Sequence[int], wanted: float) -> tuple[tuple[int, float], ...]:
    # The tolerance is for products of fractions, such as 4/3 devices a host on 3 hosts.
    if not known[0] - 1e-9 <= wanted <= known[-1] + 1e-9:
        return ()
    wanted = min(max(wanted, known[0]), known[-1])
    right = bisect_left(known, wanted)
    if known[right] == wanted:
        return ((known[right], 1.0),)
    part = (wanted - known[right - 1]) / (known[right] - known[right - 1])
    return ((known[right - 1], 1.0 - part), (known[right], part))


def _mean(times: Sequence[StepTime]) -> StepTime:
    return StepTime(
        step_seconds=sum(time.step_seconds for time in times) / len(times),
        sync_seconds=sum(time.sync_seconds for time in times) / len(times),
    )


def _between(left: StepTime, right: StepTime, part: float) -> StepTime:
    return StepTime(
        step_seconds=left.step_seconds + part * (right.step_seconds - left.step_seconds),
        sync_seconds=left.sync_seconds + part * (right.sync_seconds - left.sync_seconds),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """A training at one batch size, with one entry for each epoch."""

    # Amount of training by the epoch's end, in steps of the smallest batch size.
    progress: tuple[float, ...]
    steps: tuple[int, ...]  # number of steps of this batch size that it took
    metric: tuple[float, ...]  # validation metric at the epoch's end
    grad_sqr: tuple[float, ...]  # estimated squared norm of the true gradient
    # Estimated variance of a gradient over a batch of the smallest size.
    grad_var: tuple[float, ...]


class Application:
    """One kind of training: step times, and the progress of a step, by batch size.

    Progress is counted in steps of the smallest recorded batch size, and measured: an epoch's
    progress by its steps. Batch sizes below the smallest and above the largest one are refused.
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
        # Caches of this object: one on the class would keep every application alive.
        self.speed = lru_cache(maxsize=None)(self._speed)
        self.plan = lru_cache(maxsize=None)(self._plan)

    @property
    def batch_sizes(self) -> tuple[int, int]:
        """The smallest and the largest number of samples a step."""
        return self._batches[0], self._batches[-1]

    @cached_property
    def ends(self) -> tuple[float, ...]:
        """The amount of training by the end of each epoch; the last is the work of a job."""
        # As many epochs as the shortest training has: the metrics agree by then at every batch
        # size, so it is the same amount of work for all.
        n_epochs = min(len(each.progress) for each in self._validations)
        return tuple(
            min(each.progress[epoch] for each in self._validations) for epoch in range(n_epochs)
        )

    def epoch(self, done: float) -> int:
        """The epoch that an amount of training falls into, from 0; the last one after its end."""
        return min(bisect_right(self.ends, done), len(self.ends) - 1)

    def worth(self, epoch: int, batch_size: int) -> float:
        """Progress of a step in an epoch, in steps of the smallest batch size."""
        self._check_batch(batch_size)
        right = bisect_left(self._batches, batch_size)
        if self._batches[right] == batch_size:
            return 1.0 / self._steps_needed(right, epoch)
        # With a gradient noise scale phi a step of b samples is worth (phi + b0) / (phi + b) * b/b0
        # steps of b0 (McCandlish et al., 2018; Johnson et al., "AdaScale SGD", 2020). The inverse,
        # the number of steps for an amount of progress, is linear in 1 / b.
        low, high = self._batches[right - 1], self._batches[right]
        part = (1 / batch_size - 1 / low) / (1 / high - 1 / low)
        few, many = self._steps_needed(right - 1, epoch), self._steps_needed(right, epoch)
        return 1.0 / (few + part * (many - few))

    def noise_scale(self, done: float, batch_size: int) -> float | None:
        """The gradient noise scale, in samples, measured in the last epoch that is over.

        It is that at the nearest smaller batch size; None in the first epoch, and without gradient.
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
        """The metric at the end of an epoch, at the nearest smaller batch size; lower is better."""
        self._check_batch(batch_size)
        first = self._validations[0].metric
        value = self._validations[bisect_right(self._batches, batch_size) - 1].metric[epoch]
        # A metric that rises over the first training, such as accuracy, is turned round.
        return -value if first[-1] > first[0] else value

    def _plan(self, shape: Shape, batch_size: int) -> tuple[int, float] | None:
        """Samples and seconds of a step on some devices, None where that was not measured."""
        limits = self.times.limits(shape)
        if limits is None:
            return None
        least, most = limits
        # In as few passes as memory allows, and the measured minimum at least: with the rounding a
        # step may have some samples more than ``batch_size``.
        part = math.ceil(batch_size / sum(shape))
        passes = math.ceil(part / most)
        local_batch = max(math.ceil(part / passes), least)
        samples = local_batch * passes * sum(shape)
        if samples - passes * sum(shape) >= self.batch_sizes[1]:
            return None
        seconds = self.times.at(shape, local_batch).accumulated(passes)
        return min(samples, self.batch_sizes[1]), seconds

    def _speed(self, epoch: int, shape: Shape, batch_size: int) -> float:
        """Progress per second."""
        planned = self.plan(shape, batch_size)
        if planned is None:
            raise ValueError(
                f"{self.name} was not measured with batch size {batch_size} on {shape} devices."
            )
        samples, seconds = planned
        return self.worth(epoch, samples) / seconds

    def _steps_needed(self, index: int, epoch: int) -> float:
        each = self._validations[index]
        before = (each.progress[epoch - 1], each.steps[epoch - 1]) if epoch else (0.0, 0)
        return (each.steps[epoch] - before[1]) / (each.progress[epoch] - before[0])

    def _check_batch(self, batch_size: int) -> None:
        low, high = self.batch_sizes
        if not low <= batch_size <= high:
            raise ValueError(f"{self.name} was trained with {low} to {high} but got {batch_size}.")


def _check(where: str, validation: Validation) -> None:
    lengths = {len(column) for column in astuple(validation)}
    if len(lengths) != 1 or lengths == {0}:
        raise InvalidInputError(f"{where} must have an epoch at least, with all its figures.")
    for column in (validation.progress, validation.steps):
        if not all(low < high < math.inf for low, high in pairwise((0.0, *column))):
            raise InvalidInputError(f"{where} must have progress and iterations that ascend.")
