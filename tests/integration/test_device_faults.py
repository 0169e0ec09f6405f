"""A broker process over a driver that is changed while it runs; see ``fake_nvml.c``."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from optuna_hermes.broker import Connection, connect_or_start
from optuna_hermes.broker import _election as election
from optuna_hermes.broker._client import _starting
from optuna_hermes.broker._protocol import DeviceStatus

GPUS = "GPU-aaaa,GPU-bbbb"


@pytest.fixture
def say(
    nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """Says what the host of every broker that is started from here is like from now on."""
    path = tmp_path / "host"

    def now(words: str) -> None:
        (tmp_path / "next").write_text(words)
        os.replace(tmp_path / "next", path)

    now("")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml_library))
    monkeypatch.setenv("FAKE_NVML_FILE", str(path))
    monkeypatch.setenv("OPTUNA_HERMES_BROKER_IDLE_SECONDS", "1")
    return now


@pytest.fixture
def start(runtime_dir: Path, say: Callable[[str], None]) -> Iterator[Callable[[str], Connection]]:
    """Starts a broker with these devices; this process loads no driver."""
    connections: list[Connection] = []

    def run(devices: str) -> Connection:
        _starting.start(election.runtime_dir(), devices)
        connections.append(connect_or_start("driver"))  # who only looks keeps none alive
        return connections[-1]

    yield run
    for connection in connections:
        connection.close()


def second_gpu(broker: Connection) -> DeviceStatus:
    """Return the status of GPU-bbbb."""
    return broker.ask_status().devices[-1]


def problem(broker: Connection) -> str:
    return second_gpu(broker).problem


def _begins(text: str, start: str) -> bool:
    return text.startswith(start) if start else not text


def test_status_follows_the_driver(
    runtime_dir: Path,
    start: Callable[[str], Connection],
    say: Callable[[str], None],
    wait_for: Callable[..., Any],
) -> None:
    """Strangers come and go, a GPU reports, is lost and comes back: status and log say so."""
    broker = start(GPUS)
    for words, beginning in (
        ("foreign", "process 4242 computes on it"),
        ("", ""),
        ("no-processes used=9", "10.00 GiB of its memory are taken by processes that cannot be"),
        ("xid=13", ""),
        ("xid=13 xid=79", "it reported XID 79 (fallen off the bus): end the broker, reset the"),
        ("lost", "it cannot be read (GPU is lost): reset it, or restart the host"),
        ("", ""),
    ):
        say(words)
        wait_for(lambda start=beginning: _begins(problem(broker), start), message=beginning)
    assert second_gpu(broker).healthy
    log = election.log_path(runtime_dir).read_text()
    wait_for(lambda: "XID 13 (an exception of a kernel) was reported" in log)
    for words in ("process 4242 computes on it", "all is well again", "XID 79", "GPU is lost"):
        assert f"GPU-bbbb: {words}" in log or words in log


def test_a_gpu_that_cannot_be_looked_into_must_be_named(
    start: Callable[[str], Connection], say: Callable[[str], None]
) -> None:
    """With ``auto`` a GPU whose processes cannot be listed is left alone, and status says why."""
    say("no-processes")
    assert "name it in --devices to use it all the same" in problem(start("auto"))


@pytest.mark.slow
def test_a_slice_of_a_gpu_is_a_device(
    start: Callable[[str], Connection], say: Callable[[str], None], wait_for: Callable[..., Any]
) -> None:
    """A MIG slice is served by its UUID, and lost with its GPU."""
    say("mig")
    broker = start("MIG-cccc")
    assert (second_gpu(broker).id, problem(broker)) == ("MIG-cccc", "")
    say("mig xid=95")
    wait_for(lambda: "it reported XID 95" in problem(broker))


def test_a_driver_that_hangs_holds_up_no_client(
    start: Callable[[str], Connection], say: Callable[[str], None], wait_for: Callable[..., Any]
) -> None:
    """While each of its calls takes seconds, clients are answered at once, and nothing is free."""
    broker = start(GPUS)
    say("sleep=3")
    slowest = 0.0
    deadline = time.monotonic() + 30
    while "has not answered" not in problem(broker):
        begun = time.monotonic()
        second_gpu(broker)
        slowest = max(slowest, time.monotonic() - begun)
        assert time.monotonic() < deadline
    say("")
    wait_for(lambda: problem(broker) == "")
    assert slowest < 1.5


STUDY = """
import json, os, sys, time
import optuna
from optuna_hermes import HermesPruner, HermesSampler, optimize

