"""The ledger: what has to outlive every process, in tables of its own beside Optuna's.

It creates ``hermes_*`` tables in the user's database (SQLite, PostgreSQL, MySQL, MariaDB; through
SQLAlchemy), and changes nothing else there. Its contract:

- A method returns only when its effect is durable and visible to other processes.
- Inside of ``batch`` all this holds at the end of the block: all writes of the thread in it become
  durable and visible together, or, if anything fails, none.
- Epochs of leases only grow.
- Records are loaded as they were saved, NaN and infinite values included.
- A study is identified by its key, not its name: a study that was deleted and created again under
  the same name has another key.

Brokers of several hosts may share a study. Each has a name that no broker had before, its
*instance*, and sends heartbeats with ``beat``.

- A trial belongs to one broker, its ``owner``, or has none. A broker gives a trial back by saving
  it with ``owner=None``; one on its own claims nothing and leaves every owner None.
- ``claim_trial`` alone gives an existing trial to another owner. It takes a waiting trial (pending
  or stored) without an owner, and any unfinished trial whose holder is gone. Of several brokers
  that claim a trial at the same time one wins.
- A lease that is ended for a broker that is gone ends at its trial's last report.
- The holder of a trial is its owner; of a trial without one that is running or parked, its host. An
  owner is gone if it is unknown or forgotten, or its heartbeat is old enough. A host is gone if
  all of its brokers are.
- Transactions that change trials, leases or checkpoints take turns, and each has a higher *change
  number* than the one before; reports, events and memory have none. Whoever has read all changes up
  to a number finds the later ones by it, and misses none that is committed later.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import Connection, UpdateBase

from optuna_hermes.errors import StaleEpochError, StudyFullError
from optuna_hermes.ledger import _ownership as sharing
from optuna_hermes.ledger import _statements as sql
from optuna_hermes.ledger._database import Database
from optuna_hermes.ledger._locks import StudyLocks
from optuna_hermes.ledger._records import (
    DEAD_SECONDS,
    MOST_NUMBERS,
    ChangeMark,
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
    step_values_of,
    with_lists,
)
from optuna_hermes.ledger._schema import EVENTS, TRIALS, create_tables
from optuna_hermes.model import Curve, Override

T = TypeVar("T")

_BY_HOST = "by_host"


class Ledger:
    """Durable store of a study's schedule, under the rules at the top of this file.

    It is safe to share between threads. A forked process has to open its own.

    Args:
        url: as for ``open_ledger``. A file of SQLite is created if it is missing, with its folder,
            which only its user may read.

    Raises:
        LedgerError: the database cannot be reached, or holds a ledger of another version.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ledger = Ledger(f"sqlite:///{folder}/ledger.db")
        ...     epoch = ledger.last_epoch()
        ...     ledger.close()
        >>> epoch
        0
    """

    def __init__(self, url: str) -> None:
        self._database = Database(url)
        self._locks = StudyLocks(self._database.file) if self._database.file else None
        self._file: tuple[int, int] | None = None
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        """Text with the URL but without its password."""
        return f"Ledger({self._database.shown!r})"

    @property
    def shared(self) -> bool:
        """True if brokers of other hosts may use it too."""
        return self._database.shared

    def reopen(self) -> None:
        """Open the file again if it is not the one that was opened: it was deleted and made anew.

        Raises:
            LedgerError: as for a new ledger.
        """
        if self._file != self._database.file_identity:
            self._database.close()
            self._prepare()

    def lock_study(self, study: str) -> None:
        """Lock a study against brokers of other processes, where they cannot share it.

        Raises:
            LedgerError: another process has it.
        """
        if self._locks is not None:
            self._locks.lock(study)

    def is_locked(self, study: str, wait_seconds: float = 0.0) -> bool:
        """True if a broker of another process has locked a study, and keeps it for so long."""
        return self._locks is not None and self._locks.is_locked(study, wait_seconds)

    def unlock_study(self, study: str) -> None:
        """Unlock a study; ``close`` does the same for all."""
        if self._locks is not None:
            self._locks.unlock(study)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Combine all writes of this thread inside of the block into one transaction."""
        with self._turn() as connection, self._database.batch(connection):
            yield

    def save_trial(self, trial: TrialRecord, *, by: str | None = None) -> None:
        """Add the row of this study and number, or replace it.

        Args:
            trial: the trial, with its owner from now on.
            by: its owner until now.

        Raises:
            NotOwnerError: its row has another owner.
        """
        with self._change() as connection:
            sharing.save_trial(connection, trial, by)

    def claim_trial(
        self, study: str, number: int, *, host: str, instance: str, dead_after_seconds: float
    ) -> TrialRecord | None:
        """Claim a trial for a broker, if it has no owner or its holder is gone.

        A trial that was taken from its holder is stored, or pending if it has no checkpoint, and
        its leases have ended.

        Args:
            host, instance: the broker's host, and the broker, which has called ``beat``.
            dead_after_seconds: age of a holder's heartbeat from which it is gone.

        Returns:
            The trial as it is now, also if it was this broker's before. None if the claim failed:
            the trial is unknown, finished or another's.
        """
        with self._change() as connection:
            return sharing.claim(connection, study, number, host, instance, dead_after_seconds)

    def load_trials(self, study: str) -> list[TrialRecord]:
        """All trials of a study, by number."""
        found = self._database.rows(sql.load(TRIALS, TrialRecord), {"of_study": study})
        return [TrialRecord(**each) for each in found]

    def load_changed(
        self, study: str, after: int, numbers: Collection[int] = ()
    ) -> list[tuple[Override | None, TrialRecord]]:
        """The trials that were changed after a change number, each after its user's override.

        A trial is changed by any write of its row or its checkpoints.

        Args:
            after: a number that ``change_mark`` has returned; 0 for all trials.
            numbers: trials that are wanted too, changed or not.
        """
        found = self._database.rows(sql.CHANGED_TRIALS, {"of_study": study, "of_change": after})
        others = sorted({*numbers}.difference(each["number"] for each in found))
        if others:
            of = {"of_study": study, "of_numbers": others}
            found += self._database.rows(sql.SOME_TRIALS, of)
        return [(each.pop("override"), TrialRecord(**each)) for each in found]

    def save_override(self, study: str, number: int, override: Override | None) -> None:
        """Save a user's override of a trial, None to remove it; an unknown trial is no error.

        It does not depend on the trial's owner, and ``save_trial`` leaves it as it is.
        """
        of = {"of_study": study, "of_number": number}
        with self._change() as connection:
            connection.execute(sql.CHANGE_TRIAL, {"override": override, **of})

    def load_overrides(self, study: str) -> dict[int, Override]:
        """The users' overrides of a study's trials, by number; also of trials that are over."""
        found = self._database.rows(sql.OVERRIDES, {"of_study": study})
        return {each["number"]: each["override"] for each in found}

    def add_report(self, report: ReportRecord) -> None:
        """Add a report; earlier ones of the same unit, and of later ones, stay."""
        # A unit is trained a second time after a crash: reports are the history of both.
        self._write(sql.ADD_REPORT, {**row(report), **number_or_word(report.value)})

    def load_curves(self, study: str, numbers: Collection[int] | None = None) -> dict[int, Curve]:
        """The curves of all trials that have reported (or of these); see ``curves_of``."""
        return self._of_reports(curves_of, study, numbers)

    def load_step_values(
        self, study: str, numbers: Collection[int]
    ) -> dict[int, dict[int, float | None]]:
        """The value of each step of these trials, None if it is in no curve any more."""
        return self._of_reports(step_values_of, study, numbers)

    def _of_reports(
        self,
        read: Callable[[Iterable[Sequence[Any]]], dict[int, T]],
        study: str,
        numbers: Collection[int] | None,
    ) -> dict[int, T]:
        """Read the reports of all trials, or of these, by the trials' numbers."""
        if numbers is not None and len(numbers) > MOST_NUMBERS:
            some, found = set(numbers), self._of_reports(read, study, None)
            return {number: each for number, each in found.items() if number in some}
        query = sql.CURVES if numbers is None else sql.SOME_CURVES
        with self._database.reading() as connection:
            of = {"of_study": study, "of_numbers": list(numbers or ())}
            return read(connection.execute(query, of))

    def load_reports(self, study: str, *, after: int = 0) -> list[tuple[int, ReportRecord]]:
        """All reports of a study after a position, each with its position.

        Positions grow in the order in which batches were written: a reader that goes on from the
        last one it read misses nothing.
        """
        of = {"of_study": study, "of_position": after}
        found = self._database.rows(sql.LATER_REPORTS, of)
        return [(each.pop("id"), report_of(study, each)) for each in found]

    def last_epoch(self) -> int:
        """The highest epoch this ledger holds, 0 for an empty one."""
        with self._database.reading() as connection:
            return sharing.last_epoch(connection)

    def commit_lease(self, lease: LeaseRecord, *, limit: int | None = None) -> None:
        """Write a new lease.

        Args:
            lease: the lease; its owner is that of its trial.
            limit: the most trials of the study, over all hosts, None for no bound. It is checked
                for the lease of a new trial.

        Raises:
            StaleEpochError: its epoch is not above every earlier one.
            NotOwnerError: its trial has another owner.
            StudyFullError: the trials of the study, and the live leases of trials not yet created,
                have reached the limit.
        """
        with self._change() as connection:
            last = sharing.last_epoch(connection)
            # Of two brokers that race for one device only one passes.
            if lease.epoch <= last:
                raise StaleEpochError(
                    f"A lease's epoch must be above every earlier one, which is {last}, but got "
                    f"{lease.epoch}. Another broker was faster: read last_epoch() again and decide "
                    "anew."
                )
            if lease.number is not None:
                sharing.check_owner(connection, lease.study, lease.number, lease.owner)
            elif limit is not None:
                known = connection.execute(sql.KNOWN_TRIALS, {"of_study": lease.study}).scalar_one()
                if known >= limit:
                    raise StudyFullError(
                        f"Study {lease.study} shall have at most {limit} trials, and has {known} "
                        "with those that other leases are for. Open no further trial, unless one "
                        "of these leases ends without."
                    )
            connection.execute(sql.ADD_LEASE, row(lease))

    def name_lease(self, epoch: int, number: int) -> None:
        """Set the trial of a lease that was granted before its trial was created."""
        with self._change() as connection:
            connection.execute(sql.CHANGE_LEASE, {"of_epoch": epoch, "number": number})

    def end_lease(self, epoch: int, ended: float | None) -> None:
        """End a lease at a Unix time; one that has ended already, or is unknown, stays as it is.

        With None, if nobody saw it end, that is when its trial reported last, or when it began.
        """
        with self._change() as connection:
            if ended is None:
                connection.execute(sql.END_LOST_LEASE, {"of_epoch": epoch})
            else:
                connection.execute(sql.END_LEASE, {"of_epoch": epoch, "ended": ended})

    def load_leases(
        self, study: str | None = None, *, live: bool = False, since: int = 0
    ) -> list[LeaseRecord]:
        """Leases by epoch.

        Args:
            study: the study's key, None for all studies.
            live: only leases that have not ended.
            since: only leases of this epoch and later ones.
        """
        query = sql.leases(of_study=study is not None, live=live, since=since > 0)
        of = {"of_study": study, "of_epoch": since}
        return [LeaseRecord(**with_lists(found)) for found in self._database.rows(query, of)]

    def save_checkpoint(self, record: CheckpointRecord) -> None:
        """Add a checkpoint; the trial's older ones stay until ``drop_checkpoint``."""
        columns = row(record.checkpoint)
        columns |= {"study": record.study, "number": record.number, "at": record.at}
        with self._change() as connection:
            connection.execute(sql.ADD_CHECKPOINT, columns)
            of = {"of_study": record.study, "of_number": record.number}
            connection.execute(sql.CHANGE_TRIAL, of)

    def load_checkpoints(
        self, study: str, numbers: Collection[int] | None = None
    ) -> list[CheckpointRecord]:
        """Checkpoints of all trials of a study, or of these, oldest first."""
        of = {"of_study": study, "of_numbers": list(numbers or ())}
        query = sql.CHECKPOINTS_OF_STUDY if numbers is None else sql.SOME_CHECKPOINTS
        return [checkpoint_of(study, found) for found in self._database.rows(query, of)]

    def drop_checkpoint(self, study: str, number: int, path: str) -> None:
        """Remove the row of a trial's checkpoint whose file is gone; an unknown one is no error."""
        of = {"of_study": study, "of_number": number}
        with self._change() as connection:
            connection.execute(sql.DROP_CHECKPOINT, {**of, "of_path": path})
            connection.execute(sql.CHANGE_TRIAL, of)

    def load_memory(self, study: str, host: str = "") -> Any:
        """The memory (JSON) of the study's policy on a host, None if there is none.

        Hosts that share a study have a memory each: each policy decides about devices of its own.
        """
        with self._database.reading() as connection:
            return _memories(connection, study).get(host)

    def save_memory(self, study: str, memory: Any, host: str = "") -> None:
        """Replace the memory of the study's policy on a host."""
        with self._turn() as connection:
            memories = {**_memories(connection, study), host: memory}
            found = {"study": study, "memory": json.dumps({_BY_HOST: memories})}
            if not connection.execute(sql.REPLACE_MEMORY, {**found, "of_study": study}).rowcount:
                connection.execute(sql.ADD_MEMORY, found)

    def add_study(self, study: str) -> None:
        """Let the ledger know a study's key before it has any other row."""
        self.save_memory(study, None)

    def add_event(self, event: EventRecord) -> None:
        """Add an event to the event log."""
        self._write(sql.ADD_EVENT, {**row(event), "detail": json.dumps(event.detail)})

    def load_events(self, study: str, number: int | None = None) -> list[EventRecord]:
        """The events of a study, or of one trial, oldest first."""
        query = sql.load(EVENTS, EventRecord, of_trial=number is not None)
        of = {"of_study": study, "of_number": number}
        return [
            EventRecord(**{**found, "detail": json.loads(found["detail"])})
            for found in self._database.rows(query, of)
        ]

    def first_events(self, study: str) -> dict[int, float]:
        """The time of each trial's first event, by number."""
        found = self._database.rows(sql.FIRST_EVENTS, {"of_study": study})
        return {each["number"]: each["at"] for each in found}

    def count_events(self, study: str, before: float) -> int:
        """The number of a study's events that are older than a time."""
        with self._database.reading() as connection:
            of = {"of_study": study, "of_time": before}
            return int(connection.execute(sql.COUNT_EVENTS, of).scalar_one())

    def trim_events(self, study: str, before: float) -> int:
        """Remove a study's events that are older than a time; return their number."""
        return self._write(sql.TRIM_EVENTS, {"of_study": study, "of_time": before})

    def beat(self, host: HostRecord) -> None:
        """Write a broker's heartbeat and load: add its row, or replace it."""
        with self._database.at_once() as connection:
            sharing.beat(connection, host)

    def change_mark(self, beat: HostRecord | None = None) -> ChangeMark:
        """The newest change number, and all brokers, by one statement.

        Before, on the same connection, a broker's heartbeat ``beat`` is written, if one is given.
        """
        with self._database.at_once() as connection:
            if beat is not None:
                sharing.beat(connection, beat)
            return sharing.change_mark(connection)

    def load_hosts(self) -> list[HostRecord]:
        """All brokers that have sent a heartbeat and are not forgotten, by name."""
        with self._database.reading() as connection:
            return sharing.hosts_of(connection)

    def forget_host(self, instance: str, *, dead_after_seconds: float) -> bool:
        """End the leases of a broker that is gone, and remove its row; its trials can be claimed.

        Args:
            instance: the broker; one that shuts down in order forgets itself.
            dead_after_seconds: least age of its heartbeat, 0.0 for any.

        Returns:
            True if it is gone.
        """
        with self._change() as connection:
            return sharing.forget_host(connection, instance, dead_after_seconds)

    def load_studies(self) -> list[str]:
        """The keys of all studies with any row in the ledger, in order."""
        with self._database.reading() as connection:
            return sorted(connection.scalars(sql.STUDIES))

    def forget_study(self, study: str) -> None:
        """Remove all rows of a study; epochs still grow above those of its leases."""
        with self._change() as connection:
            last = sharing.last_epoch(connection)
            connection.execute(sql.FORGET_ROWS, {"forgotten_epoch": last})
            for statement in sql.FORGET_STUDY:
                connection.execute(statement, {"of_study": study})

    def disconnect(self) -> None:
        """Close the connections to a server; the next call opens one."""
        if self.shared:
            self._database.close()

    def close(self) -> None:
        """Close connections, of which the next call opens one, and release locks."""
        if self._locks is not None:
            self._locks.close()
        self._database.close()

    def _prepare(self) -> None:
        create_tables(self._database)
        self._file = self._database.file_identity

    @contextmanager
    def _turn(self) -> Iterator[Connection]:
        """A transaction that no other one of this kind runs beside; in a batch the batch."""
        # So nothing is added between its reading and its writing, and no two batches deadlock.
        first = not self._database.in_batch
        with self._database.writing() as connection:
            if first:
                sharing.in_turn(connection)
            yield connection

    @contextmanager
    def _change(self) -> Iterator[Connection]:
        """A turn with a change number, which is that of all trials written in it."""
        with self._turn() as connection:
            if self._database.first_change():
                connection.execute(sql.NEXT_CHANGE)
            yield connection

    def _write(self, statement: UpdateBase, values: Mapping[str, Any]) -> int:
        """Execute a statement in a transaction or the batch; return the number of its rows."""
        with self._database.writing() as connection:
            return connection.execute(statement, values).rowcount


def live_hosts(ledger: Ledger) -> list[HostRecord]:
    """The brokers that share a ledger and whose last heartbeat is under ``DEAD_SECONDS`` old."""
    return [host for host in ledger.load_hosts() if host.age_seconds < DEAD_SECONDS]


def _memories(connection: Connection, study: str) -> dict[str, Any]:
    """The memories of a study's policy, by host."""
    text = connection.scalar(sql.LOAD_MEMORY, {"of_study": study})
    return {} if text is None else dict(json.loads(text)[_BY_HOST])
