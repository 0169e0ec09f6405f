"""The median stopping rule."""

from __future__ import annotations

import math
from collections.abc import Sequence

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import Curve, Snapshot, TrialView
from optuna_hermes.simulator.rivals._stop import StopPolicy


class MedianStop(StopPolicy):
    """Stops a trial whose best value so far is worse than the median of the others at its age.

    The others are the trials that were trained to their ends, with their values at the unit where
    the trial is now; there is no median of fewer than ``n_startup_trials`` of them, and of NaN
    only. NaN counts in no comparison, and a trial that reported nothing else is stopped.

    Golovin et al., "Google Vizier: A Service for Black-Box Optimization", KDD 2017, as Optuna's
    ``MedianPruner`` runs it; Vizier's own rule takes the others' mean up to that unit instead of
    their value at it.

    Args:
        n_startup_trials: number of trials trained to their ends before any is stopped.
        n_warmup_steps: number of a trial's units before which it is never stopped.

    Raises:
        InvalidInputError: an argument is negative.
    """

    def __init__(self, n_startup_trials: int = 5, n_warmup_steps: int = 0) -> None:
        given = {"n_startup_trials": n_startup_trials, "n_warmup_steps": n_warmup_steps}
        for name, number in given.items():
            if number < 0:
                raise InvalidInputError(f"{name} cannot be negative but got {number}.")
        self.n_startup_trials = n_startup_trials
        self.n_warmup_steps = n_warmup_steps

    def stopped(self, waiting: Sequence[TrialView], snapshot: Snapshot) -> set[int]:
        """The trials that are worse than the median of those trained to their ends."""
        ended = [other.curve for other in snapshot.finished if other.state == "done"]
        if len(ended) < max(1, self.n_startup_trials):
            return set()
        judged = [trial for trial in waiting if trial.curve.units >= self.n_warmup_steps]
        medians = {
            age: _median([curve.values[age - 1] for curve in ended if curve.units >= age])
            for age in {trial.curve.units for trial in judged}
        }
        return {
            trial.number for trial in judged if _is_above(trial.curve, medians[trial.curve.units])
        }


def _is_above(curve: Curve, median: float) -> bool:
    """True if all values are above the median, or all are NaN; False if the median is NaN."""
    known = [value for value in curve.values if not math.isnan(value)]
    return not known or min(known) > median


def _median(values: Sequence[float]) -> float:
    """The median of the values that are not NaN; NaN if all are."""
    known = sorted(value for value in values if not math.isnan(value))
    if not known:
        return math.nan
    half = len(known) // 2
    return known[half] if len(known) % 2 else (known[half - 1] + known[half]) / 2
