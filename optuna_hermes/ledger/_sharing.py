"""Statements for brokers that share a database: locks, epochs, owners, heartbeats, claims."""

from __future__ import annotations

from typing import Any, cast

from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    delete,
    func,
    insert,
    literal_column,
    or_,
    select,
    update,
)

from optuna_hermes.ledger._claims import not_owner
from optuna_hermes.ledger._records import HostRecord, RunRecord
from optuna_hermes.ledger._rows import all_of, row, with_lists
from optuna_hermes.ledger._schema import CHECKPOINTS, HOSTS, LEASES, RUNS
from optuna_hermes.ledger._statements import EPOCHS, OWNER, TURN

# Unix time of now, not of the transaction's begin, independent of the connection's time zone.
_CLOCKS = {
    "sqlite": "(julianday('now') - 2440587.5) * 86400.0",
    "postgresql": "extract(epoch FROM clock_timestamp())::double precision",
    "mysql": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1000000.0e0",
}


def clock(connection: Connection) -> ColumnElement[float]:
    """Seconds of Unix time by the database's clock."""
    backend = connection.dialect.name
    return literal_column(_CLOCKS["mysql" if backend == "mariadb" else backend])


def skips_locked(connection: Connection) -> bool:
    """True if the database supports SKIP LOCKED."""
    dialect: Any = connection.dialect
    if dialect.name in ("mysql", "mariadb"):
        first = (10, 6) if dialect.is_mariadb else (8, 0, 1)
        return bool(dialect.server_version_info >= first)
    return True  # SQLite locks no rows: there is one writer at a time


def in_turn(connection: Connection) -> None:
    """Lock the row by which transactions of brokers are serialised.

    SQLite has no row locks; there, BEGIN IMMEDIATE has locked the database.
    """
    if connection.dialect.name != "sqlite":
        connection.execute(TURN)


# -- epochs ------------------------------------------------------------------------------------


def last_epoch(connection: Connection) -> int:
    """The highest epoch of all leases, removed ones included."""
    kept, forgotten = connection.execute(EPOCHS).one()
    return max(kept or 0, forgotten or 0)


def known_runs(connection: Connection, study: str) -> int:
    """Number of a study's runs, plus its live leases of trials not created yet."""
    here = RUNS.c.study == study
    runs = select(func.count()).where(here).scalar_subquery()
    same = and_(here, RUNS.c.number == LEASES.c.number)
    further = and_(
        LEASES.c.study == study,
        LEASES.c.ended.is_(None),
        or_(LEASES.c.number.is_(None), ~select(RUNS.c.number).where(same).exists()),
    )
    # One statement: a lease whose run is inserted between two would be counted by neither.
    leases = select(func.count()).select_from(LEASES).where(further).scalar_subquery()
    return cast(int, connection.scalar(select(runs + leases)))


# -- owners ------------------------------------------------------------------------------------


def check_owner(connection: Connection, study: str, number: int, by: str | None) -> None:
    """Check the owner of a run, and lock its row until the end of the transaction.

    Raises:
        NotOwnerError: it has another owner.
    """
    found = connection.execute(OWNER, {"of_study": study, "of_number": number}).first()
    if found is not None and found.owner != by:
        raise not_owner(study, number, found.owner, by)


def locked_run(connection: Connection, study: str, number: int) -> RunRecord | None:
    """Read a run and lock its row; None if it is missing or another transaction has locked it."""
    query = all_of(RUNS, RunRecord).where(RUNS.c.study == study, RUNS.c.number == number)
    query = query.with_for_update(skip_locked=skips_locked(connection))
    found = connection.execute(query).mappings().first()
    return None if found is None else RunRecord(**found)


def has_checkpoint(connection: Connection, study: str, number: int) -> bool:
    """True if a run has a checkpoint to resume from."""
    query = select(CHECKPOINTS.c.id).where(
        CHECKPOINTS.c.study == study, CHECKPOINTS.c.number == number
    )
    return connection.execute(query.limit(1)).first() is not None


def take(connection: Connection, run: RunRecord) -> None:
    """Write the row of a claimed run, and end its live leases."""
    same = and_(RUNS.c.study == run.study, RUNS.c.number == run.number)
    connection.execute(update(RUNS).where(same).values(row(run)))
    held = and_(LEASES.c.study == run.study, LEASES.c.number == run.number)
    _end(connection, held)


# -- hosts -------------------------------------------------------------------------------------


def hosts_of(connection: Connection) -> list[HostRecord]:
    """All brokers, by name."""
    age = (clock(connection) - HOSTS.c.seen).label("age_seconds")
    query = select(
        HOSTS.c.name, HOSTS.c.instance, HOSTS.c.devices, HOSTS.c.load, HOSTS.c.wants, age
    )
    # The database's clock may have been set back, which would give a negative age.
    hosts = [
        HostRecord(**{**with_lists(dict(each)), "age_seconds": max(0.0, each["age_seconds"])})
        for each in connection.execute(query).mappings()
    ]
    return sorted(hosts, key=lambda host: (host.name, host.instance))


def beat(connection: Connection, host: HostRecord) -> None:
    """Add the row of a broker, or replace it."""
    found = row(host)
    del found["age_seconds"]
    found["seen"] = clock(connection)
    same = HOSTS.c.instance == host.instance
    if not connection.execute(update(HOSTS).where(same).values(found)).rowcount:
        connection.execute(insert(HOSTS).values(found))


def forget_host(connection: Connection, instance: str, dead_after_seconds: float) -> bool:
    """Remove a broker and end its leases, if it is gone; return whether it is."""
    in_turn(connection)
    for host in hosts_of(connection):
        if host.instance == instance and host.age_seconds < dead_after_seconds:
            return False
    connection.execute(delete(HOSTS).where(HOSTS.c.instance == instance))
    _end(connection, LEASES.c.owner == instance)
    return True


def _end(connection: Connection, which: ColumnElement[bool]) -> None:
    # A lease that another transaction has locked is being ended by it: waiting could deadlock.
    live = select(LEASES.c.epoch).where(which, LEASES.c.ended.is_(None))
    epochs = connection.scalars(live.with_for_update(skip_locked=skips_locked(connection))).all()
    ended = update(LEASES).where(LEASES.c.epoch.in_(epochs)).values(ended=clock(connection))
    if epochs:
        connection.execute(ended)
