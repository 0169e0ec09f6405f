"""Clairvoyant rival that serves the shortest job first: a bound, not a policy."""

from __future__ import annotations

from optuna_hermes.model import RunView
from optuna_hermes.policies import Ranked


class ShortestRemaining(Ranked):
    """Serves the job that has least time left.

    Where jobs are not interrupted it is shortest job first. It needs a simulation whose
    ``estimator`` is ``Clairvoyant``.

    A textbook rule; as an oracle in Hu et al., "Helios", SC 2021.

    Args:
        backfill: whether those behind a job that finds too few devices may have them.
    """

    def rank(self, run: RunView) -> tuple[float, float, int]:
        """Rank by the time left on the devices it wants, then by arrival.

        Raises:
            ValueError: the job has no ``expected_seconds``.
        """
        if run.expected_seconds is None:
            raise ValueError(f"Run {run.number} must have expected_seconds but has none.")
        left = (run.expected_seconds - run.attained_seconds) / run.devices_wanted
        return left, run.submitted, run.number
