"""Rules that stop trials: successive halving, Hyperband, and the median rule."""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from statistics import median
from zlib import crc32

from optuna_hermes.model import Decision, Snapshot, TrialView
from optuna_hermes.policies import Fifo, Policy
from optuna_hermes.policies._asha import is_rung

ETA = 3
"""Reduction factor: one in so many trials of a rung goes on."""

_LEAST_ENDED = 5
"""Number of trials trained to their ends before the median stops any, as in Optuna."""


class StopPolicy(Policy):
    """Trains trials to their ends in the order of arrival, less those that a rule stops.

    Every waiting trial is judged by its last report and by all reports up to then; in a
    simulation that is at the end of its unit.
    """

    _fifo = Fifo()

    def decide(self, snapshot: Snapshot) -> Decision:
        waiting = [
            trial
            for trial in snapshot.trials
            if trial.state in ("parked", "stored") and trial.curve.units
        ]
        stopped = self.stopped(waiting, snapshot)
        if not stopped:
            return self._fifo.decide(snapshot)
        rest = tuple(trial for trial in snapshot.trials if trial.number not in stopped)
        decision = self._fifo.decide(replace(snapshot, trials=rest))
        return replace(decision, pruned=tuple(sorted(stopped)))

    @abstractmethod
    def stopped(self, waiting: Sequence[TrialView], snapshot: Snapshot) -> set[int]:
        """The numbers of waiting trials, each with one report at least, that the rule stops."""


class AshaStop(StopPolicy):
    """Stops a trial at a rung if it is not among the best there so far.

    There is a rung after 1, ``ETA``, ``ETA ** 2``, ... units. A trial that comes to one goes on if
    its value is among the ``max(1, n // ETA)`` lowest of the ``n`` trials that have come so far,
    itself among them; equal values go on together, and NaN never does. A stopped trial never comes
    back; the promoting variant (``asha``) avoids that.

    Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020, in the stopping
    variant that Ray Tune's ``AsyncHyperBandScheduler`` and Optuna's ``SuccessiveHalvingPruner``
    run; as there, values at the rung are compared.
    """

    def stopped(self, waiting: Sequence[TrialView], snapshot: Snapshot) -> set[int]:
        return below_best(at_rungs(waiting), (*snapshot.trials, *snapshot.finished))


def at_rungs(trials: Iterable[TrialView], first: int = 1) -> list[TrialView]:
    """The trials that have had ``first``, ``first * ETA``, ``first * ETA ** 2``, ... units."""
    return [trial for trial in trials if is_rung(trial.curve.units, ETA, first)]


def below_best(trials: Iterable[TrialView], peers: Sequence[TrialView]) -> set[int]:
    """The numbers of ``trials`` that are not among the best of ``peers`` at their rung."""
    by_rung: defaultdict[int, list[TrialView]] = defaultdict(list)
    for trial in trials:
        by_rung[trial.curve.units].append(trial)
    worse: set[int] = set()
    for units, here in by_rung.items():
        came = (peer.curve.values[units - 1] for peer in peers if peer.curve.units >= units)
        values = sorted(value for value in came if not math.isnan(value))
        places = max(1, len(values) // ETA)
        for trial in here:
            value = trial.curve.values[-1]
            # The first place of equal values, so that these go on together.
            if math.isnan(value) or bisect_left(values, value) >= places:
                worse.add(trial.number)
    return worse


class HyperbandStop(StopPolicy):
    """Distributes the trials over brackets, each of which is an ``asha-stop`` of its own.

    The first rung of bracket ``b`` is after ``ETA ** b`` units. With ``s + 1`` brackets, where
    ``ETA ** s`` units are the most that fit into the longest trial known, bracket ``b`` gets trials
    in proportion to ``ceil((s + 1) * ETA ** (s - b) / (s - b + 1))``.

    Li et al., "Hyperband: A Novel Bandit-Based Approach to Hyperparameter Optimization", JMLR 18,
    2018, as Optuna's ``HyperbandPruner`` runs it in a study whose name is empty: all brackets at
    once, with a trial's bracket chosen by a checksum of its number.
    """

    def stopped(self, waiting: Sequence[TrialView], snapshot: Snapshot) -> set[int]:
        judged = at_rungs(waiting)
        if not judged:
            return set()
        everyone = (*snapshot.trials, *snapshot.finished)
        # While no length is known there is no bracket, and no trial is stopped.
        shares = bracket_shares(max(map(_length, everyone)))
        stopped: set[int] = set()
        for bracket in range(len(shares)):
            here = [trial for trial in judged if bracket_of(trial.number, shares) == bracket]
            trials = at_rungs(here, ETA**bracket)
            if trials:
                peers = [peer for peer in everyone if bracket_of(peer.number, shares) == bracket]
                stopped |= below_best(trials, peers)
        return stopped


def _length(trial: TrialView) -> int:
    """Total number of a trial's units, 0 where it is not known."""
    if trial.units_left is not None:
        return trial.curve.units + trial.units_left
    return trial.curve.units if trial.state == "done" else 0


@cache
def bracket_shares(length: int) -> tuple[int, ...]:
    n_brackets = 0
    while ETA**n_brackets <= length:
        n_brackets += 1
    return tuple(
        -(-n_brackets * ETA ** (n_brackets - 1 - bracket) // (n_brackets - bracket))
        for bracket in range(n_brackets)
    )


@cache
def bracket_of(number: int, shares: tuple[int, ...]) -> int:
    # The hash of HyperbandPruner for a study without a name: trials get the same brackets.
    lot = crc32(f"_{number}".encode()) % sum(shares)
    bracket = 0
    while lot >= shares[bracket]:
        lot -= shares[bracket]
        bracket += 1
    return bracket


class MedianStop(StopPolicy):
    """Stops a trial whose best value so far is worse than the median of the others at its age.

    The others are the trials that were trained to their ends, with their values at the unit where
    the trial is now. NaN counts in no comparison; a trial that reported nothing else is stopped.

    Golovin et al., "Google Vizier: A Service for Black-Box Optimization", KDD 2017, as Optuna's
    ``MedianPruner`` runs it; Vizier's own rule takes the others' mean up to that unit instead of
    their value at it.
    """

    def stopped(self, waiting: Sequence[TrialView], snapshot: Snapshot) -> set[int]:
        ended = [other.curve for other in snapshot.finished if other.state == "done"]
        if len(ended) < _LEAST_ENDED:
            return set()
        medians = {
            age: median(
                _known(curve.values[age - 1] for curve in ended if curve.units >= age) or [math.nan]
            )
            for age in {trial.curve.units for trial in waiting}
        }
        # Nothing is above a median of NaN, but a trial that reported only NaN is stopped even then.
        return {
            trial.number
            for trial in waiting
            if not (known := _known(trial.curve.values)) or min(known) > medians[trial.curve.units]
        }


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]
