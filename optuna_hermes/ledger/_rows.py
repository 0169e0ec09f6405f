"""Conversion of records to rows and back, and of reports to curves."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from optuna_hermes.ledger._records import CheckpointRecord, ReportRecord
from optuna_hermes.model import Checkpoint, Curve, add_report

_LISTS = ("devices", "wants")


def row(record: Any) -> dict[str, Any]:
    """The fields of a record; lists of strings as JSON."""
    found = {entry.name: getattr(record, entry.name) for entry in fields(record)}
    return found | {name: json.dumps(found[name]) for name in _LISTS if name in found}


def with_lists(found: dict[str, Any]) -> dict[str, Any]:
    """A row with its lists of strings as tuples."""
    return found | {name: tuple(json.loads(found[name])) for name in _LISTS if name in found}


def number_or_word(value: float) -> dict[str, Any]:
    """The columns of a value: a number, or its name as a string if it is NaN or infinite."""
    number = float(value)
    if math.isfinite(number):
        return {"value": number, "not_finite": None}
    return {"value": None, "not_finite": str(number)}


def value_of(number: float | None, word: str | None) -> float:
    """The value from its two columns."""
    return number if word is None else float(word)  # type: ignore[return-value]


def report_of(study: str, found: dict[str, Any]) -> ReportRecord:
    """The record of a report from its row."""
    value = value_of(found.pop("value"), found.pop("not_finite"))
    return ReportRecord(study=study, value=value, **found)


def checkpoint_of(study: str, found: dict[str, Any]) -> CheckpointRecord:
    """The record of a checkpoint from its row."""
    number, at = found.pop("number"), found.pop("at")
    return CheckpointRecord(study=study, number=number, checkpoint=Checkpoint(**found), at=at)


def curves_of(rows: Iterable[Sequence[Any]]) -> dict[int, Curve]:
    """The curve of each trial from the rows of its reports, which come in the order of writing.

    Units of an earlier life of a trial, which has gone back since, are not in it.
    """
    # Tuples, not records: there may be hundreds of thousands of rows.
    trials: defaultdict[int, dict[int, tuple[int, float, float]]] = defaultdict(dict)
    for number, unit, step, value, word, device_seconds in rows:
        add_report(trials[number], unit, (step, value_of(value, word), device_seconds))
    return {number: _curve(trials[number]) for number in sorted(trials)}


def step_values_of(rows: Iterable[Sequence[Any]]) -> dict[int, dict[int, float | None]]:
    """The value of each step in each trial's present life, from rows as above.

    None for a step that only an earlier life has reached.
    """
    trials: defaultdict[int, dict[int, tuple[int, float]]] = defaultdict(dict)
    steps: defaultdict[int, dict[int, float | None]] = defaultdict(dict)
    for number, unit, step, value, word, _ in rows:
        add_report(trials[number], unit, (step, value_of(value, word)))
        steps[number][step] = None
    return {number: steps[number] | dict(trials[number].values()) for number in steps}


def _curve(units: dict[int, tuple[int, float, float]]) -> Curve:
    steps, values, device_seconds = zip(*units.values(), strict=True)
    return Curve(steps=steps, values=values, device_seconds=device_seconds)
