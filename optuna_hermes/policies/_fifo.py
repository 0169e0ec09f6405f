"""First in, first out: the order of plain Optuna."""

from __future__ import annotations

from optuna_hermes.model import Decision, Snapshot
from optuna_hermes.policies._base import Policy, opened, place, unopened


class Fifo(Policy):
    """Runs every trial to its end, in the order of arrival.

    A run that was opened keeps its device at the end of its slices; the next trial is opened when
    a device has nobody left.
    """

    def decide(self, snapshot: Snapshot) -> Decision:
        """Carry on with what runs, then open the trial that was admitted first."""
        started = sorted(opened(snapshot), key=lambda run: (run.submitted, run.number))
        waiting = unopened(snapshot)
        pending = sorted(
            (run for run in waiting if run is not None),
            key=lambda run: (run.submitted, run.number),
        )
        new = [run for run in waiting if run is None]
        return Decision(assignments=place(snapshot, [*started, *pending, *new]))
