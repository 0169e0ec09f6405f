"""From records to rows and back."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any

from sqlalchemy import Select, Table, select

from optuna_hermes.ledger._records import ReportRecord


def row(record: Any) -> dict[str, Any]:
    """The fields of a record; device ids as JSON."""
    found = {entry.name: getattr(record, entry.name) for entry in fields(record)}
    return {**found, "devices": json.dumps(found["devices"])} if "devices" in found else found


def with_devices(found: dict[str, Any]) -> dict[str, Any]:
    """A row with its device ids as a tuple."""
    return {**found, "devices": tuple(json.loads(found["devices"]))}


def all_of(table: Table, record: type[Any]) -> Select[Any]:
    """Select the columns of a record, which have its fields' names."""
    return select(*(table.c[entry.name] for entry in fields(record)))


def of_run(query: Select[Any], table: Table, study: str, number: int | None) -> Select[Any]:
    """The part of a query that is about a study, or about one run."""
    query = query.where(table.c.study == study)
    return query if number is None else query.where(table.c.number == number)


def number_or_word(value: float) -> dict[str, Any]:
    """A value as a number, or as a word if it is NaN or infinite."""
    number = float(value)
    if math.isfinite(number):
        return {"value": number, "not_finite": None}
    return {"value": None, "not_finite": str(number)}


def report(found: dict[str, Any]) -> ReportRecord:
    """A report from its row."""
    word = found.pop("not_finite")
    return ReportRecord(**found if word is None else {**found, "value": float(word)})
