"""Policies that rank each trial by its own state alone."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from optuna_hermes.model import Decision, RunView, Snapshot
from optuna_hermes.policies._base import Policy, opened, place, unopened


class Ranked(Policy):
    """Serves the waiting trials in the order of their ranks, then opens new trials.

    The rank of a trial depends on nothing but the trial, so a queue of a hundred thousand jobs can
    be kept in order, and a simulator has to show only the first ones of each size: with as many of
    them as there are free devices the decision is the same.

    Args:
        backfill: whether those behind a trial that finds too few devices may have them.
    """

    def __init__(self, *, backfill: bool = True) -> None:
        self.backfill = backfill

    @abstractmethod
    def rank(self, run: RunView) -> tuple[Any, ...] | None:
        """Sort key of a waiting trial, the smallest first; it ends with the trial's number.

        Returns:
            None where the key depends on the rest of the snapshot.
        """

    def decide(self, snapshot: Snapshot) -> Decision:
        """Assign devices to the waiting trials, best first."""
        waiting = unopened(snapshot)
        new = [run for run in waiting if run is None]
        runs = [*opened(snapshot), *(run for run in waiting if run is not None)]
        runs.sort(key=lambda run: self.rank(run) or ())
        return Decision(assignments=place(snapshot, [*runs, *new], backfill=self.backfill))
