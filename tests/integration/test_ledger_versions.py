"""Ledgers of earlier versions, on every database."""

from __future__ import annotations

import math
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
    RunRecord,
    _migrations,
    open_ledger,
)

# Version 1 as it was released: never change it.
TABLES_1 = """
CREATE TABLE hermes_schema (id INTEGER NOT NULL, schema_version INTEGER NOT NULL, PRIMARY KEY (id));
CREATE TABLE hermes_runs (
    study {name} NOT NULL, number {integer} NOT NULL, trial_id {integer} NOT NULL,
    state {word} NOT NULL, tier {word}, host {name}, units {integer} NOT NULL,
    slices {integer} NOT NULL, suspensions {integer} NOT NULL,
    device_seconds {double} NOT NULL, submitted {double} NOT NULL, updated {double} NOT NULL,
    PRIMARY KEY (study, number)
);
CREATE TABLE hermes_reports (
    id {serial} NOT NULL, study {name} NOT NULL, number {integer} NOT NULL,
    unit {integer} NOT NULL, step {integer} NOT NULL, value {double}, not_finite {word},
    device_seconds {double} NOT NULL, at {double} NOT NULL, PRIMARY KEY (id)
);
CREATE INDEX ix_hermes_reports_run ON hermes_reports (study, number);
CREATE TABLE hermes_leases (
    epoch {integer} NOT NULL, study {name} NOT NULL, number {integer}, devices {long} NOT NULL,
    host {name} NOT NULL, started {double} NOT NULL, ended {double}, PRIMARY KEY (epoch)
);
CREATE INDEX ix_hermes_leases_study ON hermes_leases (study);
CREATE TABLE hermes_checkpoints (
    id {serial} NOT NULL, study {name} NOT NULL, number {integer} NOT NULL, path {long} NOT NULL,
    units {integer} NOT NULL, size_bytes {integer} NOT NULL, sha256 {word} NOT NULL,
    at {double} NOT NULL, PRIMARY KEY (id)
);
CREATE INDEX ix_hermes_checkpoints_run ON hermes_checkpoints (study, number);
CREATE TABLE hermes_memory (study {name} NOT NULL, memory {long} NOT NULL, PRIMARY KEY (study));
CREATE TABLE hermes_events (
    id {serial} NOT NULL, study {name} NOT NULL, number {integer}, kind {name} NOT NULL,
    at {double} NOT NULL, detail {long} NOT NULL, PRIMARY KEY (id)
);
CREATE INDEX ix_hermes_events_run ON hermes_events (study, number)
"""
ROWS_1 = """
INSERT INTO hermes_runs VALUES ('key', 0, 1, 'stored', 'disk', 'a', 2, 3, 4, 5.5, 6.5, 7.5);
INSERT INTO hermes_runs VALUES ('key', 1, 2, 'pending', NULL, NULL, 0, 0, 0, 0.0, 8.5, 8.5);
INSERT INTO hermes_reports (study, number, unit, step, value, not_finite, device_seconds, at)
    VALUES ('key', 0, 1, 10, 0.25, NULL, 1.5, 2.5);
INSERT INTO hermes_reports (study, number, unit, step, value, not_finite, device_seconds, at)
    VALUES ('key', 0, 2, 20, NULL, 'nan', 3.5, 4.5);
INSERT INTO hermes_leases VALUES (7, 'key', 0, '["a/cpu:0"]', 'a', 1.5, 2.5);
INSERT INTO hermes_leases VALUES (9, 'key', NULL, '["a/cpu:1"]', 'a', 3.5, NULL);
INSERT INTO hermes_checkpoints (study, number, path, units, size_bytes, sha256, at)
    VALUES ('key', 0, '/c/1', 2, 1024, 'abc', 4.5);
INSERT INTO hermes_memory VALUES ('key', '[1, 2]');
INSERT INTO hermes_events (study, number, kind, at, detail)
    VALUES ('key', 0, 'parked', 5.5, '{"x": 1}')
"""
VERSION_1 = "INSERT INTO hermes_schema VALUES (1, 1)"

_BYTES = "CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
TYPES = {
    "sqlite": {
        "integer": "INTEGER",
        "serial": "INTEGER",
        "double": "DOUBLE",
        "name": "VARCHAR(255)",
        "word": "VARCHAR(64)",
        "long": "TEXT",
    },
    "postgresql": {
        "integer": "BIGINT",
        "serial": "BIGSERIAL",
        "double": "DOUBLE PRECISION",
        "name": "VARCHAR(255)",
        "word": "VARCHAR(64)",
        "long": "TEXT",
    },
    "mysql": {
        "integer": "BIGINT",
        "serial": "BIGINT AUTO_INCREMENT",
        "double": "DOUBLE",
        "name": f"VARCHAR(255) {_BYTES}",
        "word": f"VARCHAR(64) {_BYTES}",
        "long": f"LONGTEXT {_BYTES}",
    },
}


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


def make_version_1(url: str, *, scripts: tuple[str, ...] = (TABLES_1, ROWS_1, VERSION_1)) -> None:
    script = ";".join(scripts)
    for name, sql in TYPES[sqlalchemy.make_url(url).get_backend_name()].items():
        script = script.replace(f"{{{name}}}", sql)
    with connected(url) as connection:
        for statement in script.split(";"):
            connection.exec_driver_sql(statement)


def version(url: str) -> list[int]:
    with connected(url) as connection:
        return list(connection.scalars(text("SELECT schema_version FROM hermes_schema")))


