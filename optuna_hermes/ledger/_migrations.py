"""Creation of the ledger's tables, and migration of those of an earlier version.

``STEPS[n]`` takes a ledger from version n + 1 to version n + 2. A step adds missing columns and
leaves existing ones: where a database cannot change tables inside of a transaction (MySQL) a
process may be killed in the middle of a step, and the next process repeats it from its start.
Steps only add, so that a running process of an earlier version can go on writing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Column, Connection, func, insert, inspect, select, text, update
from sqlalchemy.schema import CreateColumn

from optuna_hermes.errors import LedgerError
from optuna_hermes.ledger._database import Database
from optuna_hermes.ledger._schema import HOSTS, LEASES, METADATA, RUNS, SCHEMA

_LOCK_KEY = 0x6865726D6573
_LOCK_NAME = "CONCAT('hermes:', MD5(DATABASE()))"
_LOCK_TIMEOUT_SECONDS = 60


def _owners_and_hosts(connection: Connection) -> None:
    """Version 2: several brokers share a study."""
    HOSTS.create(connection, checkfirst=True)
    for column in (SCHEMA.c.forgotten_epoch, RUNS.c.owner, LEASES.c.owner):
        _add(connection, column)


def _energy(connection: Connection) -> None:
    """Version 3: energy that a run's devices used."""
    _add(connection, RUNS.c.energy_joules)


def _wishes(connection: Connection) -> None:
    """Version 4: users' overrides of single runs."""
    _add(connection, RUNS.c.wish)


def _losses(connection: Connection) -> None:
    """Version 5: number of processes that a run has lost."""
    _add(connection, RUNS.c.losses)


STEPS: tuple[Callable[[Connection], None], ...] = (_owners_and_hosts, _energy, _wishes, _losses)

SCHEMA_VERSION = 1 + len(STEPS)
"""The version of the tables; a ledger of a later version is refused."""


def bring_up(database: Database) -> None:
    """Create the tables of a new ledger, or migrate those of an earlier version to this one.

    Raises:
        LedgerError: the ledger is of a later version, or the database refuses.
    """
    # Read without a lock first: at most starts the tables are complete.
    with database.reading() as connection:
        version = _version(connection)
    if _needs_work(version, database):
        with database.writing() as connection, _alone(connection):
            version = _version(connection)  # another process may just have done it
            if _needs_work(version, database):
                _bring_up(connection, version)


def schema_version(url: str) -> int | None:
    """The version of the ledger's tables in a database, None if they are not there; reads only.

    Args:
        url: a database URL as for SQLAlchemy and Optuna.

    Raises:
        LedgerError: the database cannot be read.
    """
    database = Database(url)
    try:
        with database.reading() as connection:
            return _version(connection)
    finally:
        database.close()


def _needs_work(version: int | None, database: Database) -> bool:
    if version is not None and version > SCHEMA_VERSION:
        raise LedgerError(
            f"A ledger's schema_version must be at most {SCHEMA_VERSION} but got {version} at "
            f"{database.shown}. Upgrade optuna-hermes, or give the ledger another database."
        )
    return version != SCHEMA_VERSION


def _bring_up(connection: Connection, version: int | None) -> None:
    """Create missing tables and columns, and store the version.
    Without a version some tables may exist, of any version: their process died before the last
    statement, which stores it.
    """
    METADATA.create_all(connection)
    for step in STEPS[(version or 1) - 1 :]:
        step(connection)
    if version is None:
        connection.execute(insert(SCHEMA).values(id=1, schema_version=SCHEMA_VERSION))
    else:
        connection.execute(update(SCHEMA).values(schema_version=SCHEMA_VERSION))


def _version(connection: Connection) -> int | None:
    """The version of the tables, None if they are missing or incomplete."""
    if not inspect(connection).has_table(SCHEMA.name):
        return None
    return connection.scalar(select(SCHEMA.c.schema_version))


def _add(connection: Connection, column: Column[Any]) -> None:
    """Add a column to its table, unless it exists."""
    table = column.table.name
    if column.name not in {known["name"] for known in inspect(connection).get_columns(table)}:
        described = CreateColumn(column).compile(dialect=connection.dialect)
        connection.execute(text(f"ALTER TABLE {table} ADD COLUMN {described}"))


@contextmanager
def _alone(connection: Connection) -> Iterator[None]:
    """Hold the lock under which one process at a time changes the tables."""
    backend = connection.dialect.name
    if backend == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_LOCK_KEY)))
    if backend not in ("mysql", "mariadb"):  # SQLite: the transaction has locked the database
        yield
        return
    # DDL commits MySQL's transaction and frees its row locks; a named lock stays.
    if not connection.scalar(text(f"SELECT GET_LOCK({_LOCK_NAME}, {_LOCK_TIMEOUT_SECONDS})")):
        raise LedgerError(
            f"The ledger's tables must be changed by one process at a time but another has been "
            f"at it for {_LOCK_TIMEOUT_SECONDS} s. Try again when it has ended."
        )
    try:
        yield
        connection.execute(text("COMMIT"))  # the next process must see it
    finally:
        connection.execute(text(f"SELECT RELEASE_LOCK({_LOCK_NAME})"))
