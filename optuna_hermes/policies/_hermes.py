"""Harmonic rank: the default policy."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import get_args

import numpy as np

from optuna_hermes.curves import Signal, signals_at
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import Curve, Decision, RunView, Snapshot
from optuna_hermes.policies._base import Policy, opened, place, unopened

MAX_ALPHA = 32
"""Beyond this nothing changes, and the index of a trial ranked last would overflow."""


class Hermes(Policy):
    """Runs next the trial that minimises ``rank_at_equal_age ** alpha * units_used``.

    The rank of a trial (1 is best) counts the trials, finished and running ones among them, whose
    signal was lower when they were as old as it is now; trials with a NaN or infinite signal rank
    last, and equal indices go to the earlier trial. So a trial's share of the time falls as a
    power of its rank, nothing is killed and nothing starves. Every trial gets its first unit
    before it is ranked. A fixed list of trials is opened at once; of a sampler that learns, trial
    ``m + 1`` is opened once the smallest index reaches ``opening * (m + 1) ** alpha``, where ``m``
    trials were opened so far, or when no run waits.

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
        alpha: how much rank counts, from 0 (equal units for all) to 32 (in effect greedy).
        opening: how late trials of a sampler that learns are opened; 0 opens all at once.
        signal: what is compared at equal age, see ``optuna_hermes.curves.Signal``.

    Raises:
        InvalidInputError: an argument is out of its range.
    """

    def __init__(self, alpha: float = 1.5, opening: float = 0.25, signal: Signal = "value") -> None:
        if not 0 <= alpha <= MAX_ALPHA:
            raise InvalidInputError(f"alpha must be between 0 and {MAX_ALPHA} but got {alpha}.")
        if not 0 <= opening < math.inf:
            raise InvalidInputError(f"opening must be finite and at least 0 but got {opening}.")
        if signal not in get_args(Signal):
            known = ", ".join(get_args(Signal))
            raise InvalidInputError(f"signal must be one of {known} but got {signal!r}.")
        self.alpha = alpha
        self.opening = opening
        self.signal: Signal = signal

    def decide(self, snapshot: Snapshot) -> Decision:
        """Give the free devices to the smallest indices, one after another."""
        return Decision(assignments=place(snapshot, self._order(snapshot)))

    def _order(self, snapshot: Snapshot) -> Iterator[RunView | None]:
        """Whom to run, best first; a trial that is opened delays the opening of the next."""
        new = deque(unopened(snapshot))
        known = [run for run in snapshot.runs if run.state != "pending"]
        n_opened = len(known) + len(snapshot.finished)
        for index, run in self._ranked(snapshot):
            while new and self._opens(index, n_opened, fixed=snapshot.unstarted.fixed):
                yield new.popleft()
                n_opened += 1
            yield run
        yield from new

    def _opens(self, smallest_index: float, n_opened: int, *, fixed: bool) -> bool:
        # Index 0 is a run without a report: it finishes its first unit before anything else.
        if smallest_index == 0:
            return False
        return fixed or smallest_index >= self.opening * (n_opened + 1) ** self.alpha

    def _ranked(self, snapshot: Snapshot) -> Iterator[tuple[float, RunView]]:
        """The opened runs with their indices, smallest first; ages are ranked as they are needed.

        No run of age ``n`` has an index below ``n``, so older runs can wait.
        """
        runs = (*snapshot.runs, *snapshot.finished)
        curves = sorted((run.curve for run in runs if run.curve.units), key=_age)
        ages = [_age(curve) for curve in curves]
        by_age: defaultdict[int, list[RunView]] = defaultdict(list)
        for run in opened(snapshot):
            by_age[run.curve.units].append(run)
        heap: list[tuple[float, int, RunView]] = []
        for age in sorted(by_age):
            while heap and heap[0][0] < age:
                yield _pop(heap)
            ranks = self._ranks(by_age[age], curves[bisect_left(ages, age) :], len(curves))
            for run, rank in zip(by_age[age], ranks, strict=True):
                heapq.heappush(heap, (rank**self.alpha * age, run.number, run))
        while heap:
            yield _pop(heap)

    def _ranks(self, runs: Sequence[RunView], peers: Sequence[Curve], last: int) -> list[int]:
        """The ranks of ``runs``, all of one age, among ``peers``, all at least as old."""
        age = runs[0].curve.units
        if age == 0:
            return [1] * len(runs)
        own = signals_at([run.curve for run in runs], age, self.signal)
        lower = np.searchsorted(np.sort(signals_at(peers, age, self.signal)), own)
        ranks: list[int] = np.where(np.isfinite(own), lower + 1, last).tolist()
        return ranks


def _age(curve: Curve) -> int:
    return curve.units


def _pop(heap: list[tuple[float, int, RunView]]) -> tuple[float, RunView]:
    index, _, run = heapq.heappop(heap)
    return index, run
