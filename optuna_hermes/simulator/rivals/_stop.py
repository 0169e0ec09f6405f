"""The base class of stopping rules."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from optuna_hermes.model import Decision, Snapshot, TrialView
from optuna_hermes.policies import Fifo, Policy


class StopPolicy(Policy):
    """Trains trials to their ends in the order of arrival, less those that a rule stops.

    Every waiting trial is judged by its last report and by all reports up to then; in a
    simulation that is at the end of its unit.
    """

    _fifo = Fifo()

    def decide(self, snapshot: Snapshot) -> Decision:
        """Prune the trials that the rule stops, then assign devices first in, first out."""
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
