"""Rules of brokers that share a database: turns, epochs, owners, heartbeats, claims."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection

from optuna_hermes.errors import NotOwnerError
from optuna_hermes.ledger import _statements as sql
from optuna_hermes.ledger._records import ChangeMark, HostRecord, TrialRecord
from optuna_hermes.ledger._rows import row, with_lists
from optuna_hermes.model import LIVE_STATES, TrialStatus

_WAITING = ("pending", "stored")


def in_turn(connection: Connection) -> None:
    """Lock the row by which transactions of brokers are serialised."""
    # SQLite has no row locks; there, BEGIN IMMEDIATE has locked the database.
    backend = connection.dialect.name
    if backend != "sqlite":
        connection.execute(sql.TURN_OF_POSTGRESQL if backend == "postgresql" else sql.TURN)


# -- epochs ------------------------------------------------------------------------------------


def last_epoch(connection: Connection) -> int:
    """The highest epoch of all leases, removed ones included."""
    kept, forgotten = connection.execute(sql.EPOCHS).one()
    return max(kept or 0, forgotten or 0)


# -- owners ------------------------------------------------------------------------------------


def check_owner(connection: Connection, study: str, number: int, by: str | None) -> None:
    """Check the owner of a trial.

    Raises:
        NotOwnerError: it has another owner.
    """
    # A broker that was taken for dead and comes back must not undo the writes of its heir.
    found = connection.execute(sql.OWNER, {"of_study": study, "of_number": number}).first()
    if found is not None and found.owner != by:
        raise NotOwnerError(
            f"Trial {number} of study {study} belongs to {_broker(found.owner)}, so {_broker(by)} "
            "may not write it: another broker may have taken it over. End its process if there is "
            "one, and claim it before it is run again.",
            number,
        )


def save_trial(connection: Connection, trial: TrialRecord, by: str | None) -> None:
    """Add the row of a trial, or replace it, if ``by`` is its owner.

    Raises:
        NotOwnerError: it has another owner.
    """
    found = row(trial)
    of = {"of_study": trial.study, "of_number": trial.number, "of_owner": by}
    # Update first: a trial is inserted once and replaced many times.
    if not connection.execute(sql.REPLACE_TRIAL, {**found, **of}).rowcount:
        # Nothing was replaced: the trial is new, or another broker's.
        check_owner(connection, trial.study, trial.number, by)
        connection.execute(sql.ADD_TRIAL, found)


def claim(
    connection: Connection,
    study: str,
    number: int,
    host: str,
    instance: str,
    dead_after_seconds: float,
) -> TrialRecord | None:
    """Claim a trial for a broker; see ``Ledger.claim_trial``."""
    of = {"of_study": study, "of_number": number}
    found = connection.execute(sql.TRIAL, of).mappings().first()
    if found is None:
        return None
    trial = TrialRecord(**found)
    hosts = [each for each in hosts_of(connection) if each.age_seconds < dead_after_seconds]
    if not _claimable(trial, hosts, host, instance):
        return None
    if trial.owner == instance:
        return trial
    stored = connection.execute(sql.HAS_CHECKPOINT, of).first() is not None
    state: TrialStatus = "stored" if stored else "pending"
    trial = replace(trial, state=state, tier="disk" if stored else None, host=host, owner=instance)
    connection.execute(sql.CHANGE_TRIAL, {**row(trial), **of})
    connection.execute(sql.END_LEASES_OF_TRIAL, of)
    return trial


def _claimable(trial: TrialRecord, live: list[HostRecord], host: str, instance: str) -> bool:
    """True if a broker of a host may claim a trial; see the rules of the ledger."""
    if trial.state not in LIVE_STATES:
        return False
    if trial.owner is not None:
        return trial.owner == instance or all(known.instance != trial.owner for known in live)
    if trial.state in _WAITING or trial.host in (None, host):
        return True
    # Without an owner it is held by its host, whose broker trained it on its own.
    return all(known.name != trial.host for known in live)


def _broker(instance: str | None) -> str:
    return "no broker" if instance is None else f"broker {instance}"


# -- hosts -------------------------------------------------------------------------------------


def hosts_of(connection: Connection) -> list[HostRecord]:
    """All brokers, by name."""
    return _hosts(map(dict, connection.execute(sql.HOSTS_WITH_AGES).mappings()))


def _hosts(rows: Iterable[dict[str, Any]]) -> list[HostRecord]:
    # The database's clock may have been set back, which would give a negative age.
    hosts = [
        HostRecord(**{**with_lists(each), "age_seconds": max(0.0, each["age_seconds"])})
        for each in rows
    ]
    return sorted(hosts, key=lambda host: (host.name, host.instance))


def change_mark(connection: Connection) -> ChangeMark:
    """The change numbers and all brokers, in one statement."""
    rows = [dict(each) for each in connection.execute(sql.LOOK).mappings()]
    numbers = [(each.pop("last_change"), each.pop("forgotten_change")) for each in rows]
    hosts = _hosts(each for each in rows if each["instance"] is not None)
    return ChangeMark(change=numbers[0][0], forgotten=numbers[0][1], hosts=tuple(hosts))


def beat(connection: Connection, host: HostRecord) -> None:
    """Add the row of a broker, or replace it."""
    found = row(host)
    del found["age_seconds"]
    same = {"of_instance": host.instance}
    if not connection.execute(sql.REPLACE_HOST, {**found, **same}).rowcount:
        connection.execute(sql.ADD_HOST, found)


def forget_host(connection: Connection, instance: str, dead_after_seconds: float) -> bool:
    """Remove a broker and end its leases, if it is gone; return whether it is."""
    # One without a row is gone, too, and may have left leases.
    for host in hosts_of(connection):
        if host.instance == instance and host.age_seconds < dead_after_seconds:
            return False
    connection.execute(sql.DROP_HOST, {"of_instance": instance})
    connection.execute(sql.END_LEASES_OF_HOST, {"of_instance": instance})
    return True
