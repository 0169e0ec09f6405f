"""Plain Optuna as a rival: Optuna's own pruners, on a real study, stop trials."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, SuccessiveHalvingPruner

from optuna_hermes.model import Decision, Snapshot
from optuna_hermes.policies import Fifo, Policy

REDUCTION_FACTOR = 3

PRUNERS: Mapping[str, Callable[[int], BasePruner]] = {
    "median-stop": lambda units: MedianPruner(),
    "asha-stop": lambda units: SuccessiveHalvingPruner(
        min_resource=1, reduction_factor=REDUCTION_FACTOR
    ),
    "hyperband-stop": lambda units: HyperbandPruner(
        min_resource=1, max_resource=units, reduction_factor=REDUCTION_FACTOR
    ),
}
"""Makers of the pruners by the names of their policies, from the units of a full training."""


class Stopping(Policy):
    """First in, first out, with the trials pruned that Optuna's pruner has condemned.

    Args:
        condemned: numbers of trials to prune; the caller adds to it as they report.
    """

    def __init__(self, condemned: set[int]) -> None:
        self._condemned = condemned
        self._fifo = Fifo()

    def decide(self, snapshot: Snapshot) -> Decision:
        """Prune the condemned trials, then assign devices first in, first out."""
        pruned = [
            trial.number
            for trial in snapshot.trials
            if trial.state == "parked" and trial.number in self._condemned
        ]
        trials = tuple(trial for trial in snapshot.trials if trial.number not in pruned)
        decision = self._fifo.decide(replace(snapshot, trials=trials))
        return replace(decision, pruned=tuple(sorted(pruned)))
