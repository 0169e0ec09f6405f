"""Check of the promises, from the trials' own records, the study and the ledger."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from _chaos_faults import ENDS_PROCESSES
from _chaos_records import Reported, Rewind
from _chaos_scene import Fault
from _chaos_stage import N_TRIALS, Stage, values_of

from optuna_hermes.ledger import LeaseRecord

ENDING_SECONDS = 1.0
"""A process whose parent is killed is killed in turn, and may train a batch until then."""


def verdict(
    stage: Stage, calm: Stage, damaged: Sequence[tuple[int, float]], faults: Sequence[Fault]
) -> dict[str, Any]:
    """Check every promise, and return the findings.

    Args:
        stage: the study that was disturbed.
        calm: the same one, undisturbed.
        damaged: trials whose newest checkpoint was damaged, and when.
        faults: all that was done.
    """
    trials = stage.study().get_trials(deepcopy=False)
    came, should = values_of(trials), values_of(calm.study().get_trials(deepcopy=False))
    reported = stage.records.reported()
    doubles = [f"marker: {line}" for line in stage.records.doubles()]
    with stage.ledger() as (ledger, key):
        doubles += [f"ledger: {line}" for line in overlaps(ledger.load_leases(key))]
    rewinds = list(repeated(reported, damaged))
    different = sorted(n for n in should if came.get(n) != should[n])
    return {
        "trials": len(trials),
        "completed": sum(trial.state.name == "COMPLETE" for trial in trials),
        "values_reported": len(reported),
        "values_lost": len(lost(reported, came)),
        "units_repeated": sum(units for _, units in rewinds),
        "units_repeated_max": max((units for _, units in rewinds), default=0),
        "batches_repeated": [
            _circumstances(line, faults) for line in needless(stage.records.rewinds(), faults)
        ],
        "double_holders": len(doubles),
        "doubles": doubles,
        "values_equal": came == should,
        "different_trials": different,
    }


def kept(result: dict[str, Any]) -> bool:
    """True if every promise was kept."""
    return (
        result["trials"] == result["completed"] == N_TRIALS
        and result["values_lost"] == 0
        and result["units_repeated_max"] <= 1
        and not result["batches_repeated"]
        and not result["killed_in_silence"]
        and result["double_holders"] == 0
        and result["values_equal"]
    )


def lost(reported: Iterable[Reported], came: dict[int, dict[str, Any]]) -> list[Reported]:
    """Values that the study does not have, or not as they were reported."""
    nothing: dict[str, Any] = {"values": {}}
    return [
        line
        for line in reported
        if came.get(line.trial, nothing)["values"].get(line.unit) != line.value
    ]


def repeated(
    reported: Iterable[Reported], damaged: Sequence[tuple[int, float]]
) -> Iterable[tuple[Reported, int]]:
    """Each time that a trial went back: where it went on, and the units that this cost.

    A trial goes back because its process was lost, and one unit further for each of its
    checkpoints that was damaged in between: that is a fault of its own.
    """
    last: dict[int, Reported] = {}
    for line in reported:
        before = last.get(line.trial)
        if before is not None and line.unit <= before.unit:
            more = sum(n == line.trial and before.at < at <= line.at for n, at in damaged)
            yield line, max(0, before.unit - line.unit + 1 - more)
        last[line.trial] = line


def needless(rewinds: Iterable[Rewind], faults: Sequence[Fault]) -> Iterable[Rewind]:
    """Those with no fault in between that ends processes which train."""
    ends = [fault for fault in faults if fault.kind in ENDS_PROCESSES]
    for line in rewinds:
        last_at = line.last_at - ENDING_SECONDS
        if not any(fault.began <= line.at and last_at <= fault.ended for fault in ends):
            yield line


def _circumstances(line: Rewind, faults: Sequence[Fault]) -> str:
    before = [fault for fault in faults if fault.began <= line.at]
    last = ""
    if before:
        number, fault = len(before), before[-1]
        last = (
            f"; fault {number}, {fault.kind}, began {fault.began - line.last_at:.1f} s after the "
            f"last of them and ended {line.at - fault.ended:.1f} s before they were trained again"
        )
    return f"{line.batches} of unit {line.unit} of trial {line.trial}{last}"


def overlaps(leases: Iterable[LeaseRecord]) -> Iterable[str]:
    """Pairs of leases that had one device at the same time.

    An end may be written long after it came about, never before: an interval is at least as long
    as its holder had the device. A lease that was never ended holds for ever.
    """
    by_device: dict[str, list[LeaseRecord]] = {}
    for lease in leases:
        for device in lease.devices:
            by_device.setdefault(device, []).append(lease)
    for device, held in by_device.items():
        longest: LeaseRecord | None = None
        for lease in sorted(held, key=lambda lease: lease.started):
            if longest is not None and _end(longest) > lease.started:
                yield f"{device}: {_words(longest)} and {_words(lease)}"
            if longest is None or _end(lease) > _end(longest):
                longest = lease


def _end(lease: LeaseRecord) -> float:
    return math.inf if lease.ended is None else lease.ended


def _words(lease: LeaseRecord) -> str:
    return f"epoch {lease.epoch} of trial {lease.number}, {lease.started:.3f} to {lease.ended}"
