"""Equal shares for all: a circular queue."""

from __future__ import annotations

from optuna_hermes.model import Decision, Snapshot, TrialView
from optuna_hermes.policies.base import Policy, opened, place, unopened


class RoundRobin(Policy):
    """Gives the next slice to the trial that has waited longest.

    Trials that are not opened yet count as having waited longest, so every trial gets a slice
    before any gets a second one.
    """

    def decide(self, snapshot: Snapshot) -> Decision:
        new = unopened(snapshot)
        queue = sorted(opened(snapshot), key=_waits_since)
        if snapshot.unstarted.count is not None:
            return Decision(assignments=place(snapshot, [*new, *queue]))
        # Without a bound on their number such a round would never end: open one if none waits.
        pending = [trial for trial in new if trial is not None]
        return Decision(assignments=place(snapshot, [*pending, *queue, *new[len(pending) :]]))


def _waits_since(trial: TrialView) -> tuple[float, float, int]:
    since = trial.submitted if trial.waiting_since is None else trial.waiting_since
    # Slices of several devices may end at once: by number alone, low ones would never wait.
    return since, trial.attained_seconds, trial.number