def objective(trial):
    gpu = os.environ["CUDA_VISIBLE_DEVICES"]
    for unit in range(1, 5):
        trial.report(1 / unit, unit)
        if trial.should_prune():
            raise optuna.TrialPruned
        while gpu == "GPU-aaaa" and not os.path.exists("there"):
            time.sleep(0.01)  # else one GPU might do for both trials
        if unit == 2 and gpu == "GPU-bbbb" and not os.path.exists("mended"):
            open("there", "w").close()
            while sys.argv[1] not in open(os.environ["FAKE_NVML_FILE"]).read():
                time.sleep(0.01)
            if sys.argv[1] == "lost":
                raise RuntimeError("CUDA error: unspecified launch failure")
            time.sleep(60)
    return 1.0

study = optuna.create_study(
    storage="sqlite:///study.db", study_name="s", sampler=HermesSampler(), pruner=HermesPruner()
)
optimize(study, objective, n_trials=2, devices="GPU-aaaa,GPU-bbbb", show_progress=False)
print(json.dumps([t.state.name for t in study.trials]))
"""


def events(folder: Path, kind: str) -> list[tuple[int | None, dict[str, Any]]]:
    with sqlite3.connect(folder / "study.db") as database:
        query = "select number, detail from hermes_events where kind = ? order by rowid"
        rows = database.execute(query, [kind]).fetchall()
    database.close()
    return [(number, json.loads(detail)) for number, detail in rows]


@pytest.mark.parametrize("words", ["lost", pytest.param("failing", marks=pytest.mark.slow)])
def test_a_trial_outlives_its_gpu(
    say: Callable[[str], None], tmp_path: Path, wait_for: Callable[..., Any], words: str
) -> None:
    """A GPU is lost under a trial: no trial fails, its trial is completed on the other GPU.

    With ``lost`` the objective raises what CUDA would; with ``failing`` it hangs until its worker
    is ended.
    """
    (tmp_path / "study.py").write_text(STUDY)
    running = subprocess.Popen(
        [sys.executable, "study.py", words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for((tmp_path / "there").exists, 120)
        say(f"xid=31 {words}")
        out, err = running.communicate(timeout=90)
    finally:
        running.kill()
        running.wait()
    assert running.returncode == 0, err
    assert json.loads(out) == ["COMPLETE", "COMPLETE"]
    ((_, lost),) = events(tmp_path, "device lost")
    assert lost["device"] == "GPU-bbbb"
    assert lost["reason"].startswith("it cannot be read")
    assert len(events(tmp_path, "process lost")) == 1


OBJECTIVE = """
import os


def objective(trial):
    trial.report(1.0, 1)
    trial.should_prune()
    path = os.environ["FAKE_NVML_FILE"]
    with open(path + ".new", "w") as file:
        file.write("energy=7400000")  # 7.4 kJ: an hour of 2 W is 7.2 kJ
    os.replace(path + ".new", path)
    return trial.suggest_float("x", 0, 1)
"""


@pytest.mark.slow
def test_a_trial_is_told_what_it_took(
    say: Callable[[str], None], cli: Callable[..., Any], tmp_path: Path
) -> None:
    """The GPU's counter at the grant and at the end makes watt-hours, for people and programs."""
    say("energy=200000 watts=700000")
    (tmp_path / "train.py").write_text(OBJECTIVE)
    study = ("--storage", f"sqlite:///{tmp_path}/s.db", "--study-name", "s")
    words = ("optimize", "train.py:objective", *study, "--n-trials", 1, "--devices", "GPU-bbbb")
    done = cli(*words, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["watt_hours"] == pytest.approx(2.0)
    assert [trial["watt_hours"] for trial in document["trials"]] == [document["watt_hours"]]
    shown = json.loads(cli("status", *study, "--json").stdout)["study"]
    assert shown["watt_hours"] == shown["trials"][0]["watt_hours"] == document["watt_hours"]
    assert "2.00 Wh" in cli("status", 0, *study).stdout
