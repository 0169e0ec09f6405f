"""Database URLs, and engines with time limits for databases that stop answering."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from sqlalchemy import (
    URL,
    ColumnElement,
    Connection,
    Dialect,
    Engine,
    String,
    bindparam,
    create_engine,
    event,
    func,
    make_url,
    true,
)
from sqlalchemy.exc import ArgumentError

from optuna_hermes.errors import InvalidInputError, LedgerError
from optuna_hermes.ledger._secrets import without_password

BACKENDS = ("sqlite", "postgresql", "mysql", "mariadb")
"""Databases that a ledger can live in."""

SILENT_SECONDS = 10
"""Time after which the server ends an idle transaction, so that a hung process frees its locks."""

CONNECT_SECONDS = 10
"""Time limit of connecting to a server."""

ANSWER_SECONDS = 90
"""Time limit of a statement of MySQL: above its longest wait for a lock."""

VANISHED_SECONDS = 30
"""Time without any TCP acknowledgement after which a PostgreSQL connection is given up."""

REST_SECONDS = 1.0
"""Time after which a worker's idle connections are closed."""

_LOCK_TIMEOUT_SECONDS = 60
_BEGIN = "hermes_begin"
_LIBPQ = ("psycopg", "psycopg2")


def parse(url: str) -> URL:
    """Parse a URL; a file of SQLite gets its absolute path.

    Raises:
        LedgerError: it cannot be read, or names a database that is not supported.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        # Neither the text nor the cause is shown: either may hold a password.
        raise LedgerError(
            "A ledger's URL must look like sqlite:///study.db or "
            "postgresql://user:password@host/database, but this one cannot be read."
        ) from None
    if parsed.get_backend_name() not in BACKENDS:
        raise LedgerError(
            "A ledger's URL must name SQLite, PostgreSQL, MySQL or MariaDB but got "
            f"{parsed.drivername!r}. Keep the study in one of them."
        )
    return _with_file(parsed) if parsed.get_backend_name() == "sqlite" else parsed


def is_database(url: str) -> bool:
    """True if a URL names a database that can hold a ledger."""
    try:
        parse(url)
    except LedgerError:
        return False
    return True


def check_shared_url(url: str) -> None:
    """Refuse a URL that is kept in a study for all hosts and is no server's, or has a password.

    Raises:
        InvalidInputError: with what to do instead.
    """
    try:
        server = parse(url).get_backend_name() != "sqlite"
    except LedgerError:
        server = False
    if not server:
        raise InvalidInputError(
            "ledger must be the URL of a PostgreSQL or MySQL database that all hosts reach, as in "
            "postgresql+psycopg://user@host/database."
        )
    if without_password(url) != url:
        raise InvalidInputError(
            "ledger must hold no password: it is kept in the study, for all to read. Put it into "
            "~/.pgpass or $PGPASSWORD, or for MySQL into an option file."
        )


def is_other_file(url: str, other: str) -> bool:
    """True if two URLs are of different files of SQLite; those of a server may differ."""
    if url == other or not (url.startswith("sqlite") and other.startswith("sqlite")):
        return False
    file, its = map(_file_of, (url, other))
    try:
        return file != its and not os.path.samefile(file, its)
    except OSError:  # one is gone, as where the other was moved to
        return True


def _file_of(url: str) -> str:
    """The absolute path of an SQLite URL; ``status`` and others read a file by its URI, too."""
    database = str(parse(url).database)
    if not database.startswith("file:"):
        return database
    return os.path.abspath(unquote(database.removeprefix("file:")))


def with_connect_args(url: URL, engine_kwargs: Mapping[str, Any]) -> URL:
    """The URL of a server with options for what arguments of ``create_engine`` say of connections.

    Objects that say how connections are used, such as ``row_factory``, are left out.

    Raises:
        InvalidInputError: one says how to connect, and a URL cannot hold it.
    """
    arguments = {**engine_kwargs.get("connect_args", {}), "creator": engine_kwargs.get("creator")}
    arguments.pop("prepare_threshold", None)  # a ledger prepares no statement
    given = {name: value for name, value in arguments.items() if value is not None}
    texts = {name: str(value) for name, value in given.items() if type(value) in (str, int)}
    others = [name for name in given.keys() - texts if name == "creator" or "ssl" in name]
    if others:
        raise InvalidInputError(
            "The broker reaches a study's database by its URL, which cannot hold "
            f"{', '.join(sorted(others))} of engine_kwargs: put into the URL what is needed to "
            "connect (as ?sslmode=require, or ?ssl_ca=FILE for MySQL), and leave the rest out."
        )
    return url.update_query_dict(texts)


def with_password(url: str) -> str:
    """A URL for other processes: with the password that this one's $PGPASSWORD has for it."""
    parsed, password = make_url(url), os.environ.get("PGPASSWORD")
    told = parsed.password or not {"password", "service"}.isdisjoint(parsed.query)
    if told or not password or parsed.get_driver_name() not in _LIBPQ:
        return url
    if parsed.username is None:  # a password of no user would not be written
        parsed = parsed.update_query_dict({"password": password})
    else:
        parsed = parsed.set(password=password)
    return parsed.render_as_string(hide_password=False)


def _with_file(url: URL) -> URL:
    """The URL with an absolute path: it names the same file after a change of folder."""
    database = url.database or ":memory:"
    if ":memory:" in database or url.query.get("mode") == "memory":
        raise LedgerError(
            "A ledger outlives its process but a SQLite database in memory does not. Name a file, "
            "as in sqlite:///study.db."
        )
    return url if database.startswith("file:") else url.set(database=os.path.abspath(database))


