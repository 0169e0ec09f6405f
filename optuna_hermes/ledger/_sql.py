"""The ledger in a database that SQLAlchemy knows: SQLite, PostgreSQL, MySQL."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any, cast, final

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    Select,
    Table,
    and_,
    create_engine,
    delete,
    event,
    func,
    insert,
    make_url,
    select,
    update,
)
from sqlalchemy.exc import ArgumentError, IntegrityError, SQLAlchemyError

from optuna_hermes.errors import LedgerError
from optuna_hermes.ledger._base import (
    SCHEMA_VERSION,
    CheckpointRecord,
    EventRecord,
    LeaseRecord,
    Ledger,
    ReportRecord,
    RunRecord,
)
from optuna_hermes.ledger._memory import curves_of, stale_epoch
from optuna_hermes.ledger._schema import (
    CHECKPOINTS,
    EVENTS,
    LEASES,
    MEMORY,
    METADATA,
    REPORTS,
    RUNS,
    SCHEMA,
    any_table_exists,
    create,
    stored_version,
)
from optuna_hermes.model import Curve

_LOCK_TIMEOUT_SECONDS = 60
_BEGIN = "hermes_begin"


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
        parsed = _parse(url)
        self._shown = parsed.set(query={}).render_as_string(hide_password=True)
        self._password = parsed.password
        self._pid = os.getpid()
        self._engine = self._connectable(parsed)
        self._writer = self._engine.execution_options(**{_BEGIN: "BEGIN IMMEDIATE"})
        self._batch = _Batch()
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        """Without the password."""
        return f"SqlLedger({self._shown!r})"

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Write all that this thread writes inside of the block together, for the cost of one."""
        with self._writing() as connection:
            self._batch.connection = connection
            try:
                yield
            finally:
                self._batch.connection = None

    def save_run(self, run: RunRecord) -> None:
        """Add or replace the row of this study and number."""
        self._replace(RUNS, ("study", "number"), _row(run))

    def load_runs(self, study: str) -> list[RunRecord]:
        """Every run of a study, by number."""
        query = _all_of(RUNS, RunRecord).where(RUNS.c.study == study).order_by(RUNS.c.number)
        return [RunRecord(**row) for row in self._rows(query)]

    def add_report(self, report: ReportRecord) -> None:
        """Add a report; earlier ones of the same unit stay."""
        self._add(REPORTS, {**_row(report), **_number_or_word(report.value)})

    def load_curves(self, study: str) -> dict[int, Curve]:
        """The curve of every run that has reported, each unit as it was last reported."""
        query = _all_of(REPORTS, ReportRecord).add_columns(REPORTS.c.not_finite)
        query = query.where(REPORTS.c.study == study).order_by(REPORTS.c.id)
        return curves_of(_report(row) for row in self._rows(query))

    def last_epoch(self) -> int:
        """The highest epoch this ledger holds, 0 for an empty one."""
        with self._reading() as connection:
            return _last_epoch(connection)

    def commit_lease(self, lease: LeaseRecord) -> None:
        """Write a new lease.

        Raises:
            StaleEpochError: its epoch is not above every earlier one.
        """
        row = {**_row(lease), "devices": json.dumps(lease.devices)}
        with self._writing() as connection:
            # Every commit waits for this row, so nobody adds an epoch between look and insert.
            # SQLite has no row locks; there, BEGIN IMMEDIATE has locked the database.
            connection.execute(select(SCHEMA.c.id).with_for_update())
            last = _last_epoch(connection)
            if lease.epoch <= last:
                raise stale_epoch(lease.epoch, last)
            connection.execute(insert(LEASES).values(row))

    def name_lease(self, epoch: int, number: int) -> None:
        """Say which trial the lease of a new trial went to; an unknown epoch is no error."""
        with self._writing() as connection:
            connection.execute(update(LEASES).where(LEASES.c.epoch == epoch).values(number=number))

    def end_lease(self, epoch: int, ended: float) -> None:
        """Close a lease; one that is closed already, or unknown, stays as it is."""
        live = and_(LEASES.c.epoch == epoch, LEASES.c.ended.is_(None))
        with self._writing() as connection:
            connection.execute(update(LEASES).where(live).values(ended=ended))

    def load_leases(self, study: str | None = None) -> list[LeaseRecord]:
        """Leases of a study (or of all), by epoch."""
        query = _all_of(LEASES, LeaseRecord).order_by(LEASES.c.epoch)
        if study is not None:
            query = query.where(LEASES.c.study == study)
        return [
            LeaseRecord(**{**row, "devices": tuple(json.loads(row["devices"]))})
            for row in self._rows(query)
        ]

    def save_checkpoint(self, checkpoint: CheckpointRecord) -> None:
        """Add a checkpoint; the run's older ones stay until ``drop_checkpoint``."""
        self._add(CHECKPOINTS, _row(checkpoint))

    def load_checkpoints(self, study: str, number: int | None = None) -> list[CheckpointRecord]:
        """Checkpoints of a study, or of one run, in the order they were saved."""
        query = _all_of(CHECKPOINTS, CheckpointRecord).order_by(CHECKPOINTS.c.id)
        return [
            CheckpointRecord(**row)
            for row in self._rows(_of_run(query, CHECKPOINTS, study, number))
        ]

    def drop_checkpoint(self, study: str, path: str) -> None:
        """Forget a checkpoint whose file is gone; one that is unknown is no error."""
        dropped = and_(CHECKPOINTS.c.study == study, CHECKPOINTS.c.path == path)
        with self._writing() as connection:
            connection.execute(delete(CHECKPOINTS).where(dropped))

    def load_memory(self, study: str) -> Any:
        """The policy's memory (JSON), None if there is none."""
        with self._reading() as connection:
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
            for row in self._rows(_of_run(query, EVENTS, study, number))
        ]

    def close(self) -> None:
        """Give back connections; the ledger is not used afterwards."""
        # After a fork the connections are the parent's: they are forgotten, not closed.
        self._engine.dispose(close=os.getpid() == self._pid)

    def _add(self, table: Table, row: Mapping[str, Any]) -> None:
        with self._writing() as connection:
            connection.execute(insert(table).values(row))

    def _replace(self, table: Table, key: Sequence[str], row: Mapping[str, Any]) -> None:
        """Update, or insert if there is no such row, in words that every database knows."""
        try:
            self._update_or_insert(table, key, row)
        except _ConflictError:  # another process inserted it in between: now there is one to update
            self._update_or_insert(table, key, row)

    def _update_or_insert(self, table: Table, key: Sequence[str], row: Mapping[str, Any]) -> None:
        same = and_(*(table.c[name] == row[name] for name in key))
        with self._writing() as connection:
            updated = connection.execute(update(table).where(same).values(row)).rowcount
            if not updated:
                connection.execute(insert(table).values(row))

    def _rows(self, query: Select[Any]) -> list[dict[str, Any]]:
        with self._reading() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]

    def _reading(self) -> AbstractContextManager[Connection]:
        return self._transaction(self._engine)

    def _writing(self) -> AbstractContextManager[Connection]:
        if self._batch.connection is not None:
            return nullcontext(self._batch.connection)
        return self._transaction(self._writer)

    @contextmanager
    def _transaction(self, engine: Engine) -> Iterator[Connection]:
        if os.getpid() != self._pid:
            raise LedgerError(
                f"A ledger is used in the process that opened it, {self._pid}, but this is "
                f"{os.getpid()}. Open the ledger again after a fork."
            )
        try:
            with engine.begin() as connection:
                yield connection
        except IntegrityError as error:
            raise _ConflictError(self._failed(error)) from error
        except SQLAlchemyError as error:
            raise LedgerError(self._failed(error)) from error

    def _failed(self, error: Exception) -> str:
        reason = _first_line(getattr(error, "orig", None) or error)
        if self._password:
            reason = reason.replace(self._password, "***")
        return (
            f"The ledger at {self._shown} cannot be used: {reason.rstrip('.')}. Check its URL, "
            "that the database runs, and that you may write to it."
        )

    def _connectable(self, url: URL) -> Engine:
        try:
            return _engine(url)
        except (ImportError, ArgumentError, OSError) as error:
            raise LedgerError(self._failed(error)) from error

    def _open(self) -> None:
        """Make the tables, unless they are there, or another process is just making them.

        A process that lost such a race looks again. Where a database cannot make tables in one
        transaction, it loses once for each table at the most.
        """
        for _ in range(len(METADATA.tables)):
            if self._has_tables():
                return
            try:
                with self._writing() as connection:
                    create(connection)
            except LedgerError:
                with self._reading() as connection:
                    if not any_table_exists(connection):
                        raise
        if not self._has_tables():
            raise LedgerError(
                f"The ledger at {self._shown} has no schema_version although its hermes_* tables "
                "exist: it was damaged. Give the ledger another database."
            )

    def _has_tables(self) -> bool:
        with self._reading() as connection:
            version = stored_version(connection)
        if version is not None and version > SCHEMA_VERSION:
            raise LedgerError(
                f"A ledger's schema_version must be at most {SCHEMA_VERSION} but got {version} at "
                f"{self._shown}. Upgrade optuna-hermes, or give the ledger another database."
            )
        return version is not None


