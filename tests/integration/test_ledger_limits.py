"""A database host that vanishes without a word is given up, and not waited for by the quarter."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import optuna
import pytest
from optuna.storages import RDBStorage
from sqlalchemy import Engine, event, text

from optuna_hermes import _optuna
from optuna_hermes._optuna import _storages
from optuna_hermes.errors import LedgerOutageError
from optuna_hermes.ledger import EventRecord, _engine, open_ledger
from optuna_hermes.ledger._engine import connectable, parse

PATIENT_SECONDS = 20.0

POSTGRES = {
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 30_000,
}
MYSQL = {"connect_timeout": 10, "read_timeout": 90, "write_timeout": 90}


class Enough(Exception):  # noqa: N818
    """Raised once the questions to a driver have been seen: nobody has to connect."""


def asked_of_driver(engine: Engine) -> dict[str, Any]:
    """The arguments with which an engine's driver is to connect."""
    seen: dict[str, Any] = {}

    def look(dialect: Any, record: Any, arguments: Any, named: dict[str, Any]) -> None:
        seen.update(named)
        raise Enough

    event.listen(engine, "do_connect", look)
    with pytest.raises(Enough):
        engine.connect()
    engine.dispose()
    return seen


def asked_by_ledger(url: str) -> dict[str, Any]:
    return asked_of_driver(connectable(parse(url)))


def asked_by_worker(url: str) -> dict[str, Any]:
    """What Optuna asks in a worker or a driver."""
    study = study_of(url)
    with _optuna.retrying(study):
        with _optuna.retrying(study):  # a callback may optimize its own study
            pass
        return asked_of_driver(_storages.backend_of(study).engine)


def study_of(url: str) -> optuna.Study:
    """A study in a database that is not asked for it."""
    study = optuna.create_study()
    storage = RDBStorage("sqlite://")
    study._storage = _storages._with_tables({**storage.__getstate__(), "url": url})
    return study


@pytest.mark.parametrize("asked", [asked_by_ledger, asked_by_worker])
@pytest.mark.parametrize(
    ("driver", "module", "limits"),
    [("postgresql+psycopg", "psycopg", POSTGRES), ("mysql+pymysql", "pymysql", MYSQL)],
    ids=["PostgreSQL", "MySQL"],
)
def test_drivers_are_told_when_to_give_up(
    driver: str, module: str, limits: dict[str, int], asked: Callable[[str], dict[str, Any]]
) -> None:
    """Every connection has time limits; those of the URL count first, one by one."""
    pytest.importorskip(module, reason=f"needs {module}")
    seen = asked(f"{driver}://ann@host/study")
    assert {name: seen.get(name) for name in limits} == limits
    own = asked(f"{driver}://ann@host/study?connect_timeout=3")
    assert int(own["connect_timeout"]) == 3
    assert {name: own[name] for name in limits if name != "connect_timeout"} == {
        name: limit for name, limit in limits.items() if name != "connect_timeout"
    }


def test_time_limits_end_with_the_call_that_has_them() -> None:
    """Later the script's own statements may take as long as they want."""
    pytest.importorskip("pymysql")
    study = study_of("mysql+pymysql://ann@host/study")
    with _optuna.retrying(study):
        pass
    assert not MYSQL.keys() & asked_of_driver(_storages.backend_of(study).engine).keys()


def test_a_variables_time_to_connect_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library reads it where nothing else is said."""
    pytest.importorskip("psycopg")
    monkeypatch.setenv("PGCONNECT_TIMEOUT", "60")
    asked = asked_by_ledger("postgresql+psycopg://ann@host/study")
    assert "connect_timeout" not in asked
    assert asked["tcp_user_timeout"] == 30_000


def test_no_statement_is_prepared() -> None:
    """A pooler may give the next transaction to a server that does not know the statement."""
    pytest.importorskip("psycopg", reason="needs psycopg")
    asked = asked_by_ledger("postgresql+psycopg://ann@host/study")
    assert asked["prepare_threshold"] is None


def test_a_statement_may_wait_for_every_lock() -> None:
    """Whoever waits for another process's lock is not taken for one whose host has vanished."""
    assert _engine.ANSWER_SECONDS > _engine._LOCK_TIMEOUT_SECONDS


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a host that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("driver", ["postgresql+psycopg", "mysql+pymysql"])
def test_a_host_that_says_nothing_is_away(
    driver: str, silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connecting ends, with an error that may mend."""
    pytest.importorskip(driver.partition("+")[2])
    for limit in ("CONNECT_SECONDS", "ANSWER_SECONDS"):  # MySQL's greeting is an answer
        monkeypatch.setattr(_engine, limit, 2)  # libpq knows no less
    begin = time.monotonic()
    with pytest.raises(LedgerOutageError, match=r"cannot be used: .*Check its URL"):
        open_ledger(f"{driver}://ann:pw@127.0.0.1:{silent}/study")
    assert time.monotonic() - begin < PATIENT_SECONDS


def test_an_answer_that_does_not_come_is_not_waited_for(
    mariadb_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is gone in the midst of a statement is away; the next connection works."""
    monkeypatch.setattr(_engine, "ANSWER_SECONDS", 1)
    with closing(open_ledger(mariadb_url)) as ledger:
        database: Any = ledger
        begin = time.monotonic()
        with (
            pytest.raises(LedgerOutageError, match="cannot be used"),
            database._database.reading() as connection,
        ):
            connection.execute(text("SELECT SLEEP(60)"))
        assert time.monotonic() - begin < PATIENT_SECONDS
        assert ledger.last_epoch() == 0


def test_a_standby_that_keeps_its_connections_is_left(postgres_url: str) -> None:
    """A server that takes no writes any more is connected to anew: another may be the primary."""
    written = EventRecord(study="s", number=0, kind="granted", at=1.0)
    with closing(open_ledger(postgres_url)) as ledger:
        database: Any = ledger
        with database._database.reading() as connection:
            connection.execute(text("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY"))
        with pytest.raises(LedgerOutageError, match="read-only transaction"):
            ledger.add_event(written)
        ledger.add_event(written)
        assert ledger.load_events("s") == [written]
