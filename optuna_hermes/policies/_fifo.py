"""First in, first out: the order of plain Optuna."""

from __future__ import annotations

from optuna_hermes.model import RunView
from optuna_hermes.policies._ranked import Ranked


class Fifo(Ranked):
    """Runs every trial to its end, in the order of arrival.

    A run that was opened keeps its device at the end of its slices; the next trial is opened when
    a device has nobody left.

    Args:
        backfill: whether those behind a run that finds too few devices may have them. So no
            device of a study stays empty. Without, the queue stops at that run, as it does in most
            published comparisons of schedulers: nobody is overtaken.
    """

    def rank(self, run: RunView) -> tuple[bool, float, int]:
        """Those that have begun, then by arrival."""
        return run.state == "pending", run.submitted, run.number
