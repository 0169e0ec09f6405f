"""Two hosts, each with its runtime directory, broker and driver, and one study in PostgreSQL."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import optuna
import psutil
import pytest
from optuna.storages import RDBStorage
from optuna.trial import create_trial
from sqlalchemy import create_engine, text

from optuna_hermes import _optuna
from optuna_hermes.broker import connect_with_retry
from optuna_hermes.broker._election import RUNTIME_DIR_VARIABLE
from optuna_hermes.ledger import open_ledger

N_TRIALS, UNITS = 8, 12

CLOCKS_SECONDS = 0.5
"""By so much the clocks of two hosts, as their brokers have read them, may differ.

A lease begins when it is granted. That of a host that is gone ends when that is written, which a
busy machine does later.
"""

OBJECTIVE = """
import os
import time
from pathlib import Path

import torch

from optuna_hermes.pytorch import suspendable

TRAINED = Path(__file__).with_name("trained")
HOST = os.environ["TEST_HOST"]


def objective(trial):
    torch.set_num_threads(1)
    rate = trial.suggest_float("rate", 0.01, 0.1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    run = suspendable(trial, model=model, optimizer=optimizer)
    for epoch in run.epochs({units}):
        for x in run.batches(torch.ones(2, 3, 4)):
            time.sleep(0.15)  # training: longer than a save takes
            loss = (model(x + torch.randn(3, 4)) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with TRAINED.open("a") as file:
            file.write(f"{{HOST}} {{trial.number}} {{epoch}} {{loss.item().hex()}}\\n")
        run.report(loss.item())
    return run.value
"""

STANDS_STILL = """
import signal
from optuna_hermes._optuna import _trials


def stand_still(*_):
    TRAINED.with_name("created").touch()
    signal.pause()


if HOST == "a":
    _trials._opened = stand_still
"""
"""Stops the workers of host ``a`` when they have created a trial, of which no broker knows yet."""

BROKER = """
import socket, sys
name = sys.argv[1]
socket.gethostname = lambda: name
from optuna_hermes.broker._core import _shared_studies
_shared_studies.REFRESH_SECONDS, _shared_studies.DEAD_SECONDS = 0.3, 3.0
from optuna_hermes.broker.__main__ import main
sys.argv = ["broker", "--devices", "cpu:2"]
sys.exit(main())
"""
"""A broker of a host of that name, which is quick to believe that others are dead."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    host: str
    trial: int
    epoch: int
    loss: str


class Study:
    """A study that several hosts work on, and what their trials wrote down."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        (folder / "objective.py").write_text(OBJECTIVE.format(units=UNITS))
        with self.loaded():
            pass

    def trained(self) -> list[Trained]:
        path = self.folder / "trained"
        lines = path.read_text().splitlines() if path.exists() else []
        words = (line.split() for line in lines)
        return [Trained(host=h, trial=int(t), epoch=int(e), loss=x) for h, t, e, x in words]

    @contextmanager
    def loaded(self) -> Iterator[optuna.Study]:
        """The study as Optuna has it, made if it is missing."""
        storage = RDBStorage(self.url)
        yield optuna.create_study(storage=storage, study_name="s", load_if_exists=True)
        storage.engine.dispose()

    def check_leases(self) -> None:
        """Leases of one trial, of whatever host, never overlap, and none is left."""
        with self.loaded() as study:
            key = _optuna.study_key(study)
        ledger = open_ledger(self.url)
        leases = ledger.load_leases(key)
        ledger.close()
        for number in range(N_TRIALS):
            own = [x for x in leases if x.number == number]
            assert all(x.ended is not None for x in own)
            for sooner, later in itertools.pairwise(own):
                assert later.started >= (sooner.ended or 0.0) - CLOCKS_SECONDS

    def wait_until(self, holds: Callable[[], bool], seconds: float = 90.0) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            logs = [path.read_text()[-3000:] for path in self.folder.glob("*.log")]
            assert time.monotonic() < deadline, "\n".join(logs)
            time.sleep(0.05)


class Host:
    """A broker and a driver that know nothing of those of other hosts."""

    def __init__(self, name: str, study: Study, directory: Path) -> None:
        environment = os.environ | {RUNTIME_DIR_VARIABLE: str(directory), "TEST_HOST": name}
        command = [sys.executable, "-m", "optuna_hermes", "optimize"]
        command += [f"{study.folder}/objective.py:objective", "--storage", study.url, "--json"]
        command += ["--study-name", "s", "--n-trials", str(N_TRIALS), "--devices", "cpu:2"]
        command += ["--slice-seconds", "0.2", "--policy", "round-robin", "--seed", "0"]
        command += ["--checkpoint-dir", str(study.folder / "checkpoints")]
        self._out = study.folder / f"{name}.json"
        with (study.folder / f"broker-{name}.log").open("wb") as log:
            broker = subprocess.Popen(
                [sys.executable, "-c", BROKER, name], env=environment, stderr=log
            )
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(RUNTIME_DIR_VARIABLE, str(directory))
            connect_with_retry("viewer").close()
        with self._out.open("wb") as out, (study.folder / f"{name}.log").open("wb") as log:
            driver = subprocess.Popen(command, env=environment, stdout=out, stderr=log)
        self.driver = driver
        self._parts = (broker, driver)

    @property
    def result(self) -> dict[str, object]:
        return dict(json.loads(self._out.read_text()))

    def die(self) -> None:
        """All of its processes are killed at once, as if its power were cut."""
        parts = [psutil.Process(p.pid) for p in self._parts if p.poll() is None]
        processes = [*parts, *(child for p in parts for child in p.children(recursive=True))]
        for process in processes:
            process.suspend()  # so that none sees another one die
        for process in processes:
            process.kill()
        for part in self._parts:
            part.wait()


@pytest.fixture
def study(tmp_path: Path, postgres_url: str) -> Study:
    return Study(tmp_path, postgres_url)


@pytest.fixture
def start_host(study: Study) -> Iterator[Callable[[str], Host]]:
    """``start_host(name)``: a host that works on the study."""
    started: list[Host] = []
    with _directories() as directory:

        def start(name: str) -> Host:
            started.append(Host(name, study, directory(name)))
            return started[-1]

        yield start
        for host in started:
            host.die()


@contextmanager
def _directories() -> Iterator[Callable[[str], Path]]:
    """Runtime directories, whose paths must be short."""
    root = Path(tempfile.mkdtemp(prefix="hermes-", dir="/tmp"))

    def make(name: str) -> Path:
        path = root / name
        path.mkdir(mode=0o700)
        return path

    try:
        yield make
    finally:
        shutil.rmtree(root)


def test_a_host_carries_on_what_another_one_had_when_it_died(
    study: Study, start_host: Callable[[str], Host]
) -> None:
    """Both train while both live; then one is cut off, and every trial ends, with no value lost."""
    first, second = start_host("a"), start_host("b")
    study.wait_until(lambda: Counter(t.host for t in study.trained())["a"] >= 8)
    study.wait_until(lambda: Counter(t.host for t in study.trained())["b"] >= 8)
    second.die()
    had = study.trained()
    assert first.driver.wait(120) == 0, (study.folder / "a.log").read_text()

    with study.loaded() as loaded:
        trials = loaded.get_trials()
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * N_TRIALS
    assert all(len(trial.intermediate_values) == UNITS for trial in trials)
    counted = Counter((each.trial, each.epoch) for each in study.trained())
    assert set(counted) == {(n, epoch) for n in range(N_TRIALS) for epoch in range(UNITS)}
    again = [unit for unit, times in counted.items() if times > 1]
    cut_off = {each.trial for each in had if each.host == "b"}
    assert {trial for trial, _ in again} <= cut_off
    assert max(Counter(trial for trial, _ in again).values(), default=0) <= 1
    values: dict[tuple[int, int], set[str]] = {}
    for each in study.trained():
        values.setdefault((each.trial, each.epoch), set()).add(each.loss)
    assert all(len(known) == 1 for known in values.values()), "what is repeated is the same"
    study.check_leases()
    assert any({t.host for t in study.trained() if t.trial == n} == {"a", "b"} for n in range(8))


def test_a_trial_that_a_dead_host_had_only_created_is_trained_in_the_same_call(
    study: Study, start_host: Callable[[str], Host]
) -> None:
    """The other host waits for the end of its lease, which is written late, and adopts it."""
    objective = OBJECTIVE.format(units=1) + STANDS_STILL
    (study.folder / "objective.py").write_text(objective)
    with study.loaded() as loaded:  # so that the next one is the last
        loaded.add_trials([create_trial(value=0.0)] * (N_TRIALS - 1))
    first = start_host("a")
    study.wait_until((study.folder / "created").exists)
    second = start_host("b")
    study.wait_until(lambda: "0 ended" in (study.folder / "b.log").read_text())
    engine = create_engine(study.url)
    with engine.begin() as connection:
        connection.execute(text("SELECT * FROM hermes_leases WHERE ended IS NULL FOR UPDATE"))
        holder = {"pid": connection.scalar(text("SELECT pg_backend_pid()"))}
        waits = text("SELECT 1 FROM pg_stat_activity WHERE :pid = ANY(pg_blocking_pids(pid))")
        first.die()

        def writes_its_end() -> bool:
            with engine.connect() as other:
                return bool(other.scalar(waits, holder))

        study.wait_until(writes_its_end)
    assert second.driver.wait(60) == 0, (study.folder / "b.log").read_text()
    engine.dispose()
    with study.loaded() as loaded:
        assert [trial.state.name for trial in loaded.get_trials()] == ["COMPLETE"] * N_TRIALS
    assert {(each.host, each.trial) for each in study.trained()} == {("b", N_TRIALS - 1)}
    study.check_leases()


@pytest.mark.slow
def test_hosts_that_live_share_the_work_and_nothing_runs_twice(
    study: Study, start_host: Callable[[str], Host]
) -> None:
    """Each unit is trained once, both do their part, and leases of a trial never overlap."""
    hosts = start_host("a"), start_host("b")
    for host in hosts:
        assert host.driver.wait(120) == 0, [p.read_text() for p in study.folder.glob("*.log")]
    counted = Counter((each.trial, each.epoch) for each in study.trained())
    assert counted == {(n, epoch): 1 for n in range(N_TRIALS) for epoch in range(UNITS)}
    part = Counter(each.host for each in study.trained())
    assert min(part["a"], part["b"]) >= UNITS
    study.check_leases()
