"""Listed trials: which of them are opened next, and when, by what is foreseen of their parameters.

A surrogate, a Gaussian process over parameters, is fitted to the logarithms of the ranks of the
trials that have reported. That takes tens of milliseconds, so what it foresees is kept in the
policy's memory until a fifth more units are reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from optuna_hermes.curves import Floats, Places
from optuna_hermes.model import TrialView
from optuna_hermes.surrogate import Observations, Process, points_of

IN_ORDER = 15
"""Trials that are opened in the order of their list, before anything is foreseen."""
LEAST_REPORTED = 8
"""Trials that must have reported by then."""
OPENING = 4.0
"""Delay of opening a trial, times the index of one that has its rank after one unit."""
GROWTH = 1.2
"""Factor by which units in all grow between two fits."""
MOST_MODELLED = 64
"""Trials that have reported, of those that a process is fitted to."""
MOST_FORESEEN = 512
"""Listed trials that are looked at in one fit."""
MOST_KEPT = 64
"""The best ones of those, which are kept in memory."""
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, kw_only=True)
class PredictedRanks:
    """Ranks that listed trials may have among those that have reported.

    Args:
        units: reported in all when they were foreseen.
        ranks: by the trial's number, the lowest first.
    """

    units: int
    ranks: Mapping[int, float]

    def holds(self, units: int, listed: Sequence[TrialView]) -> bool:
        """True if so many units do not say much more, and it is about any of the listed trials."""
        some = any(trial.number in self.ranks for trial in listed)
        return some and self.units <= units < GROWTH * self.units

    def to_memory(self) -> Any:
        """Return it as JSON."""
        return {"units": self.units, "ranks": [[n, rank] for n, rank in self.ranks.items()]}

    @staticmethod
    def from_memory(memory: Any) -> PredictedRanks | None:
        """Read what ``to_memory`` has given; None for anything else."""
        try:
            ranks = {int(number): float(rank) for number, rank in memory["ranks"]}
            return PredictedRanks(units=int(memory["units"]), ranks=ranks)
        except (TypeError, KeyError, ValueError, OverflowError):
            return None


class Ranking(Protocol):
    """The ranks of the trials that have reported."""

    @property
    def n_reported(self) -> int: ...

    @property
    def n_units(self) -> int: ...

    def scores(self, choose: Callable[[Places], Places]) -> tuple[list[TrialView], Floats]: ...


def predicted_ranks(
    memory: Any, listed: Sequence[TrialView], ranks: Ranking, n_begun: int
) -> PredictedRanks | None:
    """The ranks foreseen of listed trials, remembered or anew; None if too little is known."""
    if n_begun < IN_ORDER or ranks.n_reported < LEAST_REPORTED:
        return None
    known, units = PredictedRanks.from_memory(memory), ranks.n_units
    if known is not None and known.holds(units, listed):
        return known
    return predict_ranks(*ranks.scores(modelled), units, listed)


def predict_ranks(
    reported: Sequence[TrialView], scores: Floats, units: int, listed: Sequence[TrialView]
) -> PredictedRanks:
    """Foresee the ranks of listed trials, at their best.

    Args:
        reported: trials that have reported.
        scores: logarithms of their ranks [n].
        units: reported in all, by other trials too.
        listed: trials whose ranks are asked for.
    """
    some = _looked_at(listed, units)
    points = points_of([each.params for each in (*reported, *some)])
    n = len(reported)
    # Ranks of trials of different ages can be compared, so that all count as of one age: for an
    # age that few have reached a process over ages promises much to all trials.
    observed = Observations(trials=np.arange(n), ages=np.zeros(n), values=scores, end=0.0)
    ranks = np.exp(Process(points[:n], observed).lower_bound(points[n:], observed.end))
    best = np.argsort(ranks, kind="stable")[:MOST_KEPT].tolist()
    return PredictedRanks(units=units, ranks={some[at].number: float(ranks[at]) for at in best})


def openings(
    listed: Sequence[TrialView], foreseen: PredictedRanks | None, n_begun: int, alpha: float
) -> Iterator[tuple[float, TrialView]]:
    """The listed trials from the best one down, with the index that those that wait must reach.

    Args:
        listed: in the order of their list.
        foreseen: of them, None if nothing is.
        n_begun: trials that have begun.
        alpha: the policy's weight of the rank.
    """
    if foreseen is None:
        # Without reports there is nothing to be compared with: more are opened in order.
        n_first = IN_ORDER - n_begun if n_begun < IN_ORDER else len(listed)
        yield from ((0.0, trial) for trial in listed[:n_first])
        yield from ((math.inf, trial) for trial in listed[n_first:])
        return
    ranks = foreseen.ranks
    known = {trial.number: trial for trial in listed if trial.number in ranks}
    for number, rank in ranks.items():
        if number in known:
            yield OPENING * rank**alpha, known[number]
    yield from ((math.inf, trial) for trial in listed if trial.number not in ranks)


def at_most(
    count: int | None, ordered: Iterator[tuple[float, TrialView]], admitted: Collection[int]
) -> Iterator[tuple[float, TrialView]]:
    """The first ones of openings, so that no more are created; ``admitted`` ones exist already."""
    for opening, trial in ordered:
        if trial.number in admitted:
            yield opening, trial
        elif count is None or count > 0:
            count = None if count is None else count - 1
            yield opening, trial


def modelled(places: Places) -> Places:
    """The trials that a process is fitted to: the best of so many, and of the others some evenly.

    Args:
        places: of trials, 1 for the best [n].
    """
    if len(places) <= MOST_MODELLED:
        return np.arange(len(places))
    order = np.argsort(places, kind="stable")
    half = MOST_MODELLED // 2
    evenly = np.linspace(half, len(order) - 1, MOST_MODELLED - half).astype(np.int64)
    return np.asarray(np.sort(np.concatenate([order[:half], order[evenly]])))


def _looked_at(listed: Sequence[TrialView], units: int) -> Sequence[TrialView]:
    """The listed trials, or so many spread over the list; others when there are more units."""
    if len(listed) <= MOST_FORESEEN:
        return listed
    places = np.arange(len(listed)) + units
    chosen = np.argsort(places * _GOLDEN % 1.0, kind="stable")[:MOST_FORESEEN]
    return [listed[place] for place in np.sort(chosen).tolist()]
