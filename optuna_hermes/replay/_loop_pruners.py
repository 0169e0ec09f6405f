"""Plain Optuna as a rival: its pruners decide who is stopped, real ones on a real study."""

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
    """First in, first out, but trials that a pruner has condemned are pruned.

    Args:
        condemned: numbers of trials; the owner adds to it as they report.
    """

    def __init__(self, condemned: set[int]) -> None:
        self._condemned = condemned
        self._fifo = Fifo()

    def decide(self, snapshot: Snapshot) -> Decision:
        """Prune, then carry on as FIFO with the others."""
        pruned = [
            run.number
            for run in snapshot.runs
            if run.state == "parked" and run.number in self._condemned
        ]
        runs = tuple(run for run in snapshot.runs if run.number not in pruned)
        decision = self._fifo.decide(replace(snapshot, runs=runs))
        return replace(decision, pruned=tuple(sorted(pruned)))
