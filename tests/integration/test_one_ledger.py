"""Studies whose ledger is a file are trained in one place at a time."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

N_TRIALS = 4

SCRIPT = """
import socket
import sys
from pathlib import Path

import optuna
from optuna.storages import GrpcStorageProxy, JournalStorage
from optuna.storages.journal import JournalFileBackend

from optuna_hermes import HermesPruner, HermesSampler, optimize
from optuna_hermes.errors import HermesError

name, folder = sys.argv[1], Path(sys.argv[2])
socket.gethostname = lambda: name


def objective(trial):
    with (folder / "trained").open("a") as file:
        file.write(f"{trial.number}\\n")
    return trial.suggest_float("x", 0.0, 1.0)


if __name__ == "__main__":
    port = int(next((word[5:] for word in sys.argv if word.startswith("port=")), 0))
    storage = (
        GrpcStorageProxy(host="localhost", port=port)
        if port
        else JournalStorage(JournalFileBackend(str(folder / "journal.log")))
    )
    study = optuna.create_study(
        storage=storage,
        study_name="s",
        load_if_exists=True,
        sampler=HermesSampler(),
        pruner=HermesPruner(),
    )
    if "forget" in sys.argv:
        study.set_user_attr("hermes:ledger", "")
    if "meet" in sys.argv:  # begin when the other one begins
        print("ready", flush=True)
        sys.stdin.readline()
    ledger = sys.argv[-1] if "://" in sys.argv[-1] else None
    how = {"devices": "cpu:1", "show_progress": False, "ledger": ledger}
    try:
        optimize(study, objective, n_trials=int(sys.argv[3]), **how)
    except HermesError as error:
        sys.exit(str(error))
"""

PROXY = """
import sys

from optuna.storages import JournalStorage, run_grpc_proxy_server
from optuna.storages.journal import JournalFileBackend

