"""Least attained service: the trial with the least device time goes first."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from statistics import median

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import Decision, Snapshot, TrialView
from optuna_hermes.policies.base import Policy, opened, place, unopened

# Waiting time until a trial climbs, in multiples of its attained service.
PATIENCE = 8.0


class LeastAttainedService(Policy):
    """Serves the trials in queues by attained device time, least first.

    Gu et al., "Tiresias", NSDI 2019, where it is discretised least attained service: queues
    bounded by thresholds of attained device time, each of them first in, first out, so that trials
    do not alternate all the time; one that has waited long climbs back to the first queue. No
    reported value is used.

    This project's own: the thresholds are multiples of a unit, the median over the trials of
    their mean time a report. A trial climbs once it has waited eight times the device time
    it has had, for one slice. A fixed list is opened first; a trial of a sampler that learns, when
    no trial waits in the first queue.

    Args:
        thresholds: units of attained service at which the next queue begins, ascending.
    """

    def __init__(self, thresholds: Sequence[float] = (2, 8, 32)) -> None:
        bounds = (0.0, *thresholds)
        if not all(low < high < math.inf for low, high in zip(bounds, thresholds, strict=False)):
            raise InvalidInputError(
                f"thresholds must be positive, finite and ascending but got {tuple(thresholds)}."
            )
        self.thresholds = tuple(thresholds)

    def decide(self, snapshot: Snapshot) -> Decision:
        new = unopened(snapshot)
        waiting = opened(snapshot)
        unit_seconds = _unit_seconds(snapshot)
        places = {trial.number: self._place(trial, snapshot.now, unit_seconds) for trial in waiting}
        queue = sorted(waiting, key=lambda trial: places[trial.number])
        first = [trial for trial in queue if places[trial.number][0] == 0]
        order = [*first, *new] if not snapshot.unstarted.fixed else [*new, *first]
        return Decision(assignments=place(snapshot, [*order, *queue[len(first) :]]))

    def _place(self, trial: TrialView, now: float, unit_seconds: float) -> tuple[int, float, int]:
        # In units, since the paper's seconds are those of one cluster.
        queue = bisect_right(self.thresholds, trial.attained_seconds / unit_seconds)
        since = trial.submitted if trial.waiting_since is None else trial.waiting_since
        climbs = since + PATIENCE * trial.attained_seconds
        if queue > 0 and climbs <= now:
            # Its time in the first queue begins when it climbs, or it would overtake newer trials.
            return 0, climbs, trial.number
        return queue, trial.submitted, trial.number


def _unit_seconds(snapshot: Snapshot) -> float:
    """The device seconds of a typical unit; 1 while no unit is reported."""
    lengths = [
        trial.curve.device_seconds[-1] / len(trial.curve.device_seconds)
        for trials in (snapshot.trials, snapshot.finished)
        for trial in trials
        if trial.curve.device_seconds
    ]
    return median(lengths) or 1.0 if lengths else 1.0
