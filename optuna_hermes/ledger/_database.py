"""The ledger's access to a database: transactions, batches, and errors of one line."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from sqlalchemy import Connection, Select, column, inspect, select, table
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from optuna_hermes.errors import LedgerError, LedgerOutageError, first_line
from optuna_hermes.ledger._engine import at_once, connectable, for_writing, parse
from optuna_hermes.ledger._secrets import redacted
from optuna_hermes.ledger._transient import is_outage

_Begin = Callable[[], AbstractContextManager[Connection]]


class Database:
    """A database that is shared between threads, but not across a fork.

    Args:
        url: as SQLAlchemy and Optuna read it.

    Raises:
        LedgerError: the URL cannot be read, or its driver is missing.
    """

    def __init__(self, url: str) -> None:
        parsed = parse(url)
        self.shown = parsed.set(query={}).render_as_string(hide_password=True)
        """The URL without its password."""
        # A file is for one host: SQLite's locks fail on network file systems.
        self.shared = parsed.get_backend_name() != "sqlite"
        """True if processes of other hosts can reach it."""
        self.file = None if self.shared else parsed.database
        """The path of an SQLite file; None for a server."""
        self._url = url
        self._pid = os.getpid()
        self._batch = _Batch()
        try:
            self._engine = connectable(parsed)
        except (ImportError, ArgumentError, ValueError, OSError) as error:
            raise LedgerError(self._failed(error)) from error
        self._reading: _Begin = self._engine.begin
        self._writing: _Begin = for_writing(self._engine).begin
        self._at_once = at_once(self._engine).connect if self.shared else self._writing

    @property
    def file_identity(self) -> tuple[int, int] | None:
        """Device and inode of the file that has the path now; None if there is none."""
        if self.file is None:
            return None
        try:
            found = os.stat(self.file)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def reading(self) -> AbstractContextManager[Connection]:
        """A transaction that reads.

        Raises:
            LedgerError: the database refuses, also a statement inside of the block.
            LedgerOutageError: it cannot be reached, is locked or is full.
        """
        return self._transaction(self._reading)

    def writing(self) -> AbstractContextManager[Connection]:
        """A transaction that writes: this thread's batch, or one that ends with the block.

        Raises:
            LedgerError: as for ``reading``, or a row with the same key is there.
        """
        if self._batch.connection is not None:
            return nullcontext(self._batch.connection)
        return self._transaction(self._writing)

    def at_once(self) -> AbstractContextManager[Connection]:
        """A connection for single statements, which take no BEGIN and no COMMIT on a server.

        Raises:
            LedgerError: as for ``writing``.
        """
        if self._batch.connection is not None:
            return nullcontext(self._batch.connection)
        return self._transaction(self._at_once)

    @contextmanager
    def batch(self, connection: Connection) -> Iterator[None]:
        """Combine all writes of this thread inside of the block into this transaction."""
        before = self._batch.connection, self._batch.changes
        self._batch.connection = connection
        try:
            yield
        finally:
            self._batch.connection, self._batch.changes = before

    def first_change(self) -> bool:
        """True if this thread's batch has no change yet; it has one from now on."""
        first = not (self.in_batch and self._batch.changes)
        self._batch.changes = self.in_batch
        return first

    @property
    def in_batch(self) -> bool:
        """True if writes of this thread are combined into one transaction."""
        return self._batch.connection is not None

    def rows(
        self, query: Select[Any], parameters: Mapping[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """The rows that a query finds, as dictionaries."""
        with self.reading() as connection:
            result = connection.execute(query, parameters)
            names = tuple(result.keys())
            return [dict(zip(names, row, strict=True)) for row in result.all()]

    def has_table(self, name: str) -> bool:
        """True if there is a table of this name, whose ever it is."""
        with self.reading() as connection:
            return inspect(connection).has_table(name)

    def values(self, name: str, columns: Sequence[str], **equal: Any) -> list[tuple[Any, ...]]:
        """Columns of any table, Optuna's too, of the rows that have these values."""
        found = table(name, *map(column, {*columns, *equal}))
        query = select(*(found.c[each] for each in columns))
        query = query.where(*(found.c[each] == value for each, value in equal.items()))
        with self.reading() as connection:
            return [tuple(row) for row in connection.execute(query).all()]

    def close(self) -> None:
        """Close the connections."""
        # After a fork the sockets are shared with the parent: closing them would end its sessions.
        self._engine.dispose(close=os.getpid() == self._pid)

    @contextmanager
    def _transaction(self, begin: _Begin) -> Iterator[Connection]:
        if os.getpid() != self._pid:
            raise LedgerError(
                f"A ledger is used in the process that opened it, {self._pid}, but this is "
                f"{os.getpid()}. Open the ledger again after a fork."
            )
        try:
            # SQLAlchemy raises at commit too, so the whole block is inside of the ``try``.
            with begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            away = is_outage(error)
            if away and self.shared:
                # A server that has become a standby may keep its connections, and the pool would
                # give them out for ever: the next one looks for the primary anew.
                self._engine.dispose(close=True)
            raise (LedgerOutageError if away else LedgerError)(self._failed(error)) from error

    def _failed(self, error: Exception) -> str:
        reason = redacted(first_line(getattr(error, "orig", None) or error), self._url)
        return (
            f"The ledger at {self.shown} cannot be used: {reason.rstrip('.')}. Check its URL, "
            "that the database runs, and that you may write to it."
        )


class _Batch(threading.local):
    """The open transaction of this thread's batch, None outside of one."""

    connection: Connection | None = None
    changes: bool = False
