"""Processes and hosts that start at the same moment on a new database."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import optuna
import pytest

from optuna_hermes import _optuna, ledger
from optuna_hermes._optuna._storages import backend_of
from support.databases import DatabaseServer

PROCESSES = 4
ROUNDS = 5
N_TRIALS = 4

OBJECTIVE = """
def objective(trial):
    return trial.suggest_float("x", 0.0, 1.0)
"""


def _meet(urls: list[str], barrier: Barrier, errors: Any) -> None:
    """Make the same study in one new database after the other, each time all at once."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    for url in urls:
        barrier.wait(120)
        try:
            study, _ = _optuna.create_study(url, "s")
            ledger.open_ledger(_optuna.ledger_url(study)).close()
            storage = backend_of(study)
            barrier.wait(120)
            assert [each.study_name for each in storage.get_all_studies()] == ["s"]
            storage.engine.dispose()
        except Exception as error:
            errors.put(repr(error))
            barrier.abort()
            return


def _errors_of_a_meeting(urls: list[str], n_processes: int) -> list[str]:
    context = multiprocessing.get_context("spawn")
    barrier, errors = context.Barrier(n_processes), context.SimpleQueue()
    processes = [
        context.Process(target=_meet, args=(urls, barrier, errors)) for _ in range(n_processes)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        assert process.exitcode == 0
        process.close()
    found = []
    while not errors.empty():
        found.append(errors.get())
    return found


def test_processes_that_make_a_study_in_a_new_file_at_once_all_have_it(tmp_path: Path) -> None:
    """None loses the race for SQLite's tables for good, and there is one study."""
    urls = [f"sqlite:///{tmp_path}/{index}.db" for index in range(ROUNDS)]

    assert _errors_of_a_meeting(urls, PROCESSES) == []


def test_processes_that_make_a_study_in_a_new_postgresql_at_once_all_have_it(
    postgres: DatabaseServer,
) -> None:
    """None loses the race for PostgreSQL's tables for good, and there is one study."""
    names = [f"at_once_{index}" for index in range(ROUNDS)]
    for name in names:
        postgres.execute(f"CREATE DATABASE {name}")
    made = [postgres.url.set(database=name) for name in names]
    urls = [url.render_as_string(hide_password=False) for url in made]
    try:
        assert _errors_of_a_meeting(urls, PROCESSES) == []
    finally:
        for name in names:
            postgres.execute(f"DROP DATABASE {name} WITH (FORCE)")


SCRIPT = """
import json
import sys

import optuna

from optuna_hermes import HermesPruner, HermesSampler, optimize


def objective(trial):
    return trial.suggest_float("x", 0.0, 1.0)


if __name__ == "__main__":
    study = optuna.create_study(
        storage=sys.argv[1],
        study_name="s",
        sampler=HermesSampler(),
        pruner=HermesPruner(),
        load_if_exists=True,
    )
    result = optimize(study, objective, n_trials=4, devices="cpu:2")
    print(json.dumps(result.document()))
"""


def _command(url: str, folder: Path) -> list[str]:
    """``optimize`` by the command line."""
    command = [sys.executable, "-m", "optuna_hermes", "optimize"]
    command += [f"{folder}/objective.py:objective", "--storage", url, "--study-name", "s"]
    command += ["--n-trials", str(N_TRIALS), "--devices", "cpu:2"]
    return [*command, "--checkpoint-dir", f"{folder}/checkpoints", "--json"]


def _script(url: str, folder: Path) -> list[str]:
    """``optimize`` by a script that makes its study itself."""
    (folder / "script.py").write_text(SCRIPT)
    return [sys.executable, f"{folder}/script.py", url]


def _start(
    command: list[str], folder: Path, environment: dict[str, str], name: str
) -> subprocess.Popen[bytes]:
    with (folder / f"{name}.out").open("wb") as out, (folder / f"{name}.err").open("wb") as err:
        return subprocess.Popen(command, stdout=out, stderr=err, env=environment)


def _end_together(
    folder: Path,
    url: str,
    environments: list[dict[str, str]],
    command: Callable[[str, Path], list[str]] = _command,
) -> None:
    """Begin a call of ``optimize`` in each environment at once: all end with the whole study."""
    folder.mkdir()
    (folder / "objective.py").write_text(OBJECTIVE)
    arguments = command(url, folder)
    drivers = [_start(arguments, folder, each, f"{n}") for n, each in enumerate(environments)]
    for n, driver in enumerate(drivers):
        assert driver.wait(300) == 0, (folder / f"{n}.err").read_text()
        trials = json.loads((folder / f"{n}.out").read_text())["trials"]
        assert [trial["state"] for trial in trials] == ["COMPLETE"] * N_TRIALS


@pytest.fixture
def on_host(runtime_dir: Path, without_torch: dict[str, str]) -> Callable[[str], dict[str, str]]:
    """``on_host(name)``: the environment of processes of a host, which has a broker of its own."""

    def make(name: str) -> dict[str, str]:
        path = runtime_dir / name
        path.mkdir(mode=0o700, exist_ok=True)
        idle = {"OPTUNA_HERMES_BROKER_IDLE_SECONDS": "1"}
        return without_torch | idle | {"OPTUNA_HERMES_RUNTIME_DIR": str(path)}

    return make


def test_two_calls_of_optimize_that_make_a_study_at_once_do_not_take_it_from_each_other(
    tmp_path: Path, on_host: Callable[[str], dict[str, str]]
) -> None:
    """One driver serves a study of a host: the other one waits for it, whoever made the study."""
    _end_together(tmp_path / "one", f"sqlite:///{tmp_path}/s.db", [on_host("one")] * 2)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_four_calls_of_optimize_on_a_new_file_at_once_all_end_well(
    tmp_path: Path, on_host: Callable[[str], dict[str, str]]
) -> None:
    """Twenty times: four processes of a host, one study, one broker, and every trial ends."""
    for index in range(20):
        url = f"sqlite:///{tmp_path}/{index}.db"
        _end_together(tmp_path / f"{index}", url, [on_host("one")] * 4)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_four_shells_that_start_a_script_at_once_all_end_well(
    tmp_path: Path, on_host: Callable[[str], dict[str, str]]
) -> None:
    """Twenty times: a script that makes its study in a database whose tables are there."""
    for index in range(20):
        url = f"sqlite:///{tmp_path}/{index}.db"
        _optuna.study_names(url)  # makes the tables, for which Optuna's own calls race
        _end_together(tmp_path / f"{index}", url, [on_host("one")] * 4, _script)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_two_hosts_on_a_new_postgresql_at_once_both_end_well(
    tmp_path: Path, on_host: Callable[[str], dict[str, str]], postgres: DatabaseServer
) -> None:
    """Twenty times: two hosts with a broker each, one study, no error."""
    for index in range(20):
        with postgres.database() as url:
            _end_together(tmp_path / f"{index}", url, [on_host("a"), on_host("b")])
