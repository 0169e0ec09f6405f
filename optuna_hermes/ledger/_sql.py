"""The ledger in a database that SQLAlchemy knows: SQLite, PostgreSQL, MySQL."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, cast, final

from sqlalchemy import Connection, Select, Table, and_, delete, func, insert, select, update

from optuna_hermes.ledger._base import (
    CheckpointRecord,
    EventRecord,
    LeaseRecord,
    Ledger,
    ReportRecord,
    RunRecord,
)
from optuna_hermes.ledger._database import ConflictError, Database
from optuna_hermes.ledger._memory import curves_of, stale_epoch
from optuna_hermes.ledger._migrations import bring_up
from optuna_hermes.ledger._schema import (
    CHECKPOINTS,
    EVENTS,
    LEASES,
    MEMORY,
    REPORTS,
    RUNS,
    SCHEMA,
)
from optuna_hermes.model import Curve


@final
class SqlLedger(Ledger):
    """A ledger in a database, usually the study's own.

    It is safe to share between threads. A process that was forked opens its own.

    Args:
        url: as SQLAlchemy and Optuna read it. A file of SQLite is made if it is missing, with
            its folder, which only its user may read.

    Raises:
        LedgerError: the database cannot be reached, or holds a ledger of a later version.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ledger = SqlLedger(f"sqlite:///{folder}/ledger.db")
        ...     epoch = ledger.last_epoch()
        ...     ledger.close()
        >>> epoch
        0
    """

    def __init__(self, url: str) -> None:
        self._database = Database(url)
        try:
            bring_up(self._database)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        """Without the password."""
        return f"SqlLedger({self._database.shown!r})"

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Write all that this thread writes inside of the block together, for the cost of one."""
        with self._database.batch():
            yield

    def save_run(self, run: RunRecord) -> None:
        """Add or replace the row of this study and number."""
        self._replace(RUNS, ("study", "number"), _row(run))

    def load_runs(self, study: str) -> list[RunRecord]:
        """Every run of a study, by number."""
        query = _all_of(RUNS, RunRecord).where(RUNS.c.study == study).order_by(RUNS.c.number)
        return [RunRecord(**row) for row in self._database.rows(query)]

    def add_report(self, report: ReportRecord) -> None:
        """Add a report; earlier ones of the same unit stay."""
        self._add(REPORTS, {**_row(report), **_number_or_word(report.value)})

    def load_curves(self, study: str) -> dict[int, Curve]:
        """The curve of every run that has reported, each unit as it was last reported."""
        query = _all_of(REPORTS, ReportRecord).add_columns(REPORTS.c.not_finite)
        query = query.where(REPORTS.c.study == study).order_by(REPORTS.c.id)
        return curves_of(_report(row) for row in self._database.rows(query))

    def last_values(self, study: str) -> dict[int, float]:
        """The last value of every curve of ``load_curves``."""
        of_study = REPORTS.c.study == study
        last = select(REPORTS.c.number, func.max(REPORTS.c.unit).label("unit"))
        unit = last.where(of_study).group_by(REPORTS.c.number).subquery()
        same = and_(REPORTS.c.number == unit.c.number, REPORTS.c.unit == unit.c.unit)
        query = select(REPORTS.c.number, REPORTS.c.value, REPORTS.c.not_finite)
        query = query.join(unit, same).where(of_study).order_by(REPORTS.c.id)
        rows = self._database.rows(query)
        return {row["number"]: _value(row) for row in rows}

    def last_epoch(self) -> int:
        """The highest epoch this ledger holds, 0 for an empty one."""
        with self._database.reading() as connection:
            return _last_epoch(connection)

    def commit_lease(self, lease: LeaseRecord) -> None:
        """Write a new lease.

        Raises:
            StaleEpochError: its epoch is not above every earlier one.
        """
        row = {**_row(lease), "devices": json.dumps(lease.devices)}
        with self._database.writing() as connection:
            # Every commit waits for this row, so nobody adds an epoch between look and insert.
            # SQLite has no row locks; there, BEGIN IMMEDIATE has locked the database.
            connection.execute(select(SCHEMA.c.id).with_for_update())
            last = _last_epoch(connection)
            if lease.epoch <= last:
                raise stale_epoch(lease.epoch, last)
            connection.execute(insert(LEASES).values(row))

    def name_lease(self, epoch: int, number: int) -> None:
        """Say which trial the lease of a new trial went to; an unknown epoch is no error."""
        with self._database.writing() as connection:
            connection.execute(update(LEASES).where(LEASES.c.epoch == epoch).values(number=number))

    def end_lease(self, epoch: int, ended: float) -> None:
        """Close a lease; one that is closed already, or unknown, stays as it is."""
        live = and_(LEASES.c.epoch == epoch, LEASES.c.ended.is_(None))
        with self._database.writing() as connection:
            connection.execute(update(LEASES).where(live).values(ended=ended))

    def load_leases(self, study: str | None = None) -> list[LeaseRecord]:
        """Leases of a study (or of all), by epoch."""
        query = _all_of(LEASES, LeaseRecord).order_by(LEASES.c.epoch)
        if study is not None:
            query = query.where(LEASES.c.study == study)
        return [
            LeaseRecord(**{**row, "devices": tuple(json.loads(row["devices"]))})
            for row in self._database.rows(query)
        ]

    def save_checkpoint(self, checkpoint: CheckpointRecord) -> None:
        """Add a checkpoint; the run's older ones stay until ``drop_checkpoint``."""
        self._add(CHECKPOINTS, _row(checkpoint))

    def load_checkpoints(self, study: str, number: int | None = None) -> list[CheckpointRecord]:
        """Checkpoints of a study, or of one run, in the order they were saved."""
        query = _all_of(CHECKPOINTS, CheckpointRecord).order_by(CHECKPOINTS.c.id)
        return [
            CheckpointRecord(**row)
            for row in self._database.rows(_of_run(query, CHECKPOINTS, study, number))
        ]

    def drop_checkpoint(self, study: str, path: str) -> None:
        """Forget a checkpoint whose file is gone; one that is unknown is no error."""
        dropped = and_(CHECKPOINTS.c.study == study, CHECKPOINTS.c.path == path)
        with self._database.writing() as connection:
            connection.execute(delete(CHECKPOINTS).where(dropped))

    def load_memory(self, study: str) -> Any:
        """The policy's memory (JSON), None if there is none."""
        with self._database.reading() as connection:
            text = connection.scalar(select(MEMORY.c.memory).where(MEMORY.c.study == study))
        return None if text is None else json.loads(text)

    def save_memory(self, study: str, memory: Any) -> None:
        """Replace the policy's memory.

        Raises:
            TypeError: the memory is not JSON.
        """
        self._replace(MEMORY, ("study",), {"study": study, "memory": json.dumps(memory)})

    def add_event(self, event: EventRecord) -> None:
        """Add a line to the story.

        Raises:
            TypeError: the detail is not JSON.
        """
        self._add(EVENTS, {**_row(event), "detail": json.dumps(event.detail)})

    def load_events(self, study: str, number: int | None = None) -> list[EventRecord]:
        """The story of a study, or of one run, in the order it was written."""
        query = _all_of(EVENTS, EventRecord).order_by(EVENTS.c.id)
        return [
            EventRecord(**{**row, "detail": json.loads(row["detail"])})
            for row in self._database.rows(_of_run(query, EVENTS, study, number))
        ]

    def close(self) -> None:
        """Give back connections; the ledger is not used afterwards."""
        self._database.close()

    def _add(self, table: Table, row: Mapping[str, Any]) -> None:
        with self._database.writing() as connection:
            connection.execute(insert(table).values(row))

    def _replace(self, table: Table, key: Sequence[str], row: Mapping[str, Any]) -> None:
        """Update, or insert if there is no such row, in words that every database knows."""
        try:
            self._update_or_insert(table, key, row)
        except ConflictError:  # another process inserted it in between: now there is one to update
            self._update_or_insert(table, key, row)

    def _update_or_insert(self, table: Table, key: Sequence[str], row: Mapping[str, Any]) -> None:
        same = and_(*(table.c[name] == row[name] for name in key))
        with self._database.writing() as connection:
            updated = connection.execute(update(table).where(same).values(row)).rowcount
            if not updated:
                connection.execute(insert(table).values(row))


def _row(record: Any) -> dict[str, Any]:
    return {entry.name: getattr(record, entry.name) for entry in fields(record)}


def _all_of(table: Table, record: type[Any]) -> Select[Any]:
    """Select the columns of a record, which have its fields' names."""
    return select(*(table.c[entry.name] for entry in fields(record)))


def _of_run(query: Select[Any], table: Table, study: str, number: int | None) -> Select[Any]:
    query = query.where(table.c.study == study)
    return query if number is None else query.where(table.c.number == number)


def _last_epoch(connection: Connection) -> int:
    return cast("int | None", connection.scalar(select(func.max(LEASES.c.epoch)))) or 0


def _number_or_word(value: float) -> dict[str, Any]:
    number = float(value)
    if math.isfinite(number):
        return {"value": number, "not_finite": None}
    return {"value": None, "not_finite": str(number)}


def _report(row: dict[str, Any]) -> ReportRecord:
    value = _value(row)
    del row["not_finite"]
    return ReportRecord(**{**row, "value": value})


def _value(row: dict[str, Any]) -> float:
    word = row["not_finite"]
    return float(row["value"] if word is None else word)
