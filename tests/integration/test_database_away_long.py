"""A database that stays away: everything goes to disk, says so, and goes on when it is back."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import accumulate, repeat
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import RDBStorage

from optuna_hermes import _optuna
from optuna_hermes.broker import connect
from optuna_hermes.ledger import open_ledger

N_TRIALS = 3
UNITS = 160
"""More than two devices train until the outage is noted and two brokers have been killed."""
OUTAGE_SECONDS = 3.0

OBJECTIVE = f"""
import time
from pathlib import Path

from optuna_hermes.pytorch import suspendable

TRAINED = Path(__file__).with_name("trained")


def objective(trial):
    x = trial.suggest_float("x", -1, 1)
    run = suspendable(trial)
    for unit in run.epochs({UNITS}):
        for _ in run.batches([0, 1, 2]):
            time.sleep(0.05)  # training
        run.kept["sum"] = run.kept.get("sum", 0.0) + x
        with TRAINED.open("a") as file:
            file.write(f"{{trial.number}} {{unit}}\\n")
        run.report(run.kept["sum"])
    return run.value
"""

BROKER = """
import sys
from optuna_hermes.broker._core import _outage
from optuna_hermes.broker.__main__ import run_broker

_outage.OUTAGE_SECONDS = float(sys.argv[1])
run_broker("cpu:2", idle_seconds=None)
"""


class Scene:
    """A study in SQLite that the command line trains, with a broker whose patience is short."""

    def __init__(self, folder: Path, start_cli: Callable[..., Any]) -> None:
        self.file = folder / "study.db"
        self.url = f"sqlite:///{self.file}"
        self.trained = folder / "trained"
        self._start_cli = start_cli
        (folder / "train.py").write_text(OBJECTIVE)
        with self.storage() as opened:
            optuna.create_study(storage=opened, study_name="s")

    def optimize(self) -> Any:
        return self._start_cli(
            "optimize", "train.py:objective", "--storage", self.url, "--study-name", "s",
            "--n-trials", N_TRIALS, "--policy", "round-robin", "--json", cwd=self.file.parent,
        )  # fmt: skip

    @contextmanager
    def storage(self) -> Iterator[RDBStorage]:
        opened = RDBStorage(self.url)
        yield opened
        opened.engine.dispose()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Another program has locked the database, as a backup that hangs does."""
        with closing(sqlite3.connect(self.file, timeout=60)) as connection:
            connection.execute("BEGIN EXCLUSIVE")
            yield
            connection.rollback()

    def units(self) -> int:
        return self.trained.read_text().count("\n") if self.trained.exists() else 0

    def begun(self) -> bool:
        if not self.units():
            return False
        return len({line.split()[0] for line in self.trained.read_text().splitlines()}) == N_TRIALS

    def check(self, *, repeated: int) -> None:
        """Every trial is complete with every value, and no more units were trained twice."""
        with self.storage() as opened:
            study = optuna.load_study(storage=opened, study_name="s")
            trials, key = study.trials, _optuna.study_key(study)
            ledger = open_ledger(_optuna.ledger_url(study))
        assert [trial.state.name for trial in trials] == ["COMPLETE"] * N_TRIALS
        curves = ledger.load_curves(key)
        for trial in trials:
            values = list(accumulate(repeat(trial.params["x"], UNITS), initial=0.0))[1:]
            assert trial.intermediate_values == dict(enumerate(values, 1))
            assert list(curves[trial.number].values) == values
        assert ledger.load_leases(key, live=True) == []
        ledger.close()
        assert self.units() <= N_TRIALS * UNITS + repeated


@pytest.fixture
def scene(tmp_path: Path, start_cli: Callable[..., Any]) -> Scene:
    return Scene(tmp_path, start_cli)


