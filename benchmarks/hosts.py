"""Cost of hosts that share a study, to their database and to their brokers.

    python benchmarks/hosts.py [--hosts 1,2,4,8] [--trials 500] [--seconds 15] [--json]

Each host is a broker of one CPU slot with a driver and two workers of no weight. All share one
study in a PostgreSQL of their own (pgserver), whose ledger holds that many stored trials with ten
reports and a checkpoint each. In the setting ``idle`` every trial is held by its user, so that
nothing trains; in ``busy`` the trials take turns on the slots, a unit every 0.1 s. Statements are
those that the server has logged, BEGIN and COMMIT too; rows are those that it has read of the
ledger's tables. Processor time is that of the brokers.
"""

from __future__ import annotations

import argparse
import json
import re
import select
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import sqlalchemy
from _broker import broker

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker import connect
from optuna_hermes.broker._client._connection import Connection
from optuna_hermes.ledger import CheckpointRecord, ReportRecord, TrialRecord, open_ledger
from optuna_hermes.model import Checkpoint

KEY = "hosts"
WORKERS = 2
REPORTS = 10
UNIT_SECONDS = 0.1
SETTLE_SECONDS = 15.0
"""Until a server has counted the rows that were read first: a resting connection tells it late."""

STATEMENT = re.compile(r"LOG:  (?:statement|execute [^:]*): ")
ROWS = (
    "SELECT coalesce(sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)), 0) "
    "FROM pg_stat_user_tables WHERE relname LIKE 'hermes_%%'"
)
CONNECTIONS = (
    "SELECT count(*) FROM pg_stat_activity "
    "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
)


def main() -> int:
    options = _options()
    rows = [
        _measure(options, hosts, setting) for setting in options.setting for hosts in options.hosts
    ]
    print(json.dumps({"rows": rows}, indent=1) if options.json else _text(rows))
    return 0


# -- measuring ---------------------------------------------------------------------------------


def _measure(options: argparse.Namespace, hosts: int, setting: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="hermes-hosts-") as folder, ExitStack() as stack:
        server = stack.enter_context(_Server.started(Path(folder) / "postgres"))
        _fill(server.url, options.trials, held=setting == "idle")
        crowd = _Crowd(server.url, options)
        processes = []
        for number in range(hosts):
            directory = Path(folder) / str(number)
            directory.mkdir()
            processes.append(stack.enter_context(broker(directory, "cpu:1")))
            stack.callback(crowd.close)  # before that broker ends
            crowd.join()  # the last broker that was started is the one that is found
        time.sleep(SETTLE_SECONDS)
        before, begin = server.look(), time.monotonic()
        spent, granted = _processor_seconds(processes), crowd.grants
        time.sleep(options.seconds)
        after, wall = server.look(), time.monotonic() - begin
        spent, granted = _processor_seconds(processes) - spent, crowd.grants - granted
    statements, rows = (after[each] - before[each] for each in ("statements", "rows"))
    return {
        "setting": setting,
        "hosts": hosts,
        "trials": options.trials,
        "statements_per_second_per_host": statements / wall / hosts,
        "rows_per_second_per_host": rows / wall / hosts,
        "broker_cores": spent / wall / hosts,
        "grants_per_second": granted / wall,
        "statements_per_grant": statements / granted if granted else None,
        "connections": after["connections"],
    }