class _Batch(threading.local):
    """The open transaction of this thread's batch, None outside of one."""

    connection: Connection | None = None


class _ConflictError(LedgerError):
    """The database refused a row because one with its key is there."""


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        # Neither the text nor the cause is shown: either may hold a password.
        raise LedgerError(
            "A ledger's URL must look like sqlite:///study.db or "
            "postgresql://user:password@host/database, but this one cannot be read."
        ) from None
    return _with_file(parsed) if parsed.get_backend_name() == "sqlite" else parsed


def _with_file(url: URL) -> URL:
    """The URL with an absolute path: it names the same file after a change of folder."""
    database = url.database or ":memory:"
    if ":memory:" in database or url.query.get("mode") == "memory":
        raise LedgerError(
            "A ledger outlives its process but a SQLite database in memory does not. Name a file, "
            "as in sqlite:///study.db, or use memory: for a ledger of this process alone."
        )
    return url if database.startswith("file:") else url.set(database=os.path.abspath(database))


def _engine(url: URL) -> Engine:
    if url.get_backend_name() == "sqlite":
        return _sqlite_engine(url)
    # Each statement must see what was committed while it waited for a lock.
    return create_engine(
        url, hide_parameters=True, pool_pre_ping=True, isolation_level="READ COMMITTED"
    )


def _sqlite_engine(url: URL) -> Engine:
    if not str(url.database).startswith("file:"):
        Path(str(url.database)).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    arguments = {} if "timeout" in url.query else {"timeout": _LOCK_TIMEOUT_SECONDS}
    engine = create_engine(url, hide_parameters=True, connect_args=arguments)
    event.listen(engine, "connect", _leave_transactions_to_us)
    event.listen(engine, "begin", _begin)
    return engine


def _leave_transactions_to_us(connection: Any, _record: object) -> None:
    # The driver would begin late, and DEFERRED: two writers could both read before either writes.
    connection.isolation_level = None


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get(_BEGIN, "BEGIN"))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


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
    word = row.pop("not_finite")
    return ReportRecord(**row if word is None else {**row, "value": float(word)})
