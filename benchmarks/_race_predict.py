"""The units of a contest of ``race.py`` as the simulator has them, by its measured costs; pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from _race_measure import Record, Unit

from optuna_hermes.policies import make_policy
from optuna_hermes.simulator import FixedList, Overheads, Recording, SwitchCosts, TrialSimulator

POLICIES = {
    "hermes": "hermes",
    "hermes-tpe": "hermes",
    "hermes-asha": "asha",
    "hermes-fifo": "fifo",
}


def simulated_units(record: Record, n_units: int) -> int | None:
    """The number of units that the simulator trains in the budget; None without leases.

    Its trials are those of the contest, at their last values where they were not trained on; it has
    the contest's time to the first batch, its median time of a unit, and its mean times from a
    lease to its first batch, from a value to the end of its lease, and between units of a lease.

    Args:
        record: of the contest.
        n_units: of a whole trial.
    """
    policy = POLICIES.get(str(record.setting["contestant"]))
    if policy is None or record.first_batch is None or not record.opening_waits:
        return None
    values: dict[str, list[float]] = {}
    for each in record.values:
        values.setdefault(each.trial, []).append(each.value)
    # Some are suspended between two batches, and last as long as that.
    seconds = statistics.median(unit.ended - unit.begun for unit in record.units)
    between = statistics.fmean(_gaps(record, seconds) or [0.0])
    changing = statistics.fmean(record.opening_waits)
    changing += statistics.fmean(record.decision_waits or [0.0]) - between
    trials = [_padded(known, n_units, seconds) for known in values.values()]
    simulator = TrialSimulator(
        make_policy(policy),
        FixedList(trials),
        n_devices=int(record.setting["devices"]),
        # A lease of a trial that goes on waits for its first batch as one of a new trial does.
        costs=SwitchCosts(seconds=max(0.0, changing)),
        overheads=Overheads(
            startup_seconds=record.first_batch,
            opening_seconds=max(0.0, changing),
            decision_seconds=between,
        ),
        timeout=record.seconds,
    )
    return len(simulator.run().slices)


def _gaps(record: Record, seconds: float) -> list[float]:
    """Times between a unit of a trial and the next one, where no other trial came between."""
    by_trial: dict[str, list[Unit]] = {}
    for unit in record.units:
        by_trial.setdefault(unit.trial, []).append(unit)
    pairs = (pair for units in by_trial.values() for pair in itertools.pairwise(units))
    gaps = (later.begun - sooner.ended for sooner, later in pairs)
    return [gap for gap in gaps if 0.0 <= gap < seconds]


def _padded(values: Sequence[float], n_units: int, seconds: float) -> Recording:
    """A training to the end."""
    whole = tuple(values) + (values[-1],) * (n_units - len(values))
    return Recording(values=whole, seconds=(seconds,) * n_units)