def _processor_seconds(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


class _Server:
    """A server of PostgreSQL that logs all its statements."""

    def __init__(self, log: Path, url: str) -> None:
        self.url = url
        self._log = log
        self._engine = sqlalchemy.create_engine(url, isolation_level="AUTOCOMMIT")

    @classmethod
    @contextmanager
    def started(cls, folder: Path) -> Iterator[_Server]:
        import pgserver

        started = pgserver.get_server(folder)
        url = started.get_uri().replace("postgresql://", "postgresql+psycopg://")
        server = cls(started.log, url)
        try:
            with server._engine.connect() as connection:
                connection.exec_driver_sql("ALTER SYSTEM SET log_statement = 'all'")
                connection.exec_driver_sql("SELECT pg_reload_conf()")
            yield server
        finally:
            server._engine.dispose()
            started.cleanup()

    def look(self) -> dict[str, int]:
        """Statements and rows read until now, and the connections that there are."""
        with self._log.open(errors="replace") as lines:
            statements = sum(1 for line in lines if STATEMENT.search(line))
        with self._engine.connect() as connection:
            found = {
                name: int(connection.exec_driver_sql(query).scalar_one())
                for name, query in (("rows", ROWS), ("connections", CONNECTIONS))
            }
        return {"statements": statements, **found}


def _fill(url: str, trials: int, *, held: bool) -> None:
    """A ledger of stored trials, each with reports and a checkpoint, held by their user or not."""
    ledger = open_ledger(url)
    times = {"device_seconds": 1.0, "at": 1.0}
    with ledger.batch():
        for number in range(trials):
            ledger.save_trial(
                TrialRecord(
                    study=KEY,
                    number=number,
                    trial_id=number,
                    state="stored",
                    tier="disk",
                    units=REPORTS,
                    slices=1,
                )
            )
            for unit in range(1, REPORTS + 1):
                value = 1.0 / unit + number / 1e6
                of = {"study": KEY, "number": number, "unit": unit, "step": unit}
                ledger.add_report(ReportRecord(**of, value=value, **times))
            saved = _saved(number, REPORTS)
            ledger.save_checkpoint(
                CheckpointRecord(study=KEY, number=number, checkpoint=saved, at=1.0)
            )
            if held:
                ledger.save_override(KEY, number, "held")
    ledger.close()


def _saved(number: int, units: int) -> Checkpoint:
    path = f"/checkpoints/{number}/{units}"
    return Checkpoint(path=path, units=units, size_bytes=1, sha256="0" * 64)


# -- clients -----------------------------------------------------------------------------------


class _Crowd:
    """Drivers and workers of all hosts."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        self.grants = 0
        self._study = wire.StudySpec(
            key=KEY,
            name=KEY,
            ledger_url=url,
            policy=options.policy,
            slice_seconds=options.slice_seconds,
        )
        self._trials = options.trials
        self._over = threading.Event()
        self._drivers: list[Connection] = []
        self._threads: list[threading.Thread] = []

    def close(self) -> None:
        """End them; a second time is no error."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        for driver in self._drivers:
            driver.close()

    def join(self) -> None:
        """A driver and its workers, connected to the broker that is found now."""
        driver = connect("driver")
        self._drivers.append(driver)
        driver.send(wire.OpenStudy(study=self._study, limit=self._trials, max_alive=WORKERS))
        driver.ask_status(trials=False)  # it has read the study
        for _ in range(WORKERS):
            worker = _Worker(connect("worker"), self)
            thread = threading.Thread(target=worker.work, args=(self._over,))
            thread.start()
            self._threads.append(thread)


class _Worker:
    """A worker process in a thread: it reports units, and parks its trial when it is told to."""

    def __init__(self, connection: Connection, crowd: _Crowd) -> None:
        self._connection = connection
        self._crowd = crowd
        self._address = connection._socket.getpeername()
        self._number = self._epoch = self._unit = 0
        self._trains = False

    def work(self, over: threading.Event) -> None:
        self._say(wire.Ready(study=KEY))
        due = time.monotonic()
        while not over.is_set():
            if select.select([self._connection], [], [], UNIT_SECONDS / 4)[0]:
                self._hear(self._connection.receive())
            elif self._trains and time.monotonic() >= due:
                due = time.monotonic() + UNIT_SECONDS
                self._unit += 1
                value = 1.0 / self._unit + self._number / 1e6
                said = {"epoch": self._epoch, "unit": self._unit, "step": self._unit}
                self._say(wire.Report(**said, value=value))
        self._connection.close()

    def _say(self, message: wire.FromClient) -> None:
        self._connection.send(message)

    def _hear(self, message: wire.FromBroker) -> None:
        if isinstance(message, wire.Grant):
            self._begin(message)
        elif isinstance(message, wire.Yield | wire.Move):
            if self._trains == isinstance(message, wire.Yield):  # else it is out of date
                self._leave(message.tier)
        elif isinstance(message, wire.Refused):
            raise SystemExit(message.reason)

    def _begin(self, grant: wire.Grant) -> None:
        assert grant.number is not None
        self._crowd.grants += 1
        if grant.number != self._number or not self._unit:
            self._unit = max((each.units for each in grant.checkpoints), default=0)
        self._number, self._epoch, self._trains = grant.number, grant.epoch, True
        self._say(wire.Begin(epoch=self._epoch, number=self._number, trial_id=self._number))
        self._say(wire.FirstBatch(epoch=self._epoch, can_store=True))

    def _leave(self, tier: Any) -> None:
        self._trains = False
        said: dict[str, Any] = {"epoch": self._epoch, "tier": tier, "suspend_seconds": 0.001}
        if tier != "disk":
            self._say(wire.TierChanged(**said, can_store=True))
            return
        self._say(wire.TierChanged(**said, checkpoint=_saved(self._number, self._unit)))
        self._connection.close()
        self._connection, self._unit = _reconnected(self._address), 0
        self._say(wire.Ready(study=KEY))


def _reconnected(address: str) -> Connection:
    """The next worker process, of the same broker."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(address)
    return Connection(sock, "worker")


# -- reporting ---------------------------------------------------------------------------------


def _text(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| setting | hosts | statements/s a host | rows/s a host | broker cores | grants/s | "
        "statements a grant | connections |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        each = row["statements_per_grant"]
        lines.append(
            f"| {row['setting']} | {row['hosts']} | {row['statements_per_second_per_host']:.1f} | "
            f"{row['rows_per_second_per_host']:.0f} | {row['broker_cores']:.3f} | "
            f"{row['grants_per_second']:.1f} | {'' if each is None else f'{each:.0f}'} | "
            f"{row['connections']} |"
        )
    return "\n".join(lines)


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What hosts cost the database that they share.")
    parser.add_argument("--hosts", type=_numbers, default=[1, 2, 4, 8])
    parser.add_argument("--trials", type=int, default=500, help="stored in the ledger")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--slice-seconds", type=float, default=1.0)
    parser.add_argument("--policy", default="round-robin")
    parser.add_argument("--setting", type=_words, default=["idle", "busy"])
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
