"""Harmonic rank: the default policy."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeAlias

import numpy as np

from optuna_hermes.curves import CurveCache, Floats, Places, leads, places
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import Decision, Snapshot, TrialView
from optuna_hermes.policies._deadline import due
from optuna_hermes.policies._predictivity import Predictivity
from optuna_hermes.policies._smoothing import noise, smoothing
from optuna_hermes.policies._trial_table import Flags, TrialTable
from optuna_hermes.policies.base import Policy, place, unopened

# Beyond this the order stays the same, and the index of a trial ranked last would overflow.
MAX_ALPHA = 16
# Weight of what early ranks say on how readily trials are opened.
_CAUTION = 5.0
# Number of trials that it is measured on.
_MEASURED = 256
# Factor of the power of a rank, and power of the share of life that is left.
_LEAST_GREED = 0.3
_REST, _MOST_REST = 0.25, 2.0
# Share of what trials took that their openings can have.
_MOST_OPENING = 0.9
# Number of pairs of trials compared at once, which bounds the memory of a decision.
_CELLS = 100_000


class Hermes(Policy):
    """Trains next the trial that has had least device time for its rank.

    A trial's place (1 is best) counts the trials, finished and running ones among them, that are
    lower now. Its lead counts those that were lower when they were as old as it is, and would be
    lower still if it fell on for half as long at the pace of its last half: so one that will
    overtake goes before one that has settled, and one that is young is compared with the others
    as they were. Of its life, the share ``s`` is over. The trial goes next that minimises
    ``(place * lead) ** (alpha / 2 * (1 + s)) * sqrt(units * seconds) * (1 - s) ** (1 / 4)``, with
    its device time in mean units. So its share of the devices falls as a power of its rank,
    nothing is killed; an expensive trial gets fewer units in more time; a
    trial that is behind late in its life gets less, and one about to end is brought to its end.
    NaN and infinite values rank last, and of equal ones the earlier trial goes first.

    Values are smoothed before they are ranked, by as much as is measured of noise in the study; and
    the less first ranks say about last ones, compared with what is usual, the less ranks count and
    the more the share of life that is left does, so that what was begun is rather finished: with
    the difference ``z`` of Fisher's z, ``alpha`` is multiplied by ``exp(z)``, from 0.3 to 1, and
    the power 1 / 4 by ``exp(-4 * z)``, from 1 to 8.

    Of a study with a number of trials none starves. Without one, a trial that falls behind may give
    way to new ones for good.

    Every trial gets its first unit before it is ranked. Of a list whose parameters are known the
    first 15 trials are opened in order. Then a Gaussian process over parameters foresees which rank
    each of the others may have at its best, and the first by that is opened once the smallest index
    reaches ``4 * rank ** alpha``. Any other fixed list is opened at once; of a
    sampler that learns, trial ``m + 1`` is opened once the smallest index reaches
    ``opening * (m + 1) ** alpha``, where ``m`` were opened so far, or when no trial waits. That
    bound is larger by as many times as the first unit takes longer with its opening; and the less
    first ranks say about last ones in this study, compared with what is usual, the larger it is:
    then more of what was begun is trained on before more is begun.

    Before the end of a budget the best trial that can still end goes first, as late as it can.

    The name is that of Son et al., "Hermes", Electronics 2021, 10(3), 350, whose idea it is that
    the trials that converge first go first, and that the others are suspended and not killed. The
    formula is this project's own.

    Example:
        >>> from optuna_hermes.model import Curve, Device, TrialView, Snapshot
        >>> def parked(number, *values):
        ...     units = tuple(range(1, len(values) + 1))
        ...     curve = Curve(steps=units, values=values, device_seconds=units)
        ...     return TrialView(number=number, state="parked", curve=curve)
        >>> trials = (parked(0, 0.9, 0.8), parked(1, 0.5, 0.3))
        >>> snapshot = Snapshot(devices=(Device(id="cpu:0", free=True),), trials=trials)
        >>> Hermes().decide(snapshot).assignments[0].trial
        1

    Args:
        alpha: weight of the rank, from 0 (equal time for all) to 16 (in effect greedy).
        opening: delay of opening trials of a sampler that learns; 0 opens all at once.
    """

    def __init__(self, alpha: float = 1.5, opening: float = 0.2) -> None:
        if not 0 <= alpha <= MAX_ALPHA:
            raise InvalidInputError(f"alpha must be between 0 and {MAX_ALPHA} but got {alpha}.")
        if not 0 <= opening < math.inf:
            raise InvalidInputError(f"opening must be finite and at least 0 but got {opening}.")
        self.alpha = alpha
        self.opening = opening
        self._measured = _Measured()

    def decide(self, snapshot: Snapshot) -> Decision:
        listed = _listed_trials(snapshot) if snapshot.unstarted.fixed else []
        if not listed:
            return Decision(
                assignments=place(snapshot, self._by_index(snapshot)),
                # Of a list that is shown again once there is a process for it.
                memory=snapshot.memory if snapshot.unstarted.fixed else None,
            )
        # Optimisers take long to import, and few studies have a list. Theirs are imported before
        # their first trial is opened.
        from optuna_hermes.policies import _listed

        ranking = _Ranking(self._measured, snapshot, self.alpha)
        n_begun = ranking.n_begun
        foreseen = _listed.predicted_ranks(snapshot.memory, listed, ranking, n_begun)
        by_rank = _listed.openings(listed, foreseen, n_begun, self.alpha)
        set_up = {trial.number for trial in snapshot.trials if trial.state == "pending"}
        by_rank = _listed.at_most(snapshot.unstarted.count, by_rank, set_up)
        price = ranking.opening_price(snapshot.opening_seconds)
        openings = ((price * opening, trial) for opening, trial in by_rank)
        order = chain(ranking.first(), _unlisted(snapshot, listed), _merged(ranking, openings))
        return Decision(
            assignments=place(snapshot, _with_first(ranking.due, order)),
            memory=None if foreseen is None else foreseen.to_memory(),
        )

    def _by_index(self, snapshot: Snapshot) -> Iterator[TrialView | None]:
        ranking = _Ranking(self._measured, snapshot, self.alpha)
        new = unopened(snapshot)
        listed = new if snapshot.unstarted.fixed else []
        openings = self._openings(snapshot, [] if listed else new, ranking)
        order = chain(ranking.first(), listed, _merged(ranking, openings))
        yield from _with_first(ranking.due, order)

    def _openings(
        self, snapshot: Snapshot, new: Sequence[TrialView | None], ranking: _Ranking
    ) -> Iterator[_Opening]:
        """Proposals of a sampler that learns."""
        if not new:
            return
        opening = self.opening * ranking.opening_price(snapshot.opening_seconds)
        opening *= math.exp(-_CAUTION * ranking.predictivity)
        for n_opened, trial in enumerate(new, ranking.n_begun):
            yield opening * (n_opened + 1) ** self.alpha, trial


_Opening: TypeAlias = tuple[float, TrialView | None]
"""A trial that can be opened, with the index that those that wait must reach before."""


def _with_first(
    first: TrialView | None, order: Iterable[TrialView | None]
) -> Iterator[TrialView | None]:
    """An order in which a trial, if one is given, comes first."""
    if first is not None:
        yield first
    for trial in order:
        if trial is None or trial is not first:
            yield trial


def _merged(ranking: _Ranking, openings: Iterator[_Opening]) -> Iterator[TrialView | None]:
    """The trials that wait, and between them those that can be opened, each at its index."""
    ahead = next(openings, None)
    for index, trial in ranking.in_order():
        while ahead is not None and index >= ahead[0]:
            yield ahead[1]
            ahead = next(openings, None)
        yield trial
    if ahead is not None:
        yield ahead[1]
        yield from (trial for _, trial in openings)


def _listed_trials(snapshot: Snapshot) -> list[TrialView]:
    """The trials of a fixed list that have not begun and whose parameters are known, in order."""
    set_up = [trial for trial in unopened(snapshot) if trial is not None and trial.params]
    return [*set_up, *snapshot.unstarted.listed]


def _unlisted(snapshot: Snapshot, listed: Sequence[TrialView]) -> Iterator[TrialView]:
    """Trials that can be opened and are not listed; one without a number would be of the list."""
    known = {trial.number for trial in listed}
    for trial in unopened(snapshot):
        if trial is not None and trial.number not in known:
            yield trial


class _Measured:
    """Caches of what follows from curves, kept between decisions, which it does not change."""

    def __init__(self) -> None:
        self.table = TrialTable()
        self.predictivity = Predictivity()
        self.noise = CurveCache(noise)


class _Ranking:
    """The trials that have reported, waiting ones first, and the indices of the waiting ones."""

    def __init__(self, measured: _Measured, snapshot: Snapshot, alpha: float) -> None:
        table = measured.table
        self._all = (*snapshot.trials, *snapshot.finished)
        rows = table.rows(self._all)
        self.n_begun = int(table.begun[rows].sum())
        """Number of trials that have begun."""
        self.due = due(snapshot, table, rows)
        """The trial that must go on now to end within the budget."""
        waits = _can_go_on(snapshot, self._all, table, rows)
        # By number.
        waiting = np.flatnonzero(waits)
        waiting = waiting[np.argsort(table.numbers[rows[waiting]], kind="stable")]
        # A trial without a report has no rank: every first unit is finished before any compare.
        reports = table.units[rows] > 0
        self._first = waiting[~reports[waiting]]
        ranked = waiting[reports[waiting]]
        self._n_waiting = len(ranked)
        self._places = np.concatenate([ranked, np.flatnonzero(reports & ~waits)])
        rows = rows[self._places]
        self._starts, self._units = table.starts[rows], table.units[rows]
        self._seconds, self._numbers = table.seconds[rows], table.numbers[rows]
        had = self._units[: self._n_waiting]
        lengths = np.nan_to_num(had + table.left[rows[: self._n_waiting]])
        newest = _newest(self._numbers)
        longest = int(max(self._units.max(initial=0), lengths.max(initial=0)))
        self.predictivity = measured.predictivity.beyond_usual(
            table.curves.values, self._starts[newest], self._units[newest], longest
        )
        """Of the study's first ranks, 0 as usual."""
        noises = measured.noise.each(self._trial(each).curve for each in newest.tolist())
        self._values = table.curves.smoothed(smoothing(noises))
        self._last = self._values[self._starts + self._units - 1]
        over = np.where(lengths > 0, had / np.maximum(lengths, 1), 0.0)
        greed, rest = _exponents(self.predictivity)
        self._power = greed * alpha / 2 * (1 + over)
        self._price = _prices(self._units, self._seconds)[: len(over)] * (1 - over) ** rest

    def first(self) -> Iterator[TrialView]:
        """The trials that wait for their first unit, by number."""
        return (self._all[each] for each in self._first.tolist())

    def _trial(self, index: int) -> TrialView:
        return self._all[int(self._places[index])]

    @property
    def n_units(self) -> int:
        """Units that all trials have reported."""
        return int(self._units.sum())

    @property
    def n_reported(self) -> int:
        """Number of trials that have reported."""
        return len(self._places)

    def in_order(self) -> Iterator[tuple[float, TrialView]]:
        # Comparing all with all would take too long for thousands of trials: an index is worked
        # out only when its lower bound, by the place alone, is the smallest one left.
        # A lower bound of each index, since a lead is at least 1.
        bounds = self._price * places(self._last)[: self._n_waiting] ** self._power
        order = np.argsort(bounds, kind="stable")
        at_once = max(1, _CELLS // max(1, len(self._places)))
        heap: list[tuple[float, int, int]] = []
        for start in range(0, len(order), at_once):
            some = order[start : start + at_once]
            while heap and heap[0][0] < bounds[some[0]]:
                index, _, first = heapq.heappop(heap)
                yield index, self._trial(first)
            lead = leads(self._values, self._starts, self._units, self._last, some)
            indices = bounds[some] * lead ** self._power[some]
            numbers = self._numbers[some].tolist()
            heap += zip(indices.tolist(), numbers, some.tolist(), strict=True)
            heapq.heapify(heap)
        while heap:
            index, _, first = heapq.heappop(heap)
            yield index, self._trial(first)

    def scores(self, choose: Callable[[Places], Places]) -> tuple[list[TrialView], Floats]:
        """Trials, and the logarithms of their ranks; ``choose`` picks some by their places."""
        place = places(self._last)
        by_number = np.argsort(self._numbers)
        some = by_number[choose(place[by_number])]
        lead = leads(self._values, self._starts, self._units, self._last, some)
        return [self._trial(each) for each in some.tolist()], 0.5 * np.log(place[some] * lead)

    def opening_price(self, seconds: float) -> float:
        """Mean units that a new trial's first one takes with its opening, 1 where that is free."""
        total, n_trials = float(self._seconds.sum()), len(self._places)
        if not (n_trials and 0 < total < math.inf):
            return 1.0
        # Each trial's first unit has its opening. The newest openings, which are told, may have
        # taken longer than those of these trials can have.
        seconds = min(seconds, _MOST_OPENING * total / n_trials)
        return 1.0 + seconds * float(self._units.sum()) / (total - seconds * n_trials)


def _can_go_on(
    snapshot: Snapshot, trials: Sequence[TrialView], table: TrialTable, rows: Places
) -> Flags:
    """True for the trials that have begun and could use a free device now."""
    waits = table.waits[rows]
    waits[len(snapshot.trials) :] = False
    free = {device.id for device in snapshot.devices if device.free and device.healthy}
    for each in np.flatnonzero(waits & table.bound[rows]).tolist():
        waits[each] = not free.isdisjoint(trials[each].bound_to)
    return waits


def _newest(numbers: Places) -> Places:
    """The trials that noise and predictivity are measured on, by their numbers."""
    # The newest tell of the present proposals, and few are enough.
    last = max(0, len(numbers) - _MEASURED)
    newest = np.argpartition(numbers, last)[last:] if last else np.arange(len(numbers))
    return np.asarray(newest[np.argsort(numbers[newest])])


def _exponents(predictivity: float) -> tuple[float, float]:
    """Factor of the power of ranks, and power of the share of life that is left.

    Where early ranks say less than usual, what was begun is rather brought to its end.
    """
    greed = min(max(math.exp(predictivity), _LEAST_GREED), 1.0)
    rest = min(max(_REST * math.exp(-4 * predictivity), _REST), _MOST_REST)
    return greed, rest


def _prices(units: Places, seconds: Floats) -> Floats:
    """The geometric mean of each trial's units and its device time in mean units."""
    if not (np.isfinite(seconds) & (seconds > 0)).all():
        return units.astype(np.float64)
    mean_seconds = seconds.sum() / max(1, units.sum())
    return np.sqrt(units * seconds / mean_seconds) if mean_seconds else seconds
