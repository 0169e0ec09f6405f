"""A ledger in memory for tests, which several brokers may share."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.pool import NullPool

from optuna_hermes.ledger import Ledger
from optuna_hermes.ledger._database import Database, _Batch


class MemoryLedger(Ledger):
    """A ledger in memory that ends with this object, also where a broker has closed it.

    Args:
        clock: seconds of Unix time.
        shared: whether several brokers of a test use it.
    """

    def __init__(self, clock: Callable[[], float] = time.time, *, shared: bool = False) -> None:
        self._database = _MemoryDatabase(clock)
        self._locks = None
        self._file = None
        self._prepare()
        self._shared = shared

    @property
    def shared(self) -> bool:
        """True if brokers of other hosts may use it too."""
        return self._shared

    def close(self) -> None:
        """Do nothing: the rows last as long as this object."""


class _MemoryDatabase(Database):
    """A database in memory: one connection, for one thread at a time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.shown = self._url = "memory:"
        self.file, self.shared = None, False
        self._pid, self._batch = os.getpid(), _Batch()
        self._reading = self._read
        self._writing = self._at_once = self._write
        self._connection = _engine().connect()
        driver = self._connection.connection.driver_connection
        assert driver is not None
        driver.create_function("hermes_now", 0, clock)
        self._driver = driver
        # It may be dropped unclosed, of which SQLAlchemy would warn.
        weakref.finalize(self, self._connection.close)
        self._turn = threading.RLock()

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        with self._turn:
            yield self._connection

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        # By the driver: SQLAlchemy's savepoint takes longer than all that a broker writes in it.
        with self._turn:
            self._driver.execute("SAVEPOINT hermes")
            try:
                yield self._connection
            except BaseException:
                self._driver.execute("ROLLBACK TO hermes")
                raise
            finally:
                self._driver.execute("RELEASE hermes")


@cache
def _engine() -> Engine:
    """The engine of all: a new one would compile every statement again.

    Each of its connections is a database of its own.
    """
    # Left alone, the driver would begin transactions by itself.
    arguments = {"check_same_thread": False, "isolation_level": None}
    return create_engine("sqlite://", poolclass=NullPool, connect_args=arguments)
