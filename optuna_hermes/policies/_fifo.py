"""First in, first out: the order of plain Optuna."""

from __future__ import annotations

from optuna_hermes.model import TrialView
from optuna_hermes.policies.base import Ranked


class Fifo(Ranked):
    """Trains every trial to its end, in the order of arrival.

    Args:
        backfill: whether those behind a trial that finds too few devices may have them. Without,
            the queue stops there, as in most published comparisons of schedulers.
    """

    def rank(self, trial: TrialView) -> tuple[bool, float, int]:
        # One that has begun goes first, so that it keeps its device at the end of its slices.
        return trial.state == "pending", trial.submitted, trial.number
