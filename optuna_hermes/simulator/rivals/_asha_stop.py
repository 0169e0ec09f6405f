"""Asynchronous successive halving that stops trials."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence

from optuna_hermes.model import Snapshot, TrialView
from optuna_hermes.policies._asha import checked_eta, is_rung
from optuna_hermes.simulator.rivals._stop import StopPolicy


class AshaStop(StopPolicy):
    """Stops a trial at a rung if it is not among the best there so far.

    There is a rung after 1, ``eta``, ``eta ** 2``, ... units. A trial that comes to one goes on if
    its value is among the ``max(1, n // eta)`` lowest of the ``n`` trials that have come so far,
    itself among them; equal values go on together, and NaN never does. A stopped trial never comes
    back, also if the later ones are worse; the promoting variant (``asha``) avoids that.

    Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020, in the stopping
    variant that Ray Tune's ``AsyncHyperBandScheduler`` and Optuna's ``SuccessiveHalvingPruner``
    trial; as there, values at the rung are compared.

    Args:
        eta: reduction factor; one in ``eta`` trials of a rung goes on.

    Raises:
        InvalidInputError: ``eta`` is below 2.
    """

    def __init__(self, eta: int = 3) -> None:
        self.eta = checked_eta(eta)

    def stopped(self, waiting: Sequence[TrialView], snapshot: Snapshot) -> set[int]:
        """The trials that are at a rung and not among the best there."""
        return fallen(at_rungs(waiting, self.eta), (*snapshot.trials, *snapshot.finished), self.eta)


def at_rungs(trials: Iterable[TrialView], eta: int, first: int = 1) -> list[TrialView]:
    """The trials that have had ``first``, ``first * eta``, ``first * eta ** 2``, ... units."""
    return [trial for trial in trials if is_rung(trial.curve.units, eta, first)]


def fallen(trials: Iterable[TrialView], peers: Sequence[TrialView], eta: int) -> set[int]:
    """The numbers of trials that are not among the best of all that have reached their rung.

    Args:
        trials: the trials to judge, with a report at least.
        peers: all trials to compare with, in any state, ``trials`` among them.
        eta: reduction factor; one in ``eta`` trials of a rung goes on.
    """
    by_rung: defaultdict[int, list[TrialView]] = defaultdict(list)
    for trial in trials:
        by_rung[trial.curve.units].append(trial)
    worse: set[int] = set()
    for units, here in by_rung.items():
        came = (peer.curve.values[units - 1] for peer in peers if peer.curve.units >= units)
        values = sorted(value for value in came if not math.isnan(value))
        places = max(1, len(values) // eta)
        for trial in here:
            value = trial.curve.values[-1]
            if math.isnan(value) or bisect_left(values, value) >= places:
                worse.add(trial.number)
    return worse
