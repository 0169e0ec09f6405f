"""Curves as arrays: arithmetic on reported values, lower is better."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from optuna_hermes.model import Curve

Floats = NDArray[np.float64]
Places = NDArray[np.int64]
T = TypeVar("T")


class CurveCache(Generic[T]):
    """Cache of the value that ``work_out`` computes from each curve, kept while it is asked for.

    Example:
        >>> from optuna_hermes.model import Curve
        >>> best = CurveCache(lambda curve: min(curve.values))
        >>> best.each([Curve(steps=(1, 2), values=(0.5, 0.25), device_seconds=(1.0, 2.0))])
        [0.25]
    """

    def __init__(self, work_out: Callable[[Curve], T]) -> None:
        self._work_out = work_out
        self._known: dict[int, tuple[Curve, T]] = {}

    def each(self, curves: Iterable[Curve]) -> list[T]:
        """Return the value of each curve, in order."""
        # A curve that was not in the last call is dropped: a trial reports for as long as it likes,
        # and each of its reports makes a new curve.
        before, self._known = self._known, {}
        found = []
        for curve in curves:
            # As long as a curve is kept no other has its identity.
            known = before.get(id(curve)) or (curve, self._work_out(curve))
            self._known[id(curve)] = known
            found.append(known[1])
        return found


class CurveTable:
    """Table of curves, one behind another in an array, so that each is turned into numbers once.

    Example:
        >>> from optuna_hermes.model import Curve
        >>> curve = Curve(steps=(1, 2), values=(0.5, 0.25), device_seconds=(1.0, 2.0))
        >>> table = CurveTable()
        >>> rows = table.rows([curve])
        >>> table.values[table.starts[rows] + 1].tolist(), table.units[rows].tolist()
        ([0.25], [2])
    """

    # Between two decisions of a policy one trial of thousands has reported. What a table keeps
    # makes it faster and changes no result: curves are immutable, and known by identity. It is no
    # matrix, for then one long curve would make the rows of all as long.

    def __init__(self) -> None:
        self._forget()

    def rows(self, curves: Sequence[Curve]) -> Places:
        """Return the rows of curves, each with a unit, in ``starts``, ``units`` and ``seconds``."""
        if not curves:
            return np.zeros(0, dtype=np.int64)
        if len(self._known) >= grown(len(curves)):
            self._forget()
        rows = self.more_rows(curves)
        if self.is_wasteful(int(self.units[rows].sum())):
            self._forget()  # a few long curves take more than many short ones
            rows = self.more_rows(curves)
        return rows

    def is_wasteful(self, n_values: int) -> bool:
        """True if it keeps much more than so many values, which are still asked for."""
        return self._end > 2 * n_values + _SPARE * _SPARE

    def more_rows(self, curves: Sequence[Curve]) -> Places:
        """Return the rows of curves, as ``rows``; those of others stay."""
        known = list(map(self._known.get, map(id, curves)))
        if None in known:
            self._add([curve for curve, row in zip(curves, known, strict=True) if row is None])
            known = list(map(self._known.get, map(id, curves)))
        return np.array(known, dtype=np.int64)

    def smoothed(self, past: float) -> Floats:
        """Return ``values``, each as the exponential mean of a curve until there.

        Args:
            past: weight of the mean before, from 0 (``values`` themselves) to less than 1.
        """
        if not past:
            return self.values
        means, done = self._means.pop(past, (self.values[:0], 0))
        if len(means) < len(self.values):
            means = _lengthened(means, len(self.values))
        for row in range(done, len(self._curves)):
            start, end = self.starts[row], self.starts[row] + self.units[row]
            means[start:end] = exponential_means(self.values[start:end], past)
        if len(self._means) > 1:  # two are kept: what is measured of noise may waver between them
            self._means.pop(next(iter(self._means)))
        self._means[past] = means, len(self._curves)
        return means

    def _forget(self) -> None:
        self._known: dict[int, int] = {}
        self._means: dict[float, tuple[Floats, int]] = {}
        self._end = 0
        self._curves: list[Curve] = []  # as long as they are kept no other has their identity
        self.values: Floats = np.full(_SPARE, np.inf)
        """Value after each unit [start + unit - 1]; infinity for NaN and infinity."""
        self.starts: Places = np.zeros(_SPARE, dtype=np.int64)
        """Place of the first value [row]."""
        self.units: Places = np.zeros(_SPARE, dtype=np.int64)
        """Units [row]."""
        self.seconds: Floats = np.zeros(_SPARE)
        """Device time [row], as it was reported last."""

    def _add(self, curves: Sequence[Curve]) -> None:
        first = self._end
        n_rows = len(self._curves) + len(curves)
        n_values = first + sum(len(curve.values) for curve in curves)
        if n_rows > len(self.units):
            n_rows = grown(n_rows)
            self.starts, self.units = np.resize(self.starts, n_rows), np.resize(self.units, n_rows)
            self.seconds = np.resize(self.seconds, n_rows)
        if n_values > len(self.values):
            self.values = _lengthened(self.values, grown(n_values))
        for row, curve in enumerate(curves, len(self._curves)):
            start, self._end = self._end, self._end + len(curve.values)
            self.values[start : self._end] = curve.values
            self.starts[row], self.units[row] = start, len(curve.values)
            self.seconds[row] = curve.device_seconds[-1]
            self._known[id(curve)] = row
            self._curves.append(curve)
        added = self.values[first : self._end]
        added[~np.isfinite(added)] = np.inf


# Rows and values that a table has to begin with.
_SPARE = 64


def grown(size: int) -> int:
    """A larger size: in proportion, so that what is added one by one is copied rarely."""
    return size + size // 4 + _SPARE


def _lengthened(values: Floats, size: int) -> Floats:
    """The values, followed by infinite ones."""
    return np.concatenate([values, np.full(size - len(values), np.inf)])


def exponential_means(values: Floats, past: float) -> list[float]:
    """The exponential mean of values until each of them.

    It begins with the first finite one; others leave it as it is, and are returned as they are.

    Example:
        >>> exponential_means(np.array([1.0, 2.0, np.inf, 2.0]), 0.5)
        [1.0, 1.5, inf, 1.75]
    """
    means: list[float] = []
    mean, present = None, 1.0 - past
    for value in values.tolist():
        if value != math.inf:
            mean = value if mean is None else past * mean + present * value
            value = mean
        means.append(value)
    return means


def places(last: Floats) -> Places:
    """Rank trials by their last values [n]: 1 and the number of those that are lower.

    Infinite values are last of all.
    """
    place = np.sort(last).searchsorted(last) + 1
    return np.asarray(np.where(np.isinf(last), len(last), place))


def leads(values: Floats, starts: Places, units: Places, last: Floats, some: Places) -> Places:
    """Count who was lower at a trial's age, and stays lower if it falls on for half as long.

    Args:
        values: of a table [start + unit - 1].
        starts: of all trials in it [n].
        units: how many each of them has [n].
        last: their last values [n].
        some: the trials to count for [m].

    Returns:
        1 and their number [m]; for an infinite last value the number of all trials.
    """
    ages, own = units[some], last[some]
    goal = reach(own, values[starts[some] + ages - 1 - ages // 2], ages)
    # A younger curve has no value there but has one of others, or none, in its place.
    then = values.take(starts + (ages[:, None] - 1), mode="clip")
    lower = then < own[:, None]
    lower &= ages[:, None] <= units
    lower &= last < goal[:, None]
    return np.asarray(np.where(np.isinf(own), len(last), lower.sum(axis=1) + 1))


def reach(last: Floats, before: Floats, units: Places) -> Floats:
    """Extrapolate curves by half as many units as they have, at the pace of their last half.

    Args:
        last: their last values [n].
        before: their values ``units // 2`` units before [n].
        units: how many they have [n].

    Returns:
        A value for each curve [n]: its last one if it has not fallen since.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        fall = (before - last) * (units / 2 / np.maximum(units // 2, 1))
        reached = last - np.where(np.isfinite(fall), np.maximum(fall, 0.0), 0.0)
    return np.where(np.isfinite(reached), reached, last)
