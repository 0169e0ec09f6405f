"""Conversion of records to rows and back."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from sqlalchemy import Select, Table, select

from optuna_hermes.ledger._curves import Report
from optuna_hermes.ledger._records import ReportRecord

_LISTS = ("devices", "wants")


def row(record: Any) -> dict[str, Any]:
    """The fields of a record; lists of strings as JSON."""
    found = {entry.name: getattr(record, entry.name) for entry in fields(record)}
    return found | {name: json.dumps(found[name]) for name in _LISTS if name in found}


def with_lists(found: dict[str, Any]) -> dict[str, Any]:
    """A row with its lists of strings as tuples."""
    return found | {name: tuple(json.loads(found[name])) for name in _LISTS if name in found}


def all_of(table: Table, record: type[Any]) -> Select[Any]:
    """Select the columns of a record, which have its fields' names."""
    return select(*(table.c[entry.name] for entry in fields(record)))


def of_run(query: Select[Any], table: Table, study: str, number: int | None) -> Select[Any]:
    """Restrict a query to a study, or to one run."""
    query = query.where(table.c.study == study)
    return query if number is None else query.where(table.c.number == number)


def number_or_word(value: float) -> dict[str, Any]:
    """The columns of a value: a number, or its name as a string if it is NaN or infinite."""
    number = float(value)
    if math.isfinite(number):
        return {"value": number, "not_finite": None}
    return {"value": None, "not_finite": str(number)}


REPORTED = ("number", "unit", "step", "value", "not_finite", "device_seconds")
"""Columns that ``reported`` reads, in its order."""


def reported(found: Sequence[Any]) -> Report:
    """A report from its row."""
    number, unit, step, value, word, device_seconds = found
    return number, unit, step, value if word is None else float(word), device_seconds


def report_of(study: str, found: Sequence[Any], at: float) -> ReportRecord:
    """The record of a report from its row."""
    number, unit, step, value, device_seconds = reported(found)
    return ReportRecord(
        study=study,
        number=number,
        unit=unit,
        step=step,
        value=value,
        device_seconds=device_seconds,
        at=at,
    )