@contextmanager
def broker(patience: float, runtime_dir: Path, wait_for: Callable[..., Any]) -> Iterator[Any]:
    command = [sys.executable, "-c", BROKER, str(patience)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_for((runtime_dir / "broker.sock").exists)
        yield process
    finally:
        process.kill()
        process.wait()


def kill_broker(runtime_dir: Path, wait_for: Callable[..., Any], but: int = 0) -> int:
    """SIGKILL the broker that listens, another one than ``but``."""

    def there() -> int:
        try:
            pid = int(json.loads((runtime_dir / "broker.json").read_text())["pid"])
        except (OSError, ValueError):
            return 0
        return pid if pid != but and (runtime_dir / "broker.sock").exists() else 0

    pid: int = wait_for(there)
    os.kill(pid, signal.SIGKILL)
    return pid


def served() -> Any:
    """Return the broker's status of its only study; None if it has none."""
    with closing(connect("viewer")) as connection:
        status = connection.ask_status(trials=False)
        return status.studies[0] if status.studies else None


@pytest.mark.slow
def test_an_absence_that_is_too_long_sends_all_to_disk(
    scene: Scene,
    runtime_dir: Path,
    cli: Callable[..., Any],
    wait_for: Callable[..., Any],
) -> None:
    """The screen and ``status`` say so; the same command goes on, and no value is lost."""
    with broker(OUTAGE_SECONDS, runtime_dir, wait_for):
        running = scene.optimize()
        wait_for(scene.begun, 60)
        with scene.away():
            wait_for(lambda: "does not answer; training goes on" in running.stderr, 30)
            wait_for(lambda: served().problem, 30)
            words = " ".join(re.sub("[│┃]", " ", cli("status").stdout).split())
            assert "The database did not answer for 3 s, so every trial was suspended" in words
            assert "bring it back, then run the same command again" in words
            assert "training goes on" not in words
            ended = running.wait(60)
            trained = scene.units()
        assert ended.returncode == 75, ended.stderr
        last = ended.stderr.splitlines()[-1]
        assert last.startswith(
            "error: The database did not answer for 3 s, so every trial was suspended to disk: "
            "bring it back, then run the same command again."
        ), ended.stderr
        assert "Traceback" not in ended.stderr
        assert trained < N_TRIALS * UNITS
        again = scene.optimize().wait(120)
        assert again.returncode == 0, again.stderr
        assert {t["state"] for t in json.loads(again.stdout)["trials"]} == {"COMPLETE"}
    scene.check(repeated=0)


@pytest.mark.slow
def test_brokers_that_are_killed_while_the_database_is_away(
    scene: Scene, runtime_dir: Path, wait_for: Callable[..., Any]
) -> None:
    """Reports that they had not written come back from the workers; nothing is lost or repeated."""
    running = scene.optimize()
    wait_for(scene.begun, 60)
    killed = 0
    with scene.away():
        wait_for(lambda: "does not answer; training goes on" in running.stderr, 30)
        for _ in range(2):
            before = scene.units()
            wait_for(lambda before=before: scene.units() >= before + 10, 30)
            killed = kill_broker(runtime_dir, wait_for, killed)
        before = scene.units()
        wait_for(lambda: scene.units() >= before + 10, 30)
    ended = running.wait(120)
    assert ended.returncode == 0, ended.stderr
    scene.check(repeated=0)


@pytest.mark.slow
def test_a_broker_that_is_killed_when_all_are_on_disk(
    scene: Scene, runtime_dir: Path, wait_for: Callable[..., Any]
) -> None:
    """Nobody lives who could tell what it had not written: it is found beside the checkpoints."""
    with broker(OUTAGE_SECONDS, runtime_dir, wait_for) as process:
        running = scene.optimize()
        wait_for(scene.begun, 60)
        with scene.away():
            assert running.wait(60).returncode == 75, running.stderr
            process.kill()
            process.wait()
    again = scene.optimize().wait(120)
    assert again.returncode == 0, again.stderr
    scene.check(repeated=0)
