"""Clairvoyant rivals that know the end of every training: bounds, not policies."""

from __future__ import annotations

import math
from collections.abc import Sequence

from optuna_hermes.model import Decision, Snapshot, TrialView
from optuna_hermes.policies import Policy
from optuna_hermes.policies.base import opened, place, unopened
from optuna_hermes.simulator._workload import Recording


class Oracle(Policy):
    """Trains the trial with the lowest final value to its end, then the next.

    Between equal final values the earlier trial goes first. New trials come in the order of their
    list, so the list has to be sorted beforehand: see ``arrange``. With a sampler, whose proposals
    are not known yet, a new trial is opened when no trial waits.

    This project's own, as a bound.

    Args:
        recordings: every trial's training, by number; final values of NaN rank last, and so do
            trials beyond its end.
    """

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self._recordings = recordings

    def decide(self, snapshot: Snapshot) -> Decision:
        """Go on with the best opened trial, then open the next."""
        return Decision(assignments=place(snapshot, [*self._best(snapshot), *unopened(snapshot)]))

    def _best(self, snapshot: Snapshot) -> list[TrialView]:
        return sorted(opened(snapshot), key=self._final)

    def _final(self, trial: TrialView) -> float:
        if trial.number >= len(self._recordings):
            return math.inf
        final = self._recordings[trial.number].final
        return math.inf if math.isnan(final) else final


class OracleBreadth(Oracle):
    """Gives every trial of a list one unit, then trains the one with the lowest final value.

    The bound for policies that need a report of a trial before they rank it. With a sampler, whose
    proposals have no end, a new trial is opened when no trial waits.

    This project's own, as a bound.

    Args:
        recordings: every trial's training, by number.
    """

    def decide(self, snapshot: Snapshot) -> Decision:
        """Open the list, then go on with the best."""
        if not snapshot.unstarted.fixed:
            return super().decide(snapshot)
        order = [*unopened(snapshot), *self._best(snapshot)]
        return Decision(assignments=place(snapshot, order))
