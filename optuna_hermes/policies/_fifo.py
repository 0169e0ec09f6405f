"""First in, first out: the order of plain Optuna."""

from __future__ import annotations

from optuna_hermes.model import TrialView
from optuna_hermes.policies.base import Ranked


class Fifo(Ranked):
    """Trains every trial to its end, in the order of arrival.

    An opened trial keeps its device at the end of its slices; the next trial is opened when a
    device becomes idle.

    Args:
        backfill: whether those behind a trial that finds too few devices may have them, so that
            no device stays idle. Without, the queue stops at that trial, as it does in most
            published comparisons of schedulers, and none is overtaken.
    """

    def rank(self, trial: TrialView) -> tuple[bool, float, int]:
        """Rank trials that have begun first, then by arrival."""
        return trial.state == "pending", trial.submitted, trial.number