storage = JournalStorage(JournalFileBackend(sys.argv[1]))
run_grpc_proxy_server(storage, host="localhost", port=int(sys.argv[2]))
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path, without_torch: dict[str, str]) -> Iterator[Start]:
    """``start(host, n_trials, *words)``: a script's process on a host that has its own state."""
    (tmp_path / "script.py").write_text(SCRIPT)
    started: list[subprocess.Popen[str]] = []

    def start(host: str, n_trials: int, *words: str) -> subprocess.Popen[str]:
        environment = without_torch | {"XDG_STATE_HOME": str(tmp_path / f"state-{host}")}
        process = subprocess.Popen(
            [sys.executable, tmp_path / "script.py", host, tmp_path, str(n_trials), *words],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def proxy_port(tmp_path: Path, without_torch: dict[str, str]) -> Iterator[int]:
    """The port of a gRPC proxy before a journal file, which hosts do not see themselves."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = int(free.getsockname()[1])
    words = [sys.executable, "-c", PROXY, tmp_path / "journal.log", str(port)]
    with subprocess.Popen(words, env=without_torch) as process:
        try:
            wait_for_connection(port, process)
            yield port
        finally:
            process.kill()


def wait_for_connection(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("localhost", port), 1):
            return
        time.sleep(0.1)
    raise TimeoutError(f"Nothing listens at port {port}.")


def _begin_together(hosts: list[subprocess.Popen[str]]) -> None:
    """Let scripts that were started with ``meet`` begin at one moment."""
    for host in hosts:
        assert host.stdout is not None
        assert host.stdout.readline() == "ready\n"
    for host in hosts:
        assert host.stdin is not None
        host.stdin.write("go\n")
        host.stdin.flush()


def _trained(folder: Path) -> Counter[str]:
    return Counter((folder / "trained").read_text().split())


def test_a_second_host_is_refused_a_journal_file_until_the_first_ones_ledger_is_given_up(
    tmp_path: Path, start: Start
) -> None:
    """One line names the host that has the ledger, which goes on itself; nothing runs twice."""
    first = start("node1", 2)
    assert first.wait(120) == 0, first.communicate()

    second = start("node2", N_TRIALS)
    said = second.communicate(timeout=120)[1]
    assert second.returncode == 1
    assert "node1" in said.splitlines()[-1]
    assert "PostgreSQL" in said.splitlines()[-1]

    assert start("node1", 3).wait(120) == 0
    assert start("node2", N_TRIALS, "forget").wait(120) == 0
    assert _trained(tmp_path) == {str(number): 1 for number in range(N_TRIALS)}


def test_of_two_hosts_that_start_on_a_journal_file_at_once_one_trains(
    tmp_path: Path, start: Start
) -> None:
    """The other one is refused, and no trial is trained twice."""
    hosts = [start("node1", N_TRIALS, "meet"), start("node2", N_TRIALS, "meet")]
    _begin_together(hosts)
    assert sorted(host.wait(120) for host in hosts) == [0, 1]
    assert _trained(tmp_path) == {str(number): 1 for number in range(N_TRIALS)}


@pytest.mark.parametrize("kind", ["journal", pytest.param("proxy", marks=pytest.mark.slow)])
def test_hosts_that_name_a_database_for_the_ledger_share_a_study_without_one(
    kind: str, tmp_path: Path, start: Start, postgres_url: str, request: pytest.FixtureRequest
) -> None:
    """A third one finds it in the study; one that names another ledger is refused."""
    url = postgres_url.replace(":@", "@")  # no password, not an empty one
    by = () if kind == "journal" else (f"port={request.getfixturevalue('proxy_port')}",)
    hosts = [start(f"node{number}", N_TRIALS, *by, "meet", url) for number in (1, 2)]
    _begin_together(hosts)
    for host in hosts:
        assert host.wait(120) == 0, host.communicate()
    third = start("node3", N_TRIALS + 2, *by)
    assert third.wait(120) == 0, third.communicate()
    assert _trained(tmp_path) == {str(number): 1 for number in range(N_TRIALS + 2)}

    other = start("node4", N_TRIALS + 3, *by, url.replace("postgres@", "other@", 1))
    said = other.communicate(timeout=120)[1]
    assert other.returncode == 1
    assert "--ledger" in said.splitlines()[-1]
    assert "postgresql" in said.splitlines()[-1]


@pytest.mark.parametrize("kind", ["journal", pytest.param("proxy", marks=pytest.mark.slow)])
def test_every_verb_of_the_command_line_takes_a_study_without_a_database(
    kind: str,
    tmp_path: Path,
    cli: Callable[..., Any],
    without_torch: dict[str, str],
    postgres_url: str,
    request: pytest.FixtureRequest,
) -> None:
    """With a ledger that all its hosts share."""
    pytest.importorskip("grpc" if kind == "proxy" else "optuna")
    (tmp_path / "short.py").write_text(SHORT)
    place = "journal.log"
    if kind == "proxy":
        place = f"grpc://localhost:{request.getfixturevalue('proxy_port')}"
    else:
        (tmp_path / place).touch()
    words = ("--storage", place, "--study-name", "s")
    env = without_torch | {"XDG_STATE_HOME": str(tmp_path / "state")}
    ledger = postgres_url.replace(":@", "@")
    command = ("optimize", "short.py:objective", *words, "--ledger", ledger, "--devices", "cpu:1")
    done = cli(*command, "--n-trials", 2, env=env)
    assert done.returncode == 0, done.stderr
    shown = json.loads(cli("status", *words, "--json", env=env).stdout)["study"]
    assert shown["counts"] == {"done": 2}
    refused = cli("finish", *words, "2", env=env)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "trial 2: no such trial" in refused.stderr
    assert cli("best-trial", *words, env=env).returncode == 0


WAITS = """
import os
import time
from pathlib import Path


def objective(trial):
    trial.report(1.0, 0)
    Path(__file__).with_name(f"begun-{os.getpid()}").touch()
    end = time.monotonic() + 60.0
    while not Path(__file__).with_name("go").exists() and time.monotonic() < end:
        time.sleep(0.01)
    return trial.suggest_float("x", 0.0, 1.0)
"""


def test_a_second_broker_is_refused_a_study_in_a_file_while_another_one_trains_it(
    tmp_path: Path,
    storage_url: str,
    runtime_dir: Path,
    cli: Callable[..., Any],
    start_cli: Callable[..., Any],
    without_torch: dict[str, str],
    wait_for: Callable[..., Any],
) -> None:
    """As of two shells, whose folders for temporary files differ; later it is let in."""
    (tmp_path / "waits.py").write_text(WAITS)
    command = ["optimize", "waits.py:objective", "--storage", storage_url, "--study-name", "s"]
    first = start_cli(*command, "--n-trials", 1, "--devices", "cpu:1", env=without_torch)
    wait_for(lambda: list(tmp_path.glob("begun-*")), 60)
    other = runtime_dir / "other"
    other.mkdir(mode=0o700)
    environment = without_torch | {"OPTUNA_HERMES_RUNTIME_DIR": str(other)}

    refused = cli(*command, "--n-trials", 2, "--devices", "cpu:1", env=environment)
    assert refused.returncode == 2, refused.stderr
    assert "one broker at a time" in refused.stderr.splitlines()[-1]

    study = ("--storage", storage_url, "--study-name", "s")
    finished = cli("finish", *study, "--all", env=environment)
    assert finished.returncode == 2, finished.stdout
    assert "trial 0: held by a live process" in finished.stderr
    status = json.loads(cli("status", *study, "--json", env=environment).stdout)["study"]
    assert (status["elsewhere"], status["counts"]) == (True, {"running": 1})

    (tmp_path / "go").touch()
    assert first.wait().returncode == 0, first.stderr
    # The first broker still waits for other clients.
    again = cli(*command, "--n-trials", 2, "--devices", "cpu:1", env=environment)
    assert again.returncode == 0, again.stderr
    cli("broker", "--stop", env=environment)
    trials = optuna.load_study(study_name="s", storage=storage_url).trials
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 2


SHORT = """
def objective(trial):
    for step in range(3):
        trial.report(1.0, step)
        trial.should_prune()
    return trial.suggest_float("x", 0.0, 1.0)
"""


def test_two_brokers_train_two_studies_of_a_file(
    tmp_path: Path,
    storage_url: str,
    runtime_dir: Path,
    start_cli: Callable[..., Any],
    cli: Callable[..., Any],
    without_torch: dict[str, str],
) -> None:
    """Each lease has an epoch that no other one of the file has, and both studies end well."""
    (tmp_path / "short.py").write_text(SHORT)
    for name in "ab":  # `optimize` makes none beside another one
        optuna.create_study(study_name=name, storage=storage_url)
    started = []
    for name in "ab":
        folder = runtime_dir / name
        folder.mkdir(mode=0o700)
        study = ("--storage", storage_url, "--study-name", name, "--n-trials", 20)
        command = ("optimize", "short.py:objective", *study, "--devices", "cpu:2")
        environment = without_torch | {"OPTUNA_HERMES_RUNTIME_DIR": str(folder)}
        started.append((start_cli(*command, env=environment), environment))
    for running, environment in started:
        ended = running.wait(300)
        cli("broker", "--stop", env=environment)
        assert ended.returncode == 0, ended.stderr
    for name in "ab":
        study = optuna.load_study(study_name=name, storage=storage_url)
        assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 20
