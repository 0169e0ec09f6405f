"""Ledgers of other versions, and ledgers whose tables are not complete, on every database."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import text

from optuna_hermes.errors import LedgerError
from optuna_hermes.ledger import (
    SCHEMA_VERSION,
    CheckpointRecord,
    EventRecord,
    LeaseRecord,
    Ledger,
    ReportRecord,
    TrialRecord,
    _schema,
    open_ledger,
    schema_version,
)
from optuna_hermes.model import Checkpoint

RUN = TrialRecord(
    study="key",
    number=0,
    trial_id=1,
    state="stored",
    tier="disk",
    host="a",
    units=2,
    slices=3,
    suspensions=4,
    device_seconds=5.5,
    energy_joules=2.5,
    submitted=6.5,
    updated=7.5,
)
REPORT = ReportRecord(
    study="key", number=0, unit=1, step=10, value=0.25, device_seconds=1.5, at=2.5
)
LEASE = LeaseRecord(
    study="key", epoch=7, number=0, devices=("a/cpu:0",), host="a", started=1.5, ended=2.5
)
CHECKPOINT = CheckpointRecord(
    study="key",
    number=0,
    checkpoint=Checkpoint(path="/c/1", units=2, size_bytes=1024, sha256="abc"),
    at=4.5,
)
PARKED = EventRecord(study="key", number=0, kind="parked", at=5.5, detail={"x": 1})


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/ledger.db"
    return str(request.getfixturevalue(f"{request.param}_url"))


@contextmanager
def connected(url: str) -> Iterator[sqlalchemy.Connection]:
    """The database without the package."""
    engine = sqlalchemy.create_engine(url)
    try:
        with engine.begin() as connection:
            yield connection
    finally:
        engine.dispose()


def fill(url: str) -> None:
    """Make a ledger with a row of each kind."""
    with closing(open_ledger(url)) as ledger:
        ledger.save_trial(RUN)
        ledger.save_override("key", 0, "held")
        ledger.add_report(REPORT)
        ledger.commit_lease(LEASE)
        ledger.save_checkpoint(CHECKPOINT)
        ledger.save_memory("key", [1, 2])
        ledger.add_event(PARKED)


def assert_all_is_there(ledger: Ledger) -> None:
    """Assert that a ledger has what ``fill`` wrote."""
    assert ledger.load_trials("key") == [RUN]
    assert ledger.load_overrides("key") == {0: "held"}
    assert [report for _, report in ledger.load_reports("key")] == [REPORT]
    assert ledger.load_leases() == [LEASE]
    assert ledger.last_epoch() == 7
    assert ledger.load_checkpoints("key") == [CHECKPOINT]
    assert ledger.load_memory("key") == [1, 2]
    assert ledger.load_events("key") == [PARKED]


def dump(url: str) -> dict[str, Any]:
    """All tables of a database, with their rows."""
    found = sqlalchemy.MetaData()
    with connected(url) as connection:
        found.reflect(connection)
        return {
            name: [tuple(row) for row in connection.execute(sqlalchemy.select(table))]
            for name, table in found.tables.items()
        }


def versions(url: str) -> list[int]:
    """The rows of the version's table."""
    with connected(url) as connection:
        return list(connection.scalars(text("SELECT schema_version FROM hermes_schema")))


def assert_tables_are_complete(url: str) -> None:
    """No column and no index is missing, and no column is of another type."""
    with connected(url) as connection:
        for table in _schema.METADATA.sorted_tables:
            found = {
                column["name"]: column["type"]
                for column in sqlalchemy.inspect(connection).get_columns(table.name)
            }
            assert set(found) == set(table.columns.keys())
            indexes = sqlalchemy.inspect(connection).get_indexes(table.name)
            assert {index.name for index in table.indexes} <= {index["name"] for index in indexes}
            for column in table.columns:
                declared = column.type.dialect_impl(connection.dialect)
                assert found[column.name]._type_affinity == declared._type_affinity


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_another_version_is_refused_and_left_alone(url: str, version: int) -> None:
    """Nothing is added to a ledger of another version or lost; the error says what to do."""
    fill(url)
    with connected(url) as connection:
        connection.execute(text(f"UPDATE hermes_schema SET schema_version = {version}"))
        connection.execute(text("DROP TABLE hermes_hosts"))
    before = dump(url)
    refused = (
        rf"must be {SCHEMA_VERSION} but got {version} at .*\. Use the optuna-hermes that .*, or"
    )
    with pytest.raises(LedgerError, match=refused) as caught:
        open_ledger(url)
    assert "\n" not in str(caught.value)
    assert schema_version(url) == version
    assert dump(url) == before


def test_tables_without_a_version_are_finished(url: str) -> None:
    """The process that made them died before it wrote the version: nothing in them is lost."""
    fill(url)
    with connected(url) as connection:
        connection.execute(text("DELETE FROM hermes_schema"))
        connection.execute(text("DROP TABLE hermes_hosts"))
    with closing(open_ledger(url)) as ledger:
        assert_all_is_there(ledger)
    assert versions(url) == [SCHEMA_VERSION]
    assert_tables_are_complete(url)


def test_handles_that_open_at_once_finish_it_once(url: str) -> None:
    """One creates the tables that are missing, the others wait for it, and all find everything."""
    fill(url)
    with connected(url) as connection:
        connection.execute(text("DELETE FROM hermes_schema"))
        connection.execute(text("DROP TABLE hermes_hosts"))
    start = Barrier(4)

    def open_it(_: int) -> None:
        start.wait(timeout=60)
        with closing(open_ledger(url)) as ledger:
            assert_all_is_there(ledger)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(open_it, range(4)))
    assert versions(url) == [SCHEMA_VERSION]


def _die_half_way(url: str) -> None:
    def create_some(connection: sqlalchemy.Connection) -> None:
        for table in (_schema.SCHEMA, _schema.TRIALS, _schema.HOSTS):
            table.create(connection)
        os.kill(os.getpid(), signal.SIGKILL)

    _schema.METADATA.create_all = create_some  # type: ignore[method-assign,assignment]
    open_ledger(url)


def killed(work: Callable[[str], Any], url: str) -> None:
    """Run ``work`` in a process that is killed in the middle of it."""
    process = multiprocessing.get_context("spawn").Process(target=work, args=(url,))
    process.start()
    process.join(120)
    code = process.exitcode
    process.kill()
    process.close()
    assert code == -signal.SIGKILL


def test_a_process_that_is_killed_half_way_does_no_harm(url: str) -> None:
    """The next process creates what the dead one had not come to."""
    killed(_die_half_way, url)
    fill(url)
    with closing(open_ledger(url)) as ledger:
        assert_all_is_there(ledger)
    assert versions(url) == [SCHEMA_VERSION]
    assert_tables_are_complete(url)


def test_a_process_that_waits_too_long_for_the_tables_is_told(
    mariadb_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that keeps the tables to itself makes the others give up with one line."""
    monkeypatch.setattr(_schema, "_LOCK_TIMEOUT_SECONDS", 0)
    with connected(mariadb_url) as connection:
        connection.execute(text(f"SELECT GET_LOCK({_schema._LOCK_NAME}, 0)"))
        with pytest.raises(LedgerError, match=r"one process at a time.*Try again when it has"):
            open_ledger(mariadb_url)
    open_ledger(mariadb_url).close()
