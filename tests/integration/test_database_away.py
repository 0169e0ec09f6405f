"""A study whose database is taken away for some seconds loses no trial and no value."""

from __future__ import annotations

import json
import signal
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import optuna
import psutil
import pytest
import sqlalchemy
from optuna.storages import RDBStorage

N_TRIALS = 4
UNITS = 30
AWAY_UNITS = 12
"""So many units are trained while the database is away, and it stays away until they are."""

OBJECTIVE = """
import time
from pathlib import Path

import optuna

TRAINED = Path(__file__).with_name("trained")


def objective(trial):
    x = trial.suggest_float("x", -1, 1)
    for unit in range(1, {units} + 1):
        time.sleep(0.15)  # training
        with TRAINED.open("a") as file:
            file.write(f"{{trial.number}}\\n")
        trial.report(x + unit, unit)
        if trial.should_prune():
            raise optuna.TrialPruned
    return x
"""


@contextmanager
def served() -> Iterator[tuple[str, Any]]:
    """A PostgreSQL server that a test may stop and start."""
    pgserver: Any = pytest.importorskip("pgserver", reason="needs pgserver: pip install pgserver")
    pytest.importorskip("psycopg", reason="needs psycopg: pip install 'psycopg[binary]'")
    with tempfile.TemporaryDirectory(prefix="hermes-pg-") as folder:
        server = pgserver.get_server(folder)
        url = sqlalchemy.make_url(server.get_uri()).set(drivername="postgresql+psycopg")
        try:
            yield url.render_as_string(hide_password=False), server
        finally:
            server.cleanup()


@contextmanager
def stopped(server: Any) -> Iterator[None]:
    """The server ends as in a crash, and is started again on the same data."""
    process = psutil.Process(server.get_pid())
    process.send_signal(signal.SIGQUIT)
    process.wait(30)
    yield
    server.ensure_postgres_running()


@contextmanager
def hanging(server: Any) -> Iterator[None]:
    """The server takes connections and answers nothing."""
    master = psutil.Process(server.get_pid())
    processes = [master, *master.children(recursive=True)]
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


@contextmanager
def storage(url: str) -> Iterator[RDBStorage]:
    """A storage whose connections are closed."""
    opened = RDBStorage(url)
    yield opened
    opened.engine.dispose()


class Watched:
    """A study that is trained by the command line, in processes of its own."""

    def __init__(self, folder: Path, url: str, start_cli: Callable[..., Any]) -> None:
        self.url = url
        self.trained = folder / "trained"
        (folder / "train.py").write_text(OBJECTIVE.format(units=UNITS))
        with storage(url) as opened:
            optuna.create_study(storage=opened, study_name="s")
        arguments = ("--storage", url, "--study-name", "s", "--n-trials", N_TRIALS)
        self.running = start_cli(
            "optimize", "train.py:objective", *arguments, "--devices", "cpu:2", "--json", cwd=folder
        )

    def units(self) -> int:
        return self.trained.read_text().count("\n") if self.trained.exists() else 0

    def all_begun(self) -> bool:
        """A trial that has not begun needs the database to begin."""
        return self.units() > 0 and len(set(self.trained.read_text().split())) == N_TRIALS

    def check(self) -> None:
        """Every trial is complete with every value, and nothing was trained twice."""
        ended = self.running.wait()
        assert ended.returncode == 0, ended.stderr
        assert {t["state"] for t in json.loads(ended.stdout)["trials"]} == {"COMPLETE"}
        with storage(self.url) as opened:
            trials = optuna.load_study(storage=opened, study_name="s").trials
        assert len(trials) == N_TRIALS
        for trial in trials:
            x = trial.params["x"]
            assert trial.intermediate_values == {unit: x + unit for unit in range(1, UNITS + 1)}
        assert self.units() == N_TRIALS * UNITS
        assert "does not answer; training goes on" in ended.stderr
        assert "The database is back." in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("taken_away", [stopped, hanging], ids=["stopped", "hanging"])
def test_postgres_goes_and_comes_back(
    taken_away: Callable[[Any], Any],
    tmp_path: Path,
    start_cli: Callable[..., Any],
    wait_for: Callable[..., Any],
) -> None:
    """Training goes on without its server, and all that was reported is there in the end."""
    with served() as (url, server):
        study = Watched(tmp_path, url, start_cli)
        wait_for(study.all_begun, 120)
        with taken_away(server):
            before = study.units()
            wait_for(lambda: study.units() >= before + AWAY_UNITS, 60)
            wait_for(lambda: "does not answer" in study.running.stderr, 60)
        study.check()


def test_a_locked_sqlite_file_is_waited_for(
    tmp_path: Path, start_cli: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    """Another program that locks the file stops nobody's training."""
    file = tmp_path / "study.db"
    study = Watched(tmp_path, f"sqlite:///{file}", start_cli)
    wait_for(study.all_begun, 120)
    with closing(sqlite3.connect(file, timeout=60)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        before = study.units()
        wait_for(lambda: study.units() >= before + AWAY_UNITS, 60)
        wait_for(lambda: "does not answer" in study.running.stderr, 60)
        connection.rollback()
    study.check()
