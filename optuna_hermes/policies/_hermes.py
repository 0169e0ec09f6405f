"""Harmonic rank: the default policy."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import repeat

import numpy as np

from optuna_hermes.curves import CurveTable, Floats, Places, reach
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import Decision, RunView, Snapshot
from optuna_hermes.policies._base import Policy, opened, place, unopened

MAX_ALPHA = 32
"""Beyond this nothing changes, and the index of a trial ranked last would overflow."""

_CELLS = 100_000
"""How many pairs of runs are compared at once."""


class Hermes(Policy):
    """Runs next the trial that has had least for its rank.

    A trial's rank (1 is best) counts the trials, finished and running ones among them, that were
    lower when they were as old as it is now. Its lead counts only those of them that would still
    be lower if it fell once more as it did over the last half of its units: it tells a trial that
    will overtake from one that has settled. The trial goes next that minimises
    ``(rank * lead) ** (alpha / 2) * sqrt(units * seconds)``, with the device time it has had in
    mean units. So its share of the devices falls as a power of its rank, nothing is killed and
    nothing starves; an expensive trial gets fewer units for more time. NaN and infinite values
    rank last, and of equal ones the earlier trial goes first.

    Every trial gets its first unit before it is ranked. A fixed list is opened at once; of a
    sampler that learns, trial ``m + 1`` is opened once the smallest index reaches
    ``opening * (m + 1) ** alpha``, where ``m`` were opened so far, or when no run waits.

    The name is that of Son et al., "Hermes", Electronics 2021, 10(3), 350, whose idea it is that
    the trials that converge first go first, and that the others are suspended and not killed. The
    formula is this project's own.

    Example:
        >>> from optuna_hermes.model import Curve, Device, RunView, Snapshot
        >>> def parked(number, *values):
        ...     units = tuple(range(1, len(values) + 1))
        ...     curve = Curve(steps=units, values=values, device_seconds=units)
        ...     return RunView(number=number, state="parked", curve=curve)
        >>> runs = (parked(0, 0.9, 0.8), parked(1, 0.5, 0.3))
        >>> snapshot = Snapshot(devices=(Device(id="cpu:0", free=True),), runs=runs)
        >>> Hermes().decide(snapshot).assignments[0].run
        1

    Args:
        alpha: how much rank counts, from 0 (equal time for all) to 32 (in effect greedy).
        opening: how late trials of a sampler that learns are opened; 0 opens all at once.

    Raises:
        InvalidInputError: an argument is out of its range.
    """

    def __init__(self, alpha: float = 1.5, opening: float = 0.1) -> None:
        if not 0 <= alpha <= MAX_ALPHA:
            raise InvalidInputError(f"alpha must be between 0 and {MAX_ALPHA} but got {alpha}.")
        if not 0 <= opening < math.inf:
            raise InvalidInputError(f"opening must be finite and at least 0 but got {opening}.")
        self.alpha = alpha
        self.opening = opening
        self._table = CurveTable()

    def decide(self, snapshot: Snapshot) -> Decision:
        """Give the free devices to the smallest indices, one after another."""
        return Decision(assignments=place(snapshot, self._order(snapshot)))

    def _order(self, snapshot: Snapshot) -> Iterator[RunView | None]:
        """Whom to run, best first; a trial that is opened delays the opening of the next."""
        waiting = opened(snapshot)
        # The first unit of every run is finished before anything is compared.
        yield from (run for run in waiting if not run.curve.values)
        new = deque(unopened(snapshot))
        if snapshot.unstarted.fixed:
            yield from new
            new.clear()
        n_opened = len(snapshot.finished)
        if new:
            n_opened += sum(run.state != "pending" for run in snapshot.runs)
        for index, run in _Field(self._table, snapshot, waiting, self.alpha).in_order():
            while new and index >= self.opening * (n_opened + 1) ** self.alpha:
                yield new.popleft()
                n_opened += 1
            yield run
        yield from new


class _Field:
    """The runs that have reported, oldest first, and the indices of those that wait.

    Comparing all with all would take too long where there are thousands: an index is worked out
    only when a lower bound of it is the smallest.
    """

    def __init__(
        self, table: CurveTable, snapshot: Snapshot, waiting: Sequence[RunView], alpha: float
    ) -> None:
        self._power = alpha / 2
        reported = [run for run in waiting if run.curve.values]
        n_waiting, numbers = len(reported), {run.number for run in reported}
        others = (*snapshot.runs, *snapshot.finished)
        reported += [run for run in others if run.number not in numbers and run.curve.values]
        rows = table.rows([run.curve for run in reported])
        order = np.argsort(-table.units[rows], kind="stable")
        rows = rows[order]
        self._waiting = np.flatnonzero(order < n_waiting)
        self._runs = [reported[place_] for place_ in order.tolist()]
        self._rows, self._values = rows, table.values
        self._ages = units = table.units[rows]
        self._last = table.values[rows, units - 1]
        self._reach = reach(self._last, table.values[rows, units - 1 - units // 2], units)
        self._price = _prices(units, table.seconds[rows])
        self._at_once = max(1, _CELLS // max(1, len(rows)))

    def in_order(self) -> Iterator[tuple[float, RunView]]:
        """The waiting runs with their indices, smallest first."""
        heap: list[tuple[float, int, int, Places | int]] = []
        for batch in self._batches():
            heapq.heappush(heap, (float(self._price[batch].min()), 0, int(batch[0]), batch))
        while heap:
            index, _, _, batch_or_place = heapq.heappop(heap)
            if isinstance(batch_or_place, int):
                yield index, self._runs[batch_or_place]
            elif len(batch_or_place) > self._at_once:
                for bound, part in self._parts(batch_or_place):
                    heapq.heappush(heap, (bound, 1, int(part[0]), part))
            else:
                places = batch_or_place.tolist()
                numbers = [self._runs[place_].number for place_ in places]
                heap += zip(self._indices(batch_or_place), repeat(2), numbers, places)
                heapq.heapify(heap)

    def _batches(self) -> Iterator[Places]:
        """The waiting runs: all, or those of one age after another if that is too much at once."""
        if len(self._waiting) > self._at_once:
            ages = self._ages[self._waiting]
            for age in np.unique(ages).tolist():
                yield self._waiting[ages == age]
        elif len(self._waiting):
            yield self._waiting

    def _parts(self, batch: Places) -> Iterator[tuple[float, Places]]:
        """Runs of one age in the order of what their ranks alone make of their indices."""
        age = int(self._ages[batch[0]])
        n_as_old = int(np.count_nonzero(self._ages >= age))
        peers = np.sort(self._values[self._rows[:n_as_old], age - 1])
        bounds = self._price[batch] * (peers.searchsorted(self._last[batch]) + 1) ** self._power
        order = np.argsort(bounds, kind="stable")
        for start in range(0, len(order), self._at_once):
            some = order[start : start + self._at_once]
            yield float(bounds[some[0]]), batch[some]

    def _indices(self, batch: Places) -> list[float]:
        own = self._last[batch, None]
        lower = self._values[self._rows, self._ages[batch, None] - 1] < own
        rank = lower.sum(axis=1) + 1
        lower &= self._last < self._reach[batch, None]
        lead = lower.sum(axis=1) + 1
        product = np.where(np.isinf(own[:, 0]), float(len(self._runs)) ** 2, rank * lead)
        indices: list[float] = (self._price[batch] * product**self._power).tolist()
        return indices


def _prices(units: Places, seconds: Floats) -> Floats:
    """Of each run the geometric mean of its units and its device time in mean units."""
    if not (np.isfinite(seconds) & (seconds > 0)).all():
        return units.astype(np.float64)
    mean_seconds = seconds.sum() / max(1, units.sum())
    prices: Floats = np.sqrt(units * seconds / mean_seconds) if mean_seconds else seconds
    return prices
