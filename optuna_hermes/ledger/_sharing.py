"""What brokers that share a database ask of it: turns, owners, hosts, claims."""

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

# Unix time now, not when the transaction began, and whatever the time zone of the connection is.
_CLOCKS = {
    "sqlite": "(julianday('now') - 2440587.5) * 86400.0",
    "postgresql": "extract(epoch FROM clock_timestamp())::double precision",
    "mysql": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1000000.0e0",
}


def clock(connection: Connection) -> ColumnElement[float]:
    """Seconds of Unix time as the database sees it."""
    backend = connection.dialect.name
    return literal_column(_CLOCKS["mysql" if backend == "mariadb" else backend])


def skips_locked(connection: Connection) -> bool:
    """Whether the database can leave out rows that another transaction has locked."""
    dialect: Any = connection.dialect
    if dialect.name in ("mysql", "mariadb"):
        first = (10, 6) if dialect.is_mariadb else (8, 0, 1)
        return bool(dialect.server_version_info >= first)
    return True  # SQLite locks no rows: who may write is alone


def in_turn(connection: Connection) -> None:
    """Wait for every other transaction that was here, and make the next ones wait.

    SQLite has no row locks; there, BEGIN IMMEDIATE has locked the database.
    """
    if connection.dialect.name != "sqlite":
        connection.execute(TURN)


# -- epochs ------------------------------------------------------------------------------------


def last_epoch(connection: Connection) -> int:
    """The highest epoch there was."""
    kept, forgotten = connection.execute(EPOCHS).one()
    return max(kept or 0, forgotten or 0)


def known_runs(connection: Connection, study: str) -> int:
    """Runs of a study, and live leases from which further ones will come."""
    here = RUNS.c.study == study
    runs = select(func.count()).where(here).scalar_subquery()
    same = and_(here, RUNS.c.number == LEASES.c.number)
    further = and_(
        LEASES.c.study == study,
        LEASES.c.ended.is_(None),
        or_(LEASES.c.number.is_(None), ~select(RUNS.c.number).where(same).exists()),
    )
    # One statement: a lease that becomes a run between two would be in neither.
    leases = select(func.count()).select_from(LEASES).where(further).scalar_subquery()
    return cast(int, connection.scalar(select(runs + leases)))


# -- owners ------------------------------------------------------------------------------------


def check_owner(connection: Connection, study: str, number: int, by: str | None) -> None:
    """Keep a run with its owner until the end of the transaction.

    Raises:
        NotOwnerError: it has another.
    """
    found = connection.execute(OWNER, {"of_study": study, "of_number": number}).first()
    if found is not None and found.owner != by:
        raise not_owner(study, number, found.owner, by)


def locked_run(connection: Connection, study: str, number: int) -> RunRecord | None:
    """A run that nobody else writes before the end of the transaction; None if somebody does."""
    query = all_of(RUNS, RunRecord).where(RUNS.c.study == study, RUNS.c.number == number)
    query = query.with_for_update(skip_locked=skips_locked(connection))
    found = connection.execute(query).mappings().first()
    return None if found is None else RunRecord(**found)


def has_checkpoint(connection: Connection, study: str, number: int) -> bool:
    """Whether a run can be carried on."""
    query = select(CHECKPOINTS.c.id).where(
        CHECKPOINTS.c.study == study, CHECKPOINTS.c.number == number
    )
    return connection.execute(query.limit(1)).first() is not None


def take(connection: Connection, run: RunRecord) -> None:
    """Write the row of a claimed run, and end what leases it has."""
    same = and_(RUNS.c.study == run.study, RUNS.c.number == run.number)
    connection.execute(update(RUNS).where(same).values(row(run)))
    held = and_(LEASES.c.study == run.study, LEASES.c.number == run.number)
    _end(connection, held)


# -- hosts -------------------------------------------------------------------------------------


def hosts_of(connection: Connection) -> list[HostRecord]:
    """Every broker, by name."""
    age = (clock(connection) - HOSTS.c.seen).label("age_seconds")
    query = select(
        HOSTS.c.name, HOSTS.c.instance, HOSTS.c.devices, HOSTS.c.load, HOSTS.c.wants, age
    )
    # The database's clock may have been put back.
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
    """Remove a broker and end its leases, if it is gone."""
    in_turn(connection)
    for host in hosts_of(connection):
        if host.instance == instance and host.age_seconds < dead_after_seconds:
            return False
    connection.execute(delete(HOSTS).where(HOSTS.c.instance == instance))
    _end(connection, LEASES.c.owner == instance)
    return True


def _end(connection: Connection, which: ColumnElement[bool]) -> None:
    # Whoever has locked one is ending it himself: to wait for him could be to wait for each other.
    live = select(LEASES.c.epoch).where(which, LEASES.c.ended.is_(None))
    epochs = connection.scalars(live.with_for_update(skip_locked=skips_locked(connection))).all()
    ended = update(LEASES).where(LEASES.c.epoch.in_(epochs)).values(ended=clock(connection))
    if epochs:
        connection.execute(ended)