def connectable(url: URL) -> Engine:
    """Create an engine that has not connected yet, and the folder of a file of SQLite.

    Raises:
        ImportError: its driver is not installed.
        ArgumentError: SQLAlchemy knows no such driver.
        ValueError: an option of the URL is no number, say.
        OSError: the folder cannot be made.
    """
    if url.get_backend_name() == "sqlite":
        return _sqlite_engine(url)
    # Each statement must see rows committed while it waited for a lock: InnoDB's default,
    # REPEATABLE READ, would show it the snapshot of its transaction's first read.
    # A pooler may give each transaction another server.
    unprepared = {"prepare_threshold": None} if url.get_driver_name() == "psycopg" else {}
    engine = create_engine(
        url,
        hide_parameters=True,
        # The server ends idle connections, of which the pool learns by asking only.
        pool_pre_ping=True,
        isolation_level="READ COMMITTED",
        connect_args=unprepared,
    )
    event.listen(engine, "do_connect", _limit_time)
    if engine.dialect.name != "postgresql":
        event.listen(engine, "connect", partial(_end_silent_transactions, engine))
    return engine


@contextmanager
def limited_time(engine: Engine) -> Iterator[None]:
    """Have an engine of a server give up a vanished host, within the block.

    Options that its user has chosen stay. Without limits a connection to a host that was switched
    off hangs for a quarter of an hour.
    """
    if engine.dialect.name == "sqlite" or event.contains(engine, "do_connect", _limit_time):
        yield
        return
    event.listen(engine, "do_connect", _limit_time)
    engine.dispose()  # its connections until now have no limits
    try:
        yield
    finally:
        event.remove(engine, "do_connect", _limit_time)
        engine.dispose()  # the user's own statements may take longer


def _limit_time(dialect: Dialect, _record: object, _arguments: object, named: Any) -> None:
    limits: dict[str, int] = {}
    if dialect.driver in _LIBPQ:
        limits = {
            "connect_timeout": CONNECT_SECONDS,
            "keepalives": 1,
            "keepalives_idle": VANISHED_SECONDS // 3,
            "keepalives_interval": VANISHED_SECONDS // 6,
            "keepalives_count": 4,
            "tcp_user_timeout": 1000 * VANISHED_SECONDS,
        }
        if "PGCONNECT_TIMEOUT" in os.environ:
            del limits["connect_timeout"]
    elif dialect.driver in ("pymysql", "mysqldb", "mariadbconnector"):
        limits = {
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": ANSWER_SECONDS,
            "write_timeout": ANSWER_SECONDS,
        }
    named.update({**limits, **named})


def for_writing(engine: Engine) -> Engine:
    """The engine with transactions that, on SQLite, lock the database when they begin."""
    return engine.execution_options(**{_BEGIN: "BEGIN IMMEDIATE"})


def at_once(engine: Engine) -> Engine:
    """The engine of a server with connections each of whose statements is a transaction."""
    return engine.execution_options(isolation_level="AUTOCOMMIT")


def end_if_silent() -> ColumnElement[str]:
    """A column that makes PostgreSQL end the transaction which selects it, if that is silent."""
    # Not the session: a pooler gives its connection to others, and readers take their time.
    limit = bindparam("limit", callable_=lambda: f"{SILENT_SECONDS}s", type_=String())
    return func.set_config("idle_in_transaction_session_timeout", limit, true())


def _end_silent_transactions(engine: Engine, connection: Any, _record: object) -> None:
    dialect: Any = engine.dialect
    if dialect.is_mariadb:
        timeout = f"idle_transaction_timeout = {SILENT_SECONDS}"
    else:  # MySQL ends the silent connection, in a transaction or not; the pool opens another
        timeout = f"wait_timeout = {SILENT_SECONDS}"
    with closing(connection.cursor()) as cursor:
        cursor.execute(f"SET SESSION {timeout}")
    connection.commit()


def _sqlite_engine(url: URL) -> Engine:
    if not str(url.database).startswith("file:"):
        Path(str(url.database)).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    arguments = {} if "timeout" in url.query else {"timeout": _LOCK_TIMEOUT_SECONDS}
    engine = create_engine(url, hide_parameters=True, connect_args=arguments)
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin)
    return engine


def _prepare_sqlite(connection: Any, _record: object) -> None:
    # The driver would begin late, and DEFERRED: two writers could both read before either writes.
    connection.isolation_level = None
    connection.create_function("hermes_now", 0, time.time)


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get(_BEGIN, "BEGIN"))


def few_connections(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of an engine for one of many processes, which keeps one connection.

    Optuna needs a second one while it compares versions, for a moment.

    Args:
        arguments: those of ``create_engine`` that the user has chosen; a pool among them stays.
    """
    if "poolclass" in arguments or "pool" in arguments:
        return arguments
    return {**arguments, "pool_size": 1, "max_overflow": 1}


def rest_when_idle(engine: Engine) -> None:
    """Close an engine's connections, but for SQLite's, once they are idle for ``REST_SECONDS``.

    A server has a limited number of connections, and a waiting process needs none.
    """
    if engine.dialect.name != "sqlite":
        event.listen(engine, "checkin", _Rest(engine).used)


class _Rest:
    """Closes an engine's idle connections, on a thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._used_at = 0.0
        self._any = threading.Event()
        self._thread: threading.Thread | None = None

    def used(self, connection: object, record: object) -> None:
        """Record that a connection was given back to the pool."""
        self._used_at = time.monotonic()
        self._any.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="hermes-rest", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            self._any.wait()
            left = self._used_at + REST_SECONDS - time.monotonic()
            if left > 0:
                time.sleep(left)
                continue
            self._any.clear()
            self._engine.dispose()
