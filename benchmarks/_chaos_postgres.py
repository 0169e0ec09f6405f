"""A server of PostgreSQL that can be taken away and brought back at the same address."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import psycopg
import sqlalchemy

DATABASE = "chaos"
START_SECONDS = 60.0
_POLL_SECONDS = 0.1


class Postgres:
    """Starts on entering, and leaves no process behind.

    Args:
        folder: for its data; missing or empty.
    """

    def __init__(self, folder: Path) -> None:
        import pgserver

        folder.mkdir()
        # Nobody ends it but this object; where there is no such user it makes one.
        self._server: Any = pgserver.get_server(folder, cleanup_mode=None)
        self._folder = folder
        self.url = self._url("postgres")
        engine = sqlalchemy.create_engine(self.url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.exec_driver_sql(f"CREATE DATABASE {DATABASE}")
        engine.dispose()
        self.url = self._url(DATABASE)
        self._guests: list[psycopg.Connection[Any]] = []

    def __enter__(self) -> Postgres:
        return self

    def __exit__(self, *exception: object) -> None:
        self.leave()
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def stop_at_once(self) -> None:
        """The immediate shutdown: connections are cut, what is committed is recovered."""
        self._signal_postmaster(signal.SIGQUIT)

    def kill(self) -> None:
        """SIGKILL to the postmaster; its children notice and end."""
        self._signal_postmaster(signal.SIGKILL)

    def freeze(self) -> None:
        """SIGSTOP to all of it: whoever asks waits, without an error."""
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    def bring_back(self) -> None:
        """Have it answer again."""
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        end = time.monotonic() + START_SECONDS
        while not self._answers():
            with contextlib.suppress(subprocess.SubprocessError):
                self._server.ensure_postgres_running()
            if time.monotonic() > end:
                raise SystemExit(f"PostgreSQL does not start: see {self._folder / 'log'}.")
            time.sleep(_POLL_SECONDS)

    def restart(self, *, connections: int | None) -> None:
        """With this many connections for all, those of superusers too; None for its default."""
        self.stop_at_once()
        setting = "" if connections is None else f"max_connections = {connections}\n"
        (self._folder / "postgresql.auto.conf").write_text(setting)
        self.bring_back()

    def crowd(self) -> None:
        """Take every connection there is."""
        address = sqlalchemy.make_url(self.url).set(drivername="postgresql")
        with contextlib.suppress(psycopg.OperationalError):
            while True:
                guest = psycopg.connect(address.render_as_string(hide_password=False))
                self._guests.append(guest)

    def leave(self) -> int:
        """Give them back; how many they were."""
        guests, self._guests = self._guests, []
        for guest in guests:
            guest.close()
        return len(guests)

    def cut_others(self) -> None:
        """End every connection to the database."""
        engine = sqlalchemy.create_engine(self._url("postgres"))
        with engine.connect() as connection:
            connection.exec_driver_sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                f"WHERE datname = '{DATABASE}'"
            )
        engine.dispose()

    def n_connections(self) -> int:
        """Count the connections to the database, without the one that asks; 0 if not known."""
        engine = sqlalchemy.create_engine(self._url("postgres"))
        try:
            with engine.connect() as connection:
                count = connection.exec_driver_sql(
                    f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{DATABASE}'"
                )
                return int(count.scalar() or 0)
        except sqlalchemy.exc.OperationalError:  # there is none left to ask with
            return 0
        finally:
            engine.dispose()

    def _answers(self) -> bool:
        engine = sqlalchemy.create_engine(self.url)
        try:
            with engine.connect() as connection:
                return bool(connection.exec_driver_sql("SELECT 1").scalar())
        except sqlalchemy.exc.SQLAlchemyError as error:
            return "too many clients" in str(error)
        finally:
            engine.dispose()

    def _signal_postmaster(self, number: signal.Signals) -> None:
        postmaster = psutil.Process(self._server.get_pid())
        os.kill(postmaster.pid, number)
        with contextlib.suppress(psutil.TimeoutExpired):
            postmaster.wait(START_SECONDS)

    def _processes(self) -> list[psutil.Process]:
        """The postmaster and its children; children that lost it name the folder no more."""
        try:
            postmaster = psutil.Process(self._server.get_pid())
            return [postmaster, *postmaster.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _url(self, database: str) -> str:
        parsed = sqlalchemy.make_url(self._server.get_uri(database))
        return parsed.set(drivername="postgresql+psycopg").render_as_string(hide_password=False)
