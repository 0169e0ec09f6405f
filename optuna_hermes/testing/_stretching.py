"""A policy for tests that changes the numbers of devices at random."""

from __future__ import annotations

from random import Random

from optuna_hermes.model import Assignment, Decision, RunView, Snapshot
from optuna_hermes.policies import Policy
from optuna_hermes.policies._base import free_devices, opened, unopened


class Stretching(Policy):
    """Assigns the free devices at random, with the same draws for the same snapshot.

    Slices end with whole seconds, so that several devices are free at once.
    """

    def decide(self, snapshot: Snapshot) -> Decision:
        """Assign to waiting trials random numbers of devices within their limits."""
        units = sum(run.curve.units for run in snapshot.runs)
        random = Random(f"{snapshot.seed} {snapshot.now} {units}")
        free = [device.id for device in free_devices(snapshot)]
        waiting: list[RunView | None] = [*opened(snapshot), *unopened(snapshot)]
        random.shuffle(waiting)
        given: list[Assignment] = []
        for run in waiting:
            least, most = (1, 1) if run is None else run.device_range
            its = [id_ for id_ in free if run is None or not run.bound_to or id_ in run.bound_to]
            if len(its) < least:
                continue
            most = min(most, len(its))
            devices = its[: random.choice([most, most, random.randint(least, most)])]
            free = [id_ for id_ in free if id_ not in devices]
            given.append(
                Assignment(
                    run=None if run is None else run.number,
                    devices=tuple(devices),
                    slice_seconds=1.0 + -snapshot.now % 1.0,
                )
            )
        return Decision(assignments=tuple(given))
