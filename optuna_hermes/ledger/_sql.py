"""The ledger in a database, through SQLAlchemy: SQLite, PostgreSQL, MySQL, MariaDB."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

from sqlalchemy import Connection, Insert

from optuna_hermes.errors import StaleEpochError, StudyFullError
from optuna_hermes.ledger import _statements as sql
from optuna_hermes.ledger._base import Ledger
from optuna_hermes.ledger._database import MEMORY, Database
from optuna_hermes.ledger._locks import StudyLocks
from optuna_hermes.ledger._records import (
    CheckpointRecord,
    EventRecord,
    HostRecord,
    LeaseRecord,
    ReportRecord,
    TrialRecord,
)
from optuna_hermes.ledger._rows import (
    checkpoint_of,
    curves_of,
    number_or_word,
    report_of,
    row,
    value_of,
    with_lists,
)
from optuna_hermes.ledger._schema import EVENTS, RUNS, create_tables
from optuna_hermes.ledger._sharing import (
    beat,
    check_owner,
    claim,
    forget_host,
    hosts_of,
    in_turn,
    known_trials,
    last_epoch,
    save_trial,
)
from optuna_hermes.model import Curve, Override


class SqlLedger(Ledger):
    """A ledger in a database, usually the study's own.

    It is safe to share between threads. A forked process has to open its own.

    Args:
        url: a database URL as for SQLAlchemy and Optuna. A file of SQLite is created if it is
            missing, with its folder, which only its user may read.

    Raises:
        LedgerError: the database cannot be reached, or holds a ledger of another version.

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
        self._use(Database(url))

    def _use(self, database: Database) -> None:
        self._database = database
        self._locks = StudyLocks(database.file) if database.file else None
        try:
            create_tables(self._database)
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
        """Lock a study of a file against brokers of other processes."""
        if self._locks is not None:
            self._locks.lock(study)

    def unlock_study(self, study: str) -> None:
        """Unlock a study."""
        if self._locks is not None:
            self._locks.unlock(study)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Combine all writes of this thread inside of the block into one transaction."""
        with self._turn() as connection, self._database.batch(connection):
            yield

    def save_trial(self, trial: TrialRecord, *, by: str | None = None) -> None:
        """Add the row of this study and number, or replace it."""
        with self._turn() as connection:
            save_trial(connection, trial, by)

    def claim_trial(
        self, study: str, number: int, *, host: str, instance: str, dead_after_seconds: float
    ) -> TrialRecord | None:
        """Claim a trial for a broker, if it has no owner or its holder is gone."""
        with self._database.writing() as connection:
            return claim(
                connection,
                study,
                number,
                host=host,
                instance=instance,
                dead_after_seconds=dead_after_seconds,
            )

    def load_trials(self, study: str) -> list[TrialRecord]:
        """All trials of a study, by number."""
        of = {"of_study": study}
        return [
            TrialRecord(**found) for found in self._database.rows(sql.load(RUNS, TrialRecord), of)
        ]

    def save_override(self, study: str, number: int, override: Override | None) -> None:
        """Save a user's override of a trial, None to remove it."""
        of = {"of_study": study, "of_number": number}
        with self._database.writing() as connection:
            connection.execute(sql.CHANGE_RUN, {"override": override, **of})

    def load_overrides(self, study: str) -> dict[int, Override]:
        """The users' overrides of a study's trials, by number; also of trials that are over."""
        found = self._database.rows(sql.OVERRIDES, {"of_study": study})
        return {each["number"]: each["override"] for each in found}

    def add_report(self, report: ReportRecord) -> None:
        """Add a report; earlier ones of the same unit stay."""
        self._add(sql.ADD_REPORT, {**row(report), **number_or_word(report.value)})

    def load_curves(self, study: str, numbers: Collection[int] | None = None) -> dict[int, Curve]:
        """The curves of all trials that have reported (or of these), each unit as last reported."""
        of: dict[str, Any] = {"of_study": study}
        if numbers is not None:
            of["of_numbers"] = list(numbers)
        query = sql.CURVES if numbers is None else sql.SOME_CURVES
        with self._database.reading() as connection:
            return curves_of(connection.execute(query, of))

    def load_reports(self, study: str, *, after: int = 0) -> list[tuple[int, ReportRecord]]:
        """All reports of a study after a position, each with its position, in order of writing."""
        of = {"of_study": study, "of_position": after}
        with self._database.reading() as connection:
            return [
                (position, report_of(study, found, at))
                for position, at, *found in connection.execute(sql.LATER_REPORTS, of)
            ]

    def last_values(self, study: str) -> dict[int, float]:
        """The last value of every curve of ``load_curves``."""
        with self._database.reading() as connection:
            found = connection.execute(sql.LAST_VALUES, {"of_study": study})
            return {number: value_of(value, word) for number, value, word in found}

    def last_epoch(self) -> int:
        """The highest epoch this ledger has held, 0 for a new one."""
        with self._database.reading() as connection:
            return last_epoch(connection)

    def commit_lease(self, lease: LeaseRecord, *, limit: int | None = None) -> None:
        """Write a new lease."""
        with self._turn() as connection:
            last = last_epoch(connection)
            if lease.epoch <= last:
                raise StaleEpochError(
                    f"A lease's epoch must be above every earlier one, which is {last}, but got "
                    f"{lease.epoch}. Another broker was faster: read last_epoch() again and decide "
                    "anew."
                )
            if lease.number is not None:
                check_owner(connection, lease.study, lease.number, lease.owner)
            elif limit is not None and (known := known_trials(connection, lease.study)) >= limit:
                raise StudyFullError(
                    f"Study {lease.study} shall have at most {limit} trials, and has {known} with "
                    "those that other leases are for. Open no further trial, unless one of these "
                    "leases ends without."
                )
            connection.execute(sql.ADD_LEASE, row(lease))

    def name_lease(self, epoch: int, number: int) -> None:
        """Set the trial of a lease granted before it existed; an unknown epoch is no error."""
        with self._database.writing() as connection:
            connection.execute(sql.CHANGE_LEASE, {"of_epoch": epoch, "number": number})

    def end_lease(self, epoch: int, ended: float) -> None:
        """End a lease; one that has ended already, or is unknown, stays as it is."""
        with self._database.writing() as connection:
            connection.execute(sql.END_LEASE, {"of_epoch": epoch, "ended": ended})

    def load_leases(
        self, study: str | None = None, *, live: bool = False, since: int = 0
    ) -> list[LeaseRecord]:
        """Leases of a study (or of all), by epoch; optionally only live or recent ones."""
        query = sql.leases(of_study=study is not None, live=live, since=since > 0)
        of = {"of_study": study, "of_epoch": since}
        return [LeaseRecord(**with_lists(found)) for found in self._database.rows(query, of)]

    def save_checkpoint(self, record: CheckpointRecord) -> None:
        """Add a checkpoint; the trial's older ones stay until ``drop_checkpoint``."""
        columns = row(record.checkpoint)
        columns |= {"study": record.study, "number": record.number, "at": record.at}
        self._add(sql.ADD_CHECKPOINT, columns)

    def load_checkpoints(self, study: str, number: int | None = None) -> list[CheckpointRecord]:
        """Checkpoints of a study, or of one trial, in the order they were saved."""
        query = sql.checkpoints(of_trial=number is not None)
        of = {"of_study": study, "of_number": number}
        return [checkpoint_of(study, found) for found in self._database.rows(query, of)]

    def drop_checkpoint(self, study: str, path: str) -> None:
        """Remove the row of a checkpoint whose file is gone; an unknown one is no error."""
        with self._database.writing() as connection:
            connection.execute(sql.DROP_CHECKPOINT, {"of_study": study, "of_path": path})

    def load_memory(self, study: str) -> Any:
        """The policy's memory (JSON), None if there is none."""
        with self._database.reading() as connection:
            text = connection.scalar(sql.LOAD_MEMORY, {"of_study": study})
        return None if text is None else json.loads(text)

    def save_memory(self, study: str, memory: Any) -> None:
        """Replace the policy's memory.

        Raises:
            TypeError: the memory is not JSON.
        """
        found = {"study": study, "memory": json.dumps(memory)}
        with self._turn() as connection:
            if not connection.execute(sql.REPLACE_MEMORY, {**found, "of_study": study}).rowcount:
                connection.execute(sql.ADD_MEMORY, found)

    def add_event(self, event: EventRecord) -> None:
        """Add an event to the event log.

        Raises:
            TypeError: the detail is not JSON.
        """
        self._add(sql.ADD_EVENT, {**row(event), "detail": json.dumps(event.detail)})

    def load_events(self, study: str, number: int | None = None) -> list[EventRecord]:
        """The events of a study, or of one trial, in the order of writing."""
        query = sql.load(EVENTS, EventRecord, of_trial=number is not None)
        of = {"of_study": study, "of_number": number}
        return [
            EventRecord(**{**found, "detail": json.loads(found["detail"])})
            for found in self._database.rows(query, of)
        ]

    def trim_events(self, study: str, before: float) -> int:
        """Remove a study's events that are older than a time; return their number."""
        of = {"of_study": study, "of_time": before}
        with self._database.writing() as connection:
            return connection.execute(sql.TRIM_EVENTS, of).rowcount

    def beat(self, host: HostRecord) -> None:
        """Write a broker's heartbeat and load: add its row, or replace it."""
        with self._database.writing() as connection:
            beat(connection, host)

    def load_hosts(self) -> list[HostRecord]:
        """All brokers that have sent a heartbeat and are not forgotten, by name."""
        with self._database.reading() as connection:
            return hosts_of(connection)

    def forget_host(self, instance: str, *, dead_after_seconds: float) -> bool:
        """End the leases of a broker that is gone, and remove its row; its trials are free."""
        with self._turn() as connection:
            return forget_host(connection, instance, dead_after_seconds)

    def load_studies(self) -> list[str]:
        """The keys of all studies with any row in the ledger, in order."""
        with self._database.reading() as connection:
            return sorted(connection.scalars(sql.STUDIES))

    def forget_study(self, study: str) -> None:
        """Remove all rows of a study; epochs still grow above those of its leases."""
        with self._turn() as connection:
            connection.execute(sql.SET_FORGOTTEN_EPOCH, {"forgotten_epoch": last_epoch(connection)})
            for statement in sql.FORGET_STUDY:
                connection.execute(statement, {"of_study": study})

    def close(self) -> None:
        """Close connections and release locks; the ledger is not used afterwards."""
        if self._locks is not None:
            self._locks.close()
        self._database.close()

    @contextmanager
    def _turn(self) -> Iterator[Connection]:
        """A transaction that no other one of this kind runs beside; in a batch the batch.

        So nothing is added between its reading and its writing, and no two batches deadlock.
        """
        first = not self._database.in_batch
        with self._database.writing() as connection:
            if first:
                in_turn(connection)
            yield connection

    def _add(self, statement: Insert, values: Mapping[str, Any]) -> None:
        with self._database.writing() as connection:
            connection.execute(statement, values)


@final
class MemoryLedger(SqlLedger):
    """A ledger in memory, which ends with this object and keeps all other rules: for tests.

    Args:
        clock: seconds of Unix time.
        shared: whether several brokers of a test use it.

    Example:
        >>> ledger = MemoryLedger()
        >>> ledger.last_epoch()
        0
    """

    def __init__(self, clock: Callable[[], float] = time.time, *, shared: bool = False) -> None:
        self._shared = shared
        self._use(Database(MEMORY, clock))
        weakref.finalize(self, self._database.close)

    @property
    def shared(self) -> bool:
        """True if brokers of other hosts may use it too."""
        return self._shared

    def close(self) -> None:
        """Do nothing: the rows last as long as this object."""
