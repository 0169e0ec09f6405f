"""The ledger's tables in the user's database, all named ``hermes_*``, and their creation.

There is no foreign key to Optuna's tables: one would make ``optuna.delete_study`` fail. Names and
texts compare byte for byte on MySQL too, whose default collation would take ``a`` for ``A``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Double,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    func,
    insert,
    inspect,
    select,
    text,
)
from sqlalchemy.dialects.mysql import LONGTEXT, VARCHAR

from optuna_hermes.errors import LedgerError
from optuna_hermes.ledger._database import Database
from optuna_hermes.ledger._engine import end_if_silent

SCHEMA_VERSION = 3
"""The version of the tables; a ledger of another version is refused."""

METADATA = MetaData()
"""Metadata of the ledger's tables only, without Optuna's and its ``alembic_version``."""

_LOCK_KEY = 0x6865726D6573
_LOCK_NAME = "CONCAT('hermes:', MD5(DATABASE()))"
_LOCK_TIMEOUT_SECONDS = 60

_MYSQL = ("mysql", "mariadb")
_MYSQL_TEXT = {"charset": "utf8mb4", "collation": "utf8mb4_bin"}

_Integer = BigInteger().with_variant(Integer, "sqlite")  # SQLite's autoincrement needs INTEGER
_Name = String(255).with_variant(VARCHAR(255, **_MYSQL_TEXT), *_MYSQL)
_Word = String(64).with_variant(VARCHAR(64, **_MYSQL_TEXT), *_MYSQL)
_Long = Text().with_variant(LONGTEXT(**_MYSQL_TEXT), *_MYSQL)

SCHEMA = Table(
    "hermes_schema",
    METADATA,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("schema_version", Integer, nullable=False),
    # The highest epoch of removed leases: new epochs must be above it too.
    Column("forgotten_epoch", _Integer),
    # The newest change number (see ``Ledger``), and the one at which rows were last removed.
    Column("last_change", _Integer, nullable=False, server_default="0"),
    Column("forgotten_change", _Integer, nullable=False, server_default="0"),
)

TRIALS = Table(
    "hermes_trials",
    METADATA,
    Column("study", _Name, primary_key=True),
    Column("number", _Integer, primary_key=True, autoincrement=False),
    Column("trial_id", _Integer, nullable=False),
    Column("state", _Word, nullable=False),
    Column("tier", _Word),
    Column("host", _Name),
    Column("owner", _Name),
    Column("units", _Integer, nullable=False),
    Column("slices", _Integer, nullable=False),
    Column("suspensions", _Integer, nullable=False),
    Column("device_seconds", Double, nullable=False),
    Column("energy_joules", Double),
    Column("override", _Word),
    Column("losses", Integer, nullable=False, server_default="0"),
    Column("submitted", Double, nullable=False),
    Column("updated", Double, nullable=False),
    # Number of the last change of this row, or of its checkpoints.
    Column("changed", _Integer, nullable=False, server_default="0"),
    Index("ix_hermes_trials_changed", "study", "changed"),
)

REPORTS = Table(
    "hermes_reports",
    METADATA,
    Column("id", _Integer, primary_key=True),
    Column("study", _Name, nullable=False),
    Column("number", _Integer, nullable=False),
    Column("unit", _Integer, nullable=False),
    Column("step", _Integer, nullable=False),
    # MySQL's DOUBLE cannot be NaN or infinite: such a value is stored as a string in not_finite.
    Column("value", Double),
    Column("not_finite", _Word),
    Column("device_seconds", Double, nullable=False),
    Column("at", Double, nullable=False),
    Index("ix_hermes_reports_trial", "study", "number"),
)

LEASES = Table(
    "hermes_leases",
    METADATA,
    Column("epoch", _Integer, primary_key=True, autoincrement=False),
    Column("study", _Name, nullable=False),
    Column("number", _Integer),
    Column("devices", _Long, nullable=False),
    Column("host", _Name, nullable=False),
    Column("started", Double, nullable=False),
    Column("ended", Double),
    Column("owner", _Name),
    # A study of weeks has a thousand leases that have ended for each that is live.
    Index("ix_hermes_leases_live", "study", "ended"),
)

HOSTS = Table(
    "hermes_hosts",
    METADATA,
    Column("instance", _Name, primary_key=True),
    Column("name", _Name, nullable=False),
    Column("devices", _Long, nullable=False),
    Column("load", Double, nullable=False),
    Column("wants", _Long, nullable=False),
    # Seconds of Unix time, by the clock of the database.
    Column("seen", Double, nullable=False),
)

CHECKPOINTS = Table(
    "hermes_checkpoints",
    METADATA,
    Column("id", _Integer, primary_key=True),
    Column("study", _Name, nullable=False),
    Column("number", _Integer, nullable=False),
    Column("path", _Long, nullable=False),
    Column("units", _Integer, nullable=False),
    Column("size_bytes", _Integer, nullable=False),
    Column("sha256", _Word, nullable=False),
    Column("at", Double, nullable=False),
    Index("ix_hermes_checkpoints_trial", "study", "number"),
)

MEMORY = Table(
    "hermes_memory",
    METADATA,
    Column("study", _Name, primary_key=True),
    Column("memory", _Long, nullable=False),
)

EVENTS = Table(
    "hermes_events",
    METADATA,
    Column("id", _Integer, primary_key=True),
    Column("study", _Name, nullable=False),
    Column("number", _Integer),
    Column("kind", _Name, nullable=False),
    Column("at", Double, nullable=False),
    Column("detail", _Long, nullable=False),
    Index("ix_hermes_events_trial", "study", "number"),
)

OF_STUDIES = (TRIALS, REPORTS, LEASES, CHECKPOINTS, MEMORY, EVENTS)
"""Tables whose rows each belong to one study, by their column ``study``."""


def create_tables(database: Database) -> None:
    """Create the tables of a new ledger, or those that are missing without a version.

    Raises:
        LedgerError: the ledger is of another version, or the database refuses.
    """
    # Read without a lock first: at most starts the tables are complete.
    with database.reading() as connection:
        version = _version(connection)
    if version is None:
        with database.writing() as connection, _alone(connection):
            version = _version(connection)  # another process may just have done it
            if version is None:
                # Some may exist: the process that made them died before the last statement.
                METADATA.create_all(connection)
                connection.execute(insert(SCHEMA).values(id=1, schema_version=SCHEMA_VERSION))
                return
    if version != SCHEMA_VERSION:
        raise LedgerError(
            f"A ledger's schema_version must be {SCHEMA_VERSION} but got {version} at "
            f"{database.shown}. Use the optuna-hermes that made it, or give the ledger another "
            "database."
        )


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


def knows(database: Database, study: str) -> bool:
    """True if a database has the ledger of a study, by its key; reads only.

    Raises:
        LedgerError: the database cannot be read.
    """
    with database.reading() as connection:
        if _version(connection) is None:
            return False
        rows = (select(each.c.study).where(each.c.study == study) for each in (MEMORY, TRIALS))
        return any(connection.scalar(query.limit(1)) is not None for query in rows)


def _version(connection: Connection) -> int | None:
    """The version of the tables, None if they are missing or incomplete."""
    if not inspect(connection).has_table(SCHEMA.name):
        return None
    return connection.scalar(select(SCHEMA.c.schema_version))


@contextmanager
def _alone(connection: Connection) -> Iterator[None]:
    """Hold the lock under which one process at a time changes the tables."""
    backend = connection.dialect.name
    if backend == "postgresql":
        connection.execute(select(end_if_silent(), func.pg_advisory_xact_lock(_LOCK_KEY)))
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