def assert_all_is_there(ledger: Ledger) -> None:
    """What ``ROWS_1`` says, in today's records."""
    stored, pending = ledger.load_runs("key")
    assert stored == RunRecord(
        study="key",
        number=0,
        trial_id=1,
        state="stored",
        tier="disk",
        host="a",
        owner=None,
        units=2,
        slices=3,
        suspensions=4,
        device_seconds=5.5,
        submitted=6.5,
        updated=7.5,
    )
    assert (pending.state, pending.submitted, pending.owner) == ("pending", 8.5, None)
    curve = ledger.load_curves("key")[0]
    assert (curve.steps, curve.values[0], curve.device_seconds) == ((10, 20), 0.25, (1.5, 3.5))
    assert math.isnan(curve.values[1])
    ended = LeaseRecord(
        study="key", epoch=7, number=0, devices=("a/cpu:0",), host="a", started=1.5, ended=2.5
    )
    live = LeaseRecord(
        study="key", epoch=9, number=None, devices=("a/cpu:1",), host="a", started=3.5
    )
    assert ledger.load_leases() == [ended, live]
    assert ledger.last_epoch() == 9
    assert ledger.load_checkpoints("key") == [
        CheckpointRecord(
            study="key", number=0, path="/c/1", units=2, size_bytes=1024, sha256="abc", at=4.5
        )
    ]
    assert ledger.load_memory("key") == [1, 2]
    assert ledger.load_events("key") == [
        EventRecord(study="key", number=0, kind="parked", at=5.5, detail={"x": 1})
    ]


def assert_it_works(ledger: Ledger) -> None:
    """What today's version keeps more than version 1 can be written."""
    owned = RunRecord(
        study="new", number=0, trial_id=1, state="running", owner="x", energy_joules=2.5
    )
    ledger.save_run(owned)
    granted = LeaseRecord(
        study="new", epoch=10, number=0, devices=("a/cpu:0",), host="a", started=1.5, owner="x"
    )
    ledger.commit_lease(granted)
    assert ledger.load_runs("new") == [owned]
    assert ledger.load_leases("new") == [granted]


def assert_tables_are_those_of_a_new_ledger(url: str) -> None:
    """No column is missing, and none is of another type."""
    with connected(url) as connection:
        for table in _migrations.METADATA.sorted_tables:
            found = {
                column["name"]: column["type"]
                for column in sqlalchemy.inspect(connection).get_columns(table.name)
            }
            assert set(found) == set(table.columns.keys())
            for column in table.columns:
                declared = column.type.dialect_impl(connection.dialect)
                assert found[column.name]._type_affinity == declared._type_affinity


def test_version_1_is_brought_up(url: str) -> None:
    """Everything that version 1 kept is there, and what this version adds works."""
    make_version_1(url)
    with closing(open_ledger(url)) as ledger:
        assert_all_is_there(ledger)
        assert_it_works(ledger)
    assert version(url) == [SCHEMA_VERSION]
    assert_tables_are_those_of_a_new_ledger(url)


def test_those_who_open_it_at_once_bring_it_up_once(url: str) -> None:
    """One changes the tables, the others wait for it, and all find everything."""
    make_version_1(url)
    start = Barrier(4)

    def open_it(_: int) -> None:
        start.wait(timeout=60)
        with closing(open_ledger(url)) as ledger:
            assert_all_is_there(ledger)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(open_it, range(4)))
    assert version(url) == [SCHEMA_VERSION]


def _die_in_a_step(url: str) -> None:
    def step(connection: sqlalchemy.Connection) -> None:
        _migrations.HOSTS.create(connection)
        _migrations._add(connection, _migrations.RUNS.c.owner)
        os.kill(os.getpid(), signal.SIGKILL)

    _migrations.METADATA.create_all = lambda connection: None  # type: ignore[method-assign,assignment]
    _migrations.STEPS = (step,)
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
    """The next process brings the ledger up from wherever the dead one had come."""
    make_version_1(url)
    killed(_die_in_a_step, url)
    assert version(url) == [1]
    with closing(open_ledger(url)) as ledger:
        assert_all_is_there(ledger)
        assert_it_works(ledger)
    assert_tables_are_those_of_a_new_ledger(url)


def test_tables_of_version_1_without_a_version_are_finished(url: str) -> None:
    """Their maker died before it wrote the version: they are brought up all the same."""
    make_version_1(url, scripts=(TABLES_1, ROWS_1))
    with closing(open_ledger(url)) as ledger:
        assert_all_is_there(ledger)
        assert_it_works(ledger)
    assert version(url) == [SCHEMA_VERSION]


def test_a_later_version_is_refused_and_left_alone(url: str) -> None:
    """Tables of a later version are not guessed at: the error says what to do."""
    open_ledger(url).close()
    with connected(url) as connection:
        connection.execute(text(f"UPDATE hermes_schema SET schema_version = {SCHEMA_VERSION + 1}"))
        connection.execute(text("DROP TABLE hermes_events"))
    versions = f"at most {SCHEMA_VERSION} but got {SCHEMA_VERSION + 1}"
    with pytest.raises(LedgerError, match=rf"{versions} at .*\. Upgrade optuna-hermes, or"):
        open_ledger(url)
    with connected(url) as connection:
        assert not sqlalchemy.inspect(connection).has_table("hermes_events")


def test_whoever_waits_too_long_for_the_tables_is_told(
    mariadb_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that keeps the tables to itself makes the others give up with one line."""
    monkeypatch.setattr(_migrations, "_LOCK_TIMEOUT_SECONDS", 0)
    with connected(mariadb_url) as connection:
        connection.execute(text(f"SELECT GET_LOCK({_migrations._LOCK_NAME}, 0)"))
        with pytest.raises(LedgerError, match=r"one process at a time.*Try again when it has"):
            open_ledger(mariadb_url)
    open_ledger(mariadb_url).close()
