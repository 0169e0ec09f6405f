"""The ledger's access to a database: transactions, batches, and errors of one line."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

from sqlalchemy import URL, Connection, Engine, Select, column, select, table
from sqlalchemy.exc import ArgumentError, IntegrityError, SQLAlchemyError

from optuna_hermes.errors import LedgerAwayError, LedgerError
from optuna_hermes.ledger._away import is_away
from optuna_hermes.ledger._engine import connectable, for_writing, parse
from optuna_hermes.ledger._secrets import redacted


class ConflictError(LedgerError):
    """The database refused a row because another one has its key."""


@final
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
        self._url = url
        self._pid = os.getpid()
        self._engine = self._connectable(parsed)
        self._writer = for_writing(self._engine)
        self._batch = _Batch()

    @property
    def file(self) -> str | None:
        """The path of an SQLite file, which hosts do not share; None for a server."""
        return self._engine.url.database if self._engine.dialect.name == "sqlite" else None

    def reading(self) -> AbstractContextManager[Connection]:
        """A transaction that reads.

        Raises:
            LedgerError: the database refuses, also a statement inside of the block.
            LedgerAwayError: it cannot be reached, is locked or is full.
        """
        return self._transaction(self._engine)

    def writing(self) -> AbstractContextManager[Connection]:
        """A transaction that writes: this thread's batch, or one that ends with the block.

        Raises:
            ConflictError: a row with the same key is there.
            LedgerError: as for ``reading``.
        """
        if self._batch.connection is not None:
            return nullcontext(self._batch.connection)
        return self._transaction(self._writer)

    @contextmanager
    def batch(self) -> Iterator[Connection]:
        """One transaction for all writes of this thread inside of the block."""
        with self.writing() as connection:
            self._batch.connection = connection
            try:
                yield connection
            finally:
                self._batch.connection = None

    def rows(self, query: Select[Any]) -> list[dict[str, Any]]:
        """The rows that a query finds, as dictionaries."""
        with self.reading() as connection:
            result = connection.execute(query)
            names = tuple(result.keys())
            return [dict(zip(names, row, strict=True)) for row in result.all()]

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
    def _transaction(self, engine: Engine) -> Iterator[Connection]:
        if os.getpid() != self._pid:
            raise LedgerError(
                f"A ledger is used in the process that opened it, {self._pid}, but this is "
                f"{os.getpid()}. Open the ledger again after a fork."
            )
        try:
            # SQLAlchemy raises at commit too, so the whole block is inside of the ``try``.
            with engine.begin() as connection:
                yield connection
        except IntegrityError as error:
            raise ConflictError(self._failed(error)) from error
        except SQLAlchemyError as error:
            kind = LedgerAwayError if is_away(error) else LedgerError
            raise kind(self._failed(error)) from error

    def _failed(self, error: Exception) -> str:
        reason = redacted(_first_line(getattr(error, "orig", None) or error), self._url)
        return (
            f"The ledger at {self.shown} cannot be used: {reason.rstrip('.')}. Check its URL, "
            "that the database runs, and that you may write to it."
        )

    def _connectable(self, url: URL) -> Engine:
        try:
            return connectable(url)
        except (ImportError, ArgumentError, OSError) as error:
            raise LedgerError(self._failed(error)) from error


class _Batch(threading.local):
    """The open transaction of this thread's batch, None outside of one."""

    connection: Connection | None = None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
