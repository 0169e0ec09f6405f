"""One contest of ``race.py``: its record, from what its processes wrote, and its figures; pure."""

from __future__ import annotations

import bisect
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Value(NamedTuple):
    """A unit's value, and when it was known: seconds from the start of the command."""

    trial: str
    unit: int
    value: float
    at: float


class Unit(NamedTuple):
    """Batches of a unit: when the first began and the last ended, and the time inside of them."""

    trial: str
    unit: int
    begun: float
    ended: float
    inside: float


class Lease(NamedTuple):
    """A trial's right to a device, as the ledger has it."""

    trial: str
    started: float
    ended: float | None


@dataclass(frozen=True, kw_only=True)
class Record:
    """Record of a contestant's budget. All times are seconds from the start of its command."""

    setting: Mapping[str, Any]  # the contest's
    cpu_seconds: float  # of all its processes
    trials: Mapping[str, Mapping[str, Any]]  # the parameters of each
    # Of all units, in their order in time; of a unit trained twice the first.
    values: Sequence[Value]
    units: Sequence[Unit]  # that were begun
    repeated: int = 0  # values of units that had one before
    # From a lease to its first batch; None if there are no leases.
    opening_waits: Sequence[float] | None = None
    # From the last value in a lease to the lease's end.
    decision_waits: Sequence[float] | None = None

    @property
    def seconds(self) -> float:
        return float(self.setting["seconds"])

    @property
    def first_batch(self) -> float | None:
        return min((unit.begun for unit in self.units), default=None)

    @staticmethod
    def of_json(record: Mapping[str, Any]) -> Record:
        values = [Value(*each) for each in record["values"]]
        units = [Unit(*each) for each in record["units"]]
        return Record(**{**record, "values": values, "units": units})


def make_record(
    setting: Mapping[str, Any],
    lines: Iterable[Sequence[Any]],
    *,
    begun: float,
    cpu_seconds: float,
    leases: Sequence[Lease] | None,
) -> Record:
    """Leave out what came after the budget, and put the batches of each unit together.

    Args:
        setting: of the contest.
        lines: of all its processes, as ``_race_watch`` writes them.
        begun: when its command was started, by the clock of the lines and leases.
        cpu_seconds: see ``Record``.
        leases: of its trials; None if it has none.
    """
    budget = float(setting["seconds"])
    trials: dict[str, Mapping[str, Any]] = {}
    values: list[Value] = []
    batches: list[Unit] = []
    for kind, trial, *rest in lines:
        if kind == "trial" and rest[1] - begun <= budget:
            trials[trial] = rest[0]
        elif kind == "value" and rest[2] - begun <= budget:
            values.append(Value(trial, rest[0], rest[1], round(rest[2] - begun, 4)))
        elif kind == "batch" and rest[1] - begun < budget:
            start, end = rest[1] - begun, min(rest[2] - begun, budget)
            batches.append(Unit(trial, rest[0], round(start, 4), round(end, 4), end - start))
    values.sort(key=lambda value: value.at)
    batches.sort(key=lambda batch: batch.begun)
    first: dict[tuple[str, int], Value] = {}
    for value in values:
        first.setdefault((value.trial, value.unit), value)
    waits = None if leases is None else _waits(_from(leases, begun), batches, values, budget)
    return Record(
        setting=setting,
        cpu_seconds=round(cpu_seconds, 3),
        trials=trials,
        values=list(first.values()),
        units=_together(batches),
        repeated=len(values) - len(first),
        opening_waits=waits and waits[0],
        decision_waits=waits and waits[1],
    )


def _from(leases: Sequence[Lease], begun: float) -> list[Lease]:
    return [
        Lease(each.trial, each.started - begun, None if each.ended is None else each.ended - begun)
        for each in leases
    ]


def _together(batches: Iterable[Unit]) -> list[Unit]:
    units: dict[tuple[str, int], Unit] = {}
    for each in batches:
        before = units.get((each.trial, each.unit), each._replace(inside=0.0))
        ended, inside = max(before.ended, each.ended), before.inside + each.inside
        units[each.trial, each.unit] = before._replace(ended=ended, inside=inside)
    return [unit._replace(inside=round(unit.inside, 4)) for unit in units.values()]


def _waits(
    leases: Sequence[Lease], batches: Sequence[Unit], values: Sequence[Value], budget: float
) -> tuple[list[float], list[float]]:
    begins: dict[str, list[float]] = {}
    for batch in batches:
        begins.setdefault(batch.trial, []).append(batch.begun)
    known: dict[str, list[float]] = {}
    for value in values:
        known.setdefault(value.trial, []).append(value.at)
    opening, decision = [], []
    for trial, started, ended in leases:
        mine, end = begins.get(trial, []), math.inf if ended is None else ended
        at = bisect.bisect_left(mine, started)
        if at < len(mine) and mine[at] <= end:
            opening.append(round(mine[at] - started, 4))
        at = bisect.bisect_right(known.get(trial, []), end) - 1
        if end <= budget and at >= 0 and known[trial][at] >= started:
            decision.append(round(end - known[trial][at], 4))
    return opening, decision


def figures(record: Record, n_units: int) -> dict[str, Any]:
    """The figures of one contest; None where there is nothing to take one of."""
    first, last = record.first_batch, max((unit.ended for unit in record.units), default=None)
    inside = sum(unit.inside for unit in record.units)
    busy = None
    if first is not None and last is not None and last > first:
        busy = inside / (record.setting["devices"] * (last - first))
    trained = len(record.values)
    return {
        "units": trained,
        "repeated": record.repeated,
        "busy_share": busy,
        "cpu_seconds": record.cpu_seconds,
        "cpu_per_unit": record.cpu_seconds / trained if trained else None,
        "begun": len({unit.trial for unit in record.units}),
        "finished": len({value.trial for value in record.values if value.unit == n_units}),
        "first_batch": first,
        "best": _least(value.value for value in record.values),
        "best_finished": _least(v.value for v in record.values if v.unit == n_units),
        "opening_wait": _median(record.opening_waits),
        "decision_wait": _median(record.decision_waits),
    }


def differing(records: Iterable[Record]) -> dict[str, int]:
    """Count the units that several contestants trained, and those of them with unequal values."""
    seen: dict[tuple[str, str, int], list[float]] = {}
    for record in records:
        task = record.setting["task"]
        for value in record.values:
            params = json.dumps(dict(record.trials[value.trial]), sort_keys=True)
            seen.setdefault((task, params, value.unit), []).append(value.value)
    several = [values for values in seen.values() if len(values) > 1]
    # Not a number is equal to itself here.
    unequal = sum(len({repr(value) for value in values}) > 1 for values in several)
    return {"compared": len(several), "differing": unequal}


def _least(values: Iterable[float]) -> float | None:
    return min((value for value in values if math.isfinite(value)), default=None)


def _median(waits: Sequence[float] | None) -> float | None:
    return statistics.median(waits) if waits else None
