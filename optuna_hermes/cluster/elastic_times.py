"""Step times by placement and batch size, interpolated between measurements, never extrapolated."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from optuna_hermes.errors import InvalidInputError

Shape = tuple[int, ...]
"""Numbers of devices on each host of a training, ascending, without the hosts' names."""

DENSE_HOSTS = 4
"""Up to this number of hosts every shape was measured, from one device a host to four."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """A measured or interpolated step time.

    Args:
        step_seconds: time of a step with gradients averaged over all devices at its end.
        sync_seconds: the part of it for averaging, which a step that only accumulates
            gradients does not need.
    """

    step_seconds: float
    sync_seconds: float

    def accumulated(self, passes: int) -> float:
        """Seconds of a step that takes its batch in ``passes`` passes."""
        return passes * self.step_seconds - (passes - 1) * self.sync_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One line of a table of step times.

    Args:
        shape: devices on each host; None if only their numbers are known.
        hosts: number of hosts.
        devices: number of devices in all.
        local_batch: samples per device and pass.
        time: the measured step time.
    """

    shape: Shape | None
    hosts: int
    devices: int
    local_batch: int
    time: StepTime


class _Line:
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
    of devices, at the same number of devices a host; step time is linear along both. Shapes
    outside of the measurements are refused.

    Args:
        table: the measurements: on 1 to ``DENSE_HOSTS`` hosts by shape, on more by numbers.

    Raises:
        InvalidInputError: the table is empty.
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
        self._shapes = {shape: _Line(points) for shape, points in shapes.items()}
        self._grid = {place: _Line(points) for place, points in grid.items()}
        self._hosts = sorted({hosts for hosts, _ in grid})
        self._devices = {
            hosts: sorted(devices for at, devices in grid if at == hosts) for hosts in self._hosts
        }
        self.lines = cache(self._lines)
        self.limits = cache(self._limits)

    def at(self, shape: Shape, local_batch: float) -> StepTime:
        """The time of a step.

        Args:
            shape: devices on each host.
            local_batch: samples a device and a pass, within ``limits(shape)``.
        """
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
        """The least and the most samples a device that were measured, None without measurements."""
        lines = [line for line, _ in self.lines(shape)]
        if not lines:
            return None
        least = max(line.batches[0] for line in lines)
        most = min(line.batches[-1] for line in lines)
        return (least, most) if least <= most else None

    def _lines(self, shape: Shape) -> tuple[tuple[_Line, float], ...]:
        """The lines between which a shape lies, with their weights; empty if it lies outside."""
        if shape in self._shapes:
            return ((self._shapes[shape], 1.0),)
        found: list[tuple[_Line, float]] = []
        density = sum(shape) / len(shape)
        for hosts, weight in _around(self._hosts, len(shape)):
            around = _around(self._devices[hosts], density * hosts)
            if not around:
                return ()
            found += [(self._grid[hosts, count], weight * part) for count, part in around]
        return tuple((line, weight) for line, weight in found if weight > 0)


def _around(known: Sequence[int], wanted: float) -> tuple[tuple[int, float], ...]:
    """The neighbours of a number with their weights; empty if it lies outside."""
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
