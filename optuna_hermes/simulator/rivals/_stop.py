"""What all stopping rules share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from optuna_hermes.model import Decision, RunView, Snapshot
from optuna_hermes.policies import Fifo, Policy


class StopPolicy(Policy):
    """Runs trials to their ends in the order of arrival, less those that a rule stops.

    Every run that waits is judged on its last report and on what is known by then; in a
    simulation that is when its unit has ended.
    """

    _fifo = Fifo()

    def decide(self, snapshot: Snapshot) -> Decision:
        """Prune whom the rule stops, and give the devices to the rest, first in, first out."""
        waiting = [
            run for run in snapshot.runs if run.state in ("parked", "stored") and run.curve.units
        ]
        stopped = self.stopped(waiting, snapshot)
        if not stopped:
            return self._fifo.decide(snapshot)
        rest = tuple(run for run in snapshot.runs if run.number not in stopped)
        decision = self._fifo.decide(replace(snapshot, runs=rest))
        return replace(decision, pruned=tuple(sorted(stopped)))

    @abstractmethod
    def stopped(self, waiting: Sequence[RunView], snapshot: Snapshot) -> set[int]:
        """Whom of the runs that wait, each with one report at least, the rule stops."""
