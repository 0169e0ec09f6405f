"""What a training step takes, by placement and batch size: between measurements, never beyond."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from optuna_hermes.errors import InvalidInputError

Shape = tuple[int, ...]
"""How many devices a run has on each of its hosts, ascending; which hosts they are is not asked."""

DENSE_HOSTS = 4
"""Up to so many hosts every shape was measured, from one device a host to four."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """One measurement, or what is read between some.

    Args:
        step_seconds: of a step, gradients being averaged over all devices at its end.
        sync_seconds: the part of it that the averaging adds: a step that only accumulates
            gradients goes without.
    """

    step_seconds: float
    sync_seconds: float

    def accumulated(self, passes: int) -> float:
        """Seconds of a step that takes its batch in so many passes."""
        return passes * self.step_seconds - (passes - 1) * self.sync_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One line of a table of step times.

    Args:
        shape: devices on each host; None if only their numbers are known.
        hosts: how many hosts.
        devices: how many devices in all.
        local_batch: samples a device and a pass.
        time: what was measured.
    """

    shape: Shape | None
    hosts: int
    devices: int
    local_batch: int
    time: StepTime


class _Line:
    """Step times of one placement, by samples a device: straight between what was measured."""

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

    A shape that was measured is read off its own line, straight between two batch sizes. Others
    lie between four lines: those of the next smaller and larger number of hosts, and on each of
    them of devices, at the same number of devices a host; step time is linear along both. Beyond
    what was measured nothing is known, and is refused.

    Args:
        table: what was measured: on 1 to ``DENSE_HOSTS`` hosts by shape, on more by numbers.

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
        """What a step takes.

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
        """The most samples that one device took, alone on one host; None if that is not known."""
        limits = self.limits((1,))
        return None if limits is None else limits[1]

    def _limits(self, shape: Shape) -> tuple[int, int] | None:
        """The least and the most samples a device that were measured, None if nothing was."""
        lines = [line for line, _ in self.lines(shape)]
        if not lines:
            return None
        least = max(line.batches[0] for line in lines)
        most = min(line.batches[-1] for line in lines)
        return (least, most) if least <= most else None

    def _lines(self, shape: Shape) -> tuple[tuple[_Line, float], ...]:
        """The lines between which a shape lies, and how much of each; none if it lies outside."""
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
    """The neighbours of a number and how much of each it is; none if it lies outside."""
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
