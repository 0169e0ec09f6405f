"""The ledger in a database, through SQLAlchemy: SQLite, PostgreSQL, MySQL, MariaDB."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, final

from sqlalchemy import Insert, Table, and_, delete, func, insert, select, union, update

from optuna_hermes.ledger._base import Ledger
from optuna_hermes.ledger._claims import claimable, claimed, stale_epoch, study_full
from optuna_hermes.ledger._curves import curves_of
from optuna_hermes.ledger._database import ConflictError, Database
from optuna_hermes.ledger._locks import StudyLocks
from optuna_hermes.ledger._migrations import bring_up
from optuna_hermes.ledger._records import (
    CheckpointRecord,
    EventRecord,
    HostRecord,
    LeaseRecord,
    ReportRecord,
    RunRecord,
)
from optuna_hermes.ledger._rows import (
    REPORTED,
    all_of,
    number_or_word,
    of_run,
    report_of,
    reported,
    row,
    with_lists,
)
from optuna_hermes.ledger._schema import (
    CHECKPOINTS,
    EVENTS,
    LEASES,
    MEMORY,
    OF_STUDIES,
    REPORTS,
    RUNS,
    SCHEMA,
)
from optuna_hermes.ledger._sharing import (
    beat,
    check_owner,
    forget_host,
    has_checkpoint,
    hosts_of,
    in_turn,
    known_runs,
    last_epoch,
    locked_run,
    take,
)
from optuna_hermes.ledger._statements import (
    ADD_EVENT,
    ADD_LEASE,
    ADD_REPORT,
    ADD_RUN,
    END_LEASE,
    REPLACE_RUN,
)
from optuna_hermes.model import Curve, Wish


@final
class SqlLedger(Ledger):
    """A ledger in a database, usually the study's own.

    It is safe to share between threads. A forked process has to open its own.

    Args:
        url: a database URL as for SQLAlchemy and Optuna. A file of SQLite is created if it is
            missing, with its folder, which only its user may read.

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
        self._locks = StudyLocks(self._database.file) if self._database.file else None
        try:
            bring_up(self._database)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        """Text with the URL but without its password."""
        return f"SqlLedger({self._database.shown!r})"

    @property
    def shared(self) -> bool:
        """True if brokers of other hosts may use it too: a file is for one host."""
        return self._database.file is None

    def lock_study(self, study: str) -> None:
        """Lock a study of a file against brokers of other processes.

        Raises:
            LedgerError: another process has it.
        """
        if self._locks is not None:
            self._locks.lock(study)

    def unlock_study(self, study: str) -> None:
        """Unlock a study."""
        if self._locks is not None:
            self._locks.unlock(study)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Combine all writes of this thread inside of the block into one transaction."""
        with self._database.batch() as connection:
            in_turn(connection)  # in one order, or two batches could deadlock
            yield

    def save_run(self, run: RunRecord, *, by: str | None = None) -> None:
        """Add the row of this study and number, or replace it.

        Raises:
            NotOwnerError: its row has another owner than ``by``.
        """
        with suppress(ConflictError):  # another process inserted it: update then
            return self._save_run(run, by)
        self._save_run(run, by)

    def _save_run(self, run: RunRecord, by: str | None) -> None:
        found = row(run)
        of = {"of_study": run.study, "of_number": run.number, "by": by}
        with self._database.writing() as connection:
            # Update first: a run is inserted once and replaced many times.
            if connection.execute(REPLACE_RUN, {**found, **of}).rowcount:
                return
            check_owner(connection, run.study, run.number, by)
            connection.execute(ADD_RUN, found)

    def claim_run(
        self, study: str, number: int, *, host: str, instance: str, dead_after_seconds: float
    ) -> RunRecord | None:
        """Claim a run for a broker, if it has no owner or its holder is gone."""
        with self._database.writing() as connection:
            run = locked_run(connection, study, number)
            if run is None or not claimable(
                run,
                hosts_of(connection),
                host=host,
                instance=instance,
                dead_after_seconds=dead_after_seconds,
            ):
                return None
            if run.owner == instance:
                return run
            stored = has_checkpoint(connection, study, number)
            run = claimed(run, host=host, instance=instance, stored=stored)
            take(connection, run)
            return run

    def load_runs(self, study: str) -> list[RunRecord]:
        """All runs of a study, by number."""
        query = all_of(RUNS, RunRecord).where(RUNS.c.study == study).order_by(RUNS.c.number)
        return [RunRecord(**found) for found in self._database.rows(query)]

    def save_wish(self, study: str, number: int, wish: Wish | None) -> None:
        """Save a user's override of a run, None to remove it; an unknown run is no error.

        ``save_run`` leaves it as it is.
        """
        same = and_(RUNS.c.study == study, RUNS.c.number == number)
        with self._database.writing() as connection:
            connection.execute(update(RUNS).where(same).values(wish=wish))

    def load_wishes(self, study: str) -> dict[int, Wish]:
        """The users' overrides of a study's runs, by number; also of runs that are over."""
        query = select(RUNS.c.number, RUNS.c.wish).order_by(RUNS.c.number)
        query = query.where(RUNS.c.study == study, RUNS.c.wish.is_not(None))
        return {found["number"]: found["wish"] for found in self._database.rows(query)}

    def add_report(self, report: ReportRecord) -> None:
        """Add a report; earlier ones of the same unit stay."""
        self._add(ADD_REPORT, {**row(report), **number_or_word(report.value)})

    def load_curves(self, study: str, numbers: Collection[int] | None = None) -> dict[int, Curve]:
        """The curves of all runs that have reported (or of these), each unit as last reported."""
        query = select(*(REPORTS.c[name] for name in REPORTED)).where(REPORTS.c.study == study)
        if numbers is not None:
            query = query.where(REPORTS.c.number.in_(numbers))
        with self._database.reading() as connection:
            return curves_of(map(reported, connection.execute(query.order_by(REPORTS.c.id))))

    def load_reports(self, study: str, *, after: int = 0) -> list[tuple[int, ReportRecord]]:
        """All reports of a study after a position, each with its position, in order of writing."""
        columns = (REPORTS.c[name] for name in ("id", *REPORTED, "at"))
        query = select(*columns).where(REPORTS.c.study == study, REPORTS.c.id > after)
        with self._database.reading() as connection:
            return [
                (position, report_of(study, found, at))
                for position, *found, at in connection.execute(query.order_by(REPORTS.c.id))
            ]

    def last_values(self, study: str) -> dict[int, float]:
        """The last value of every curve of ``load_curves``."""
        of_study = REPORTS.c.study == study
        last = select(REPORTS.c.number, func.max(REPORTS.c.unit).label("unit"))
        unit = last.where(of_study).group_by(REPORTS.c.number).subquery()
        same = and_(REPORTS.c.number == unit.c.number, REPORTS.c.unit == unit.c.unit)
        query = select(REPORTS.c.number, REPORTS.c.value, REPORTS.c.not_finite)
        query = query.join(unit, same).where(of_study).order_by(REPORTS.c.id)
        with self._database.reading() as connection:
            return {
                number: value if word is None else float(word)
                for number, value, word in connection.execute(query)
            }

    def last_epoch(self) -> int:
        """The highest epoch this ledger has held, 0 for a new one."""
        with self._database.reading() as connection:
            return last_epoch(connection)

    def commit_lease(self, lease: LeaseRecord, *, limit: int | None = None) -> None:
        """Write a new lease.

        Raises:
            StaleEpochError: its epoch is not above every earlier one.
            NotOwnerError: its run has another owner.
            StudyFullError: the study has reached its limit.
        """
        with self._database.writing() as connection:
            in_turn(connection)  # so that no epoch or run is added before the insert
            last = last_epoch(connection)
            if lease.epoch <= last:
                raise stale_epoch(lease.epoch, last)
            if lease.number is not None:
                check_owner(connection, lease.study, lease.number, lease.owner)
            elif limit is not None and (known := known_runs(connection, lease.study)) >= limit:
                raise study_full(lease, limit, known)
            connection.execute(ADD_LEASE, row(lease))

    def name_lease(self, epoch: int, number: int) -> None:
        """Set the trial of a lease granted before it existed; an unknown epoch is no error."""
        with self._database.writing() as connection:
            connection.execute(update(LEASES).where(LEASES.c.epoch == epoch).values(number=number))

    def end_lease(self, epoch: int, ended: float) -> None:
        """End a lease; one that has ended already, or is unknown, stays as it is."""
        with self._database.writing() as connection:
            connection.execute(END_LEASE, {"of_epoch": epoch, "at": ended})

    def load_leases(
        self, study: str | None = None, *, live: bool = False, since: int = 0
    ) -> list[LeaseRecord]:
        """Leases of a study (or of all), by epoch; optionally only live or recent ones."""
        query = all_of(LEASES, LeaseRecord).order_by(LEASES.c.epoch)
        if since:
            query = query.where(LEASES.c.epoch >= since)
        if study is not None:
            query = query.where(LEASES.c.study == study)
        if live:
            query = query.where(LEASES.c.ended.is_(None))
        return [LeaseRecord(**with_lists(found)) for found in self._database.rows(query)]

    def save_checkpoint(self, checkpoint: CheckpointRecord) -> None:
        """Add a checkpoint; the run's older ones stay until ``drop_checkpoint``."""
        self._add(insert(CHECKPOINTS), row(checkpoint))

    def load_checkpoints(self, study: str, number: int | None = None) -> list[CheckpointRecord]:
        """Checkpoints of a study, or of one run, in the order they were saved."""
        query = all_of(CHECKPOINTS, CheckpointRecord).order_by(CHECKPOINTS.c.id)
        return [
            CheckpointRecord(**found)
            for found in self._database.rows(of_run(query, CHECKPOINTS, study, number))
        ]

    def drop_checkpoint(self, study: str, path: str) -> None:
        """Remove the row of a checkpoint whose file is gone; an unknown one is no error."""
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
        """Add an event to the event log.

        Raises:
            TypeError: the detail is not JSON.
        """
        self._add(ADD_EVENT, {**row(event), "detail": json.dumps(event.detail)})

    def load_events(self, study: str, number: int | None = None) -> list[EventRecord]:
        """The events of a study, or of one run, in the order of writing."""
        query = all_of(EVENTS, EventRecord).order_by(EVENTS.c.id)
        return [
            EventRecord(**{**found, "detail": json.loads(found["detail"])})
            for found in self._database.rows(of_run(query, EVENTS, study, number))
        ]

    def trim_events(self, study: str, before: float) -> int:
        """Remove a study's events that are older than a time; return their number."""
        old = and_(EVENTS.c.study == study, EVENTS.c.at < before)
        with self._database.writing() as connection:
            return connection.execute(delete(EVENTS).where(old)).rowcount

    def beat(self, host: HostRecord) -> None:
        """Write a broker's heartbeat and load: add its row, or replace it."""
        with self._database.writing() as connection:
            beat(connection, host)

    def load_hosts(self) -> list[HostRecord]:
        """All brokers that have sent a heartbeat and are not forgotten, by name."""
        with self._database.reading() as connection:
            return hosts_of(connection)

    def forget_host(self, instance: str, *, dead_after_seconds: float) -> bool:
        """End the leases of a broker that is gone, and remove its row; its runs can be claimed."""
        with self._database.writing() as connection:
            return forget_host(connection, instance, dead_after_seconds)

    def load_studies(self) -> list[str]:
        """The keys of all studies with any row in the ledger, in order."""
        keys = union(*(select(table.c.study) for table in OF_STUDIES))
        with self._database.reading() as connection:
            return sorted(connection.scalars(keys))

    def forget_study(self, study: str) -> None:
        """Remove all rows of a study; epochs still grow above those of its leases."""
        with self._database.writing() as connection:
            in_turn(connection)
            connection.execute(update(SCHEMA).values(forgotten_epoch=last_epoch(connection)))
            for table in OF_STUDIES:
                connection.execute(delete(table).where(table.c.study == study))

    def close(self) -> None:
        """Close connections and release locks; the ledger is not used afterwards."""
        if self._locks is not None:
            self._locks.close()
        self._database.close()

    def _add(self, statement: Insert, values: Mapping[str, Any]) -> None:
        with self._database.writing() as connection:
            connection.execute(statement, values)

    def _replace(self, table: Table, key: Sequence[str], values: Mapping[str, Any]) -> None:
        """Update a row, or insert it if it is missing, in SQL that every database supports."""
        try:
            self._update_or_insert(table, key, values)
        except ConflictError:  # another process inserted it in between: now there is one to update
            self._update_or_insert(table, key, values)

    def _update_or_insert(
        self, table: Table, key: Sequence[str], values: Mapping[str, Any]
    ) -> None:
        same = and_(*(table.c[name] == values[name] for name in key))
        with self._database.writing() as connection:
            updated = connection.execute(update(table).where(same).values(values)).rowcount
            if not updated:
                connection.execute(insert(table).values(values))
