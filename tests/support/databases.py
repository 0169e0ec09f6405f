"""Database servers for tests, each started in a folder of its own and reaped at the end."""

from __future__ import annotations

import atexit
import getpass
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final
from uuid import uuid4

import psutil
import pytest
import sqlalchemy
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

_START_SECONDS = 120.0
_STOP_SECONDS = 30.0


@final
class DatabaseServer:
    """A running database server.

    Args:
        url: URL of a database that always exists.
        pid: id of its process.
    """

    def __init__(self, url: sqlalchemy.URL, pid: int) -> None:
        self.url = url
        self.pid = pid
        self._engine = sqlalchemy.create_engine(url, isolation_level="AUTOCOMMIT")
        self._empty: list[str] = []

    def execute(self, sql: str) -> list[Any]:
        """Execute a statement as the server's administrator, outside of a transaction."""
        with self._engine.connect() as connection:
            done = connection.exec_driver_sql(sql)
            return list(done.scalars()) if done.returns_rows else []

    @contextmanager
    def database(self) -> Iterator[str]:
        """The URL of an empty database; connections still open at the end are terminated."""
        if not self._empty:
            self._empty.append(f"hermes_{uuid4().hex}")
            self.execute(f"CREATE DATABASE {self._empty[0]}")
        name = self._empty.pop()
        try:
            yield self.url.set(database=name).render_as_string(hide_password=False)
        finally:
            self._clear(name)
            self._empty.append(name)

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def _clear(self, name: str) -> None:
        # Creating a database of PostgreSQL takes longer than most tests: its schema is replaced.
        if self.url.get_backend_name() == "postgresql":
            self.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                f"WHERE datname = '{name}' AND pid <> pg_backend_pid()"
            )
            inside = sqlalchemy.create_engine(self.url.set(database=name), poolclass=NullPool)
            with inside.begin() as connection:
                connection.exec_driver_sql("DROP SCHEMA public CASCADE")
                connection.exec_driver_sql("CREATE SCHEMA public")
            return
        for thread in self.execute(
            f"SELECT id FROM information_schema.processlist WHERE db = '{name}'"
        ):
            with suppress(OperationalError):  # it has just ended
                self.execute(f"KILL {thread}")
        self.execute(f"DROP DATABASE {name}")
        self.execute(f"CREATE DATABASE {name}")


@contextmanager
def postgres_server() -> Iterator[DatabaseServer]:
    """PostgreSQL from the wheel of pgserver; the test is skipped where there is none."""
    pgserver: Any = pytest.importorskip("pgserver", reason="needs pgserver: pip install pgserver")
    pytest.importorskip("psycopg", reason="needs psycopg: pip install 'psycopg[binary]'")
    with tempfile.TemporaryDirectory(prefix="hermes-pg-") as folder:
        started = pgserver.get_server(folder)
        url = sqlalchemy.make_url(started.get_uri()).set(drivername="postgresql+psycopg")
        server = DatabaseServer(url, started.get_pid())
        try:
            # Nothing here has to outlive a power cut.
            for setting in ("fsync", "full_page_writes", "synchronous_commit"):
                server.execute(f"ALTER SYSTEM SET {setting} = off")
            server.execute("SELECT pg_reload_conf()")
            yield server
        finally:
            server.close()
            # An orderly end would first write out what is thrown away, for half a minute.
            process = psutil.Process(server.pid)
            process.send_signal(signal.SIGQUIT)
            process.wait(_STOP_SECONDS)
            started.cleanup()
            atexit.unregister(started._cleanup)  # it would look for the folder


@contextmanager
def mariadb_server() -> Iterator[DatabaseServer]:
    """MariaDB as Debian installs it; the test is skipped where it is not installed."""
    if not shutil.which("mariadbd") or not shutil.which("mariadb-install-db"):
        pytest.skip("needs MariaDB: apt-get install mariadb-server")
    pytest.importorskip("pymysql", reason="needs PyMySQL: pip install pymysql")
    # Not below pytest's own folder, which only its user may enter: the server is another one.
    with tempfile.TemporaryDirectory(prefix="hermes-my-") as folder:
        user = _unprivileged(folder)
        options = (f"--datadir={folder}/data", f"--tmpdir={folder}", f"--user={user}")
        _make_mariadb(options)
        process = subprocess.Popen(
            (
                "mariadbd",
                "--no-defaults",
                *options,
                "--skip-networking",
                f"--socket={folder}/socket",
                f"--pid-file={folder}/pid",
                f"--log-error={folder}/log",
                # Nothing here has to outlive a power cut.
                "--innodb-flush-log-at-trx-commit=0",
                "--innodb-flush-method=nosync",
                "--skip-innodb-doublewrite",
                "--sync-frm=0",
                "--innodb-buffer-pool-size=32M",
            )
        )
        url = sqlalchemy.URL.create(
            "mysql+pymysql", "root", database="mysql", query={"unix_socket": f"{folder}/socket"}
        )
        server = DatabaseServer(url, process.pid)
        try:
            _wait_until_up(Path(folder, "socket"), process, Path(folder, "log"))
            yield server
        finally:
            server.close()
            _stop(process)


def _unprivileged(folder: str) -> str:
    """The user of the server's process, never root; the folder is given to that user."""
    if os.geteuid() != 0:
        return getpass.getuser()
    shutil.chown(folder, "mysql")  # Debian's package makes this user
    return "mysql"


def _make_mariadb(options: tuple[str, ...]) -> None:
    made = subprocess.run(
        (
            "mariadb-install-db",
            "--no-defaults",
            *options,
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
            "--skip-name-resolve",
        ),
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stdout + made.stderr


def _wait_until_up(socket: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for the server's socket, which MariaDB creates when it is ready."""
    deadline = time.monotonic() + _START_SECONDS
    while not socket.exists():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
