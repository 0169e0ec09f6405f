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

    This project's own, as a bound. Its list has to be sorted beforehand: see ``arrange``. With a
    sampler, whose proposals are not known yet, a new trial is opened when no trial waits.

    Args:
        recordings: every trial's training, by number; those that diverged rank last, and so do
            trials beyond its end.
    """

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self._recordings = recordings

    def decide(self, snapshot: Snapshot) -> Decision:
        return Decision(assignments=place(snapshot, [*self._best(snapshot), *unopened(snapshot)]))

    def _best(self, snapshot: Snapshot) -> list[TrialView]:
        # Stable: between equal final values the earlier trial goes first.
        return sorted(opened(snapshot), key=self._final)

    def _final(self, trial: TrialView) -> float:
        if trial.number >= len(self._recordings):
            return math.inf
        final = self._recordings[trial.number].final
        return final if math.isfinite(final) else math.inf


class OracleBreadth(Oracle):
    """Gives every trial of a list one unit, then trains the one with the lowest final value.

    This project's own, as a bound for policies that need a report before they rank a trial.
    """

    def decide(self, snapshot: Snapshot) -> Decision:
        # Proposals of a sampler have no end: they cannot all be opened first.
        if not snapshot.unstarted.fixed:
            return super().decide(snapshot)
        order = [*unopened(snapshot), *self._best(snapshot)]
        return Decision(assignments=place(snapshot, order))
