"""``optuna-hermes simulate`` as its users run it."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import psutil
import pytest

from optuna_hermes.cli import run
from optuna_hermes.policies import Policy
from optuna_hermes.replay import REFERENCES
from optuna_hermes.testing import PolicyContract

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "examples" / "curves").glob("*.npz"))
PROMISED_LOOPS = 60
"""Processor time of the shipped curves, in that of ``_loop_seconds``.

10 of it were measured on an idle machine, 30 where others computed on its two cores meanwhile.
"""

Cli = Callable[..., "subprocess.CompletedProcess[str]"]

OWN_POLICY = """
from optuna_hermes.model import Assignment, Decision
from optuna_hermes.policies import Fifo, Policy


class LastFirst(Policy):
    def decide(self, snapshot):
        free = [device.id for device in snapshot.devices if device.free]
        waiting = sorted(trial.number for trial in snapshot.trials if trial.state == "parked")
        trial = None if snapshot.unstarted.any else waiting[-1] if waiting else None
        return Decision(assignments=(Assignment(trial=trial, devices=(free[0],)),))


class Stops(Fifo):
    def decide(self, snapshot):
        return Decision() if snapshot.finished else super().decide(snapshot)

class Raises(Policy):
    def decide(self, snapshot):
        raise KeyError("x")


class NoPolicy:
    pass
"""

OBJECTIVE = """
import optuna


def objective(trial):
    x = trial.suggest_float("x", -1, 1)
    for unit in range(1, 5):
        trial.report(unit - x * x, unit)
        if trial.should_prune():
            raise optuna.TrialPruned
    return 4 - x * x
"""


PAGE = (ROOT / "docs" / "which-policy.md").read_text()
PAGE_POLICY = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[0]


def page_policy() -> Policy:
    """The policy that the page shows."""
    names: dict[str, Any] = {}
    exec(PAGE_POLICY, names)
    return names["MyPolicy"]()


def save(folder: Path, name: str, **changes: Any) -> str:
    """A set of 8 trials of 5 units in the folder; returns its file's name."""
    rng = np.random.default_rng(0)
    value = np.sort(rng.random((8, 6)), axis=1)[:, ::-1]
    meta = {"name": name, "family": name[0]}
    arrays = {"value": value, "seconds": np.ones((8, 5)), "length": np.full(8, 5), **changes}
    np.savez(folder / f"{name}.npz", meta=json.dumps(meta), **arrays)
    return f"{name}.npz"


def strict_json(text: str) -> Any:
    """Refuses NaN and infinity, which are no JSON."""
    return json.loads(text, parse_constant=pytest.fail)


def test_a_table_with_a_line_for_each_policy(cli: Cli, tmp_path: Path) -> None:
    """Policies that were asked for, and those that they are compared with, and nothing else."""
    files = [save(tmp_path, "a1"), save(tmp_path, "b1")]
    done = cli("simulate", *files, "--policy", "hermes,median-stop", "--devices", 2, "--seeds", 3)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "2 curve sets: 8 trials, 2 devices, 3 seeds, switch cost 0.5 %"
    for policy in ("hermes", "median-stop", *REFERENCES):
        assert sum(line.split()[:1] == [policy] for line in lines) == 2  # all sets, and families
    assert max(map(len, lines)) <= 80


def test_the_document_has_every_simulation(cli: Cli, tmp_path: Path) -> None:
    """``--json`` gives settings, each simulation's figures, and the table; never NaN."""
    file = save(tmp_path, "a1")
    words = ("--policy", "hermes,fifo", "--trials", 6, "--seeds", 2, "--switch-cost", 0.25)
    done = cli("simulate", file, *words, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    document = strict_json(done.stdout)
    assert document["settings"] == {
        "sets": [{"name": "a1", "family": "a", "trials": 8}],
        "policies": ["hermes", "fifo", "round-robin", "oracle"],
        "devices": 1,
        "trials": 6,
        "seeds": [0, 1],
        "switch_cost": 0.25,
    }
    found = {(each["policy"], each["seed"]): each for each in document["results"]}
    assert sorted(found) == sorted((p, s) for p in document["settings"]["policies"] for s in (0, 1))
    fifo = found["fifo", 0]
    assert (fifo["set"], fifo["work_seconds"], fifo["switches"]) == ("a1", 30.0, 6)
    assert fifo["best_seconds"] % 5.25 == 0
    assert fifo["killed_best"] is False
    (row,) = (row for row in document["table"] if row["policy"] == "fifo")
    mean = (fifo["best_seconds"] + found["fifo", 1]["best_seconds"]) / 2
    assert row["best_seconds"] == pytest.approx(mean)
    assert row["ratios"]["fifo"]["best_seconds"] == pytest.approx(1.0)
    assert row["families"] == {"a": pytest.approx(1.0)}


def test_seeds_may_be_listed(cli: Cli, tmp_path: Path) -> None:
    """A list of seeds gives the figures that they have among others."""
    words = ("simulate", save(tmp_path, "a1"), "--policy", "fifo", "--trials", 6, "--json")
    all_, some = (
        strict_json(cli(*words, "--seeds", seeds).stdout)["results"] for seeds in ("4", "1,3")
    )
    assert some == [each for each in all_ if each["seed"] in (1, 3)]


@pytest.mark.parametrize("where", ["mine:LastFirst", "mine.py:LastFirst"])
def test_a_policy_of_ones_own(where: str, cli: Cli, tmp_path: Path) -> None:
    """A class in a module or a file of this folder is simulated like the others."""
    (tmp_path / "mine.py").write_text(OWN_POLICY)
    done = cli("simulate", save(tmp_path, "a1"), "--policy", where, "--seeds", 3, "--json")
    assert done.returncode == 0, done.stderr
    results = strict_json(done.stdout)["results"]
    own = [each for each in results if each["policy"] == where]
    # All trials are opened, then the last goes on to its end: the device changes 8 + 7 times.
    assert [each["switches"] for each in own] == [15] * 3


def test_the_policy_of_the_page(cli: Cli, tmp_path: Path) -> None:
    """The page's policy is simulated under the name that it says, and has 20 lines at most."""
    assert len(PAGE_POLICY.splitlines()) <= 20
    (tmp_path / "mymodule.py").write_text(PAGE_POLICY)
    done = cli("simulate", save(tmp_path, "a1"), "--policy", "hermes,mymodule:MyPolicy")
    assert done.returncode == 0, done.stderr
    assert any(line.split()[:1] == ["mymodule:MyPolicy"] for line in done.stdout.splitlines())


class TestPolicyOfThePage(PolicyContract):
    """The page's policy keeps the contract."""

    policy = page_policy()


BAD_WORDS: dict[str, tuple[list[str], str]] = {
    "nothing": ([], "Name either files with curves, or a study"),
    "files and a study": (["a1.npz", "--study-name", "s"], "Name either files"),
    "a study without a storage": (["--study-name", "s"], "add --storage URL"),
    "a storage without a study": (
        ["a1.npz", "--storage", "sqlite:///x.db"],
        "--storage needs --study-name",
    ),
    "jobs and a storage": (
        ["--jobs", "j.csv", "--storage", "sqlite:///x.db"],
        "--storage needs --study-name",
    ),
    "devices that power down": (["a1.npz", "--policy", "energy:fifo"], "name 'fifo' alone"),
    "no such study": (["--storage", "sqlite:///x.db", "--study-name", "s"], "'x.db'"),
    "no such file": (["b.npz"], "b.npz"),
    "a wrong file": (["mine.py"], "must be an .npz file"),
    "no unit": (["no-unit.npz"], "a trial and a unit at least"),
    "NaN only": (["nan.npz"], "finite value"),
    "a set twice": (["a1.npz", "a1.npz"], "2 are called 'a1'"),
    "no devices": (["a1.npz", "--devices", "0"], "--devices"),
    "no trials": (["a1.npz", "--trials", "0"], "--trials"),
    "no seeds": (["a1.npz", "--seeds", "0"], "--seeds"),
    "seeds that are none": (["a1.npz", "--seeds", "1,x"], "'1,x'"),
    "a seed of very many digits": (["a1.npz", "--seeds", "9" * 5000], "must be a number"),
    "a seed twice": (["a1.npz", "--seeds", "1,1"], "'1,1': `--seeds 2` means 0,1."),
    "a negative cost": (["a1.npz", "--switch-cost", "-1"], "--switch-cost"),
    "a cost that is no number": (["a1.npz", "--switch-cost", "nan"], "--switch-cost"),
    "no policy": (["a1.npz", "--policy", ""], "one of hermes, "),
    "an unknown policy": (["a1.npz", "--policy", "fifo,best"], "oracle"),
    "no such class": (["a1.npz", "--policy", "mine:Best"], "'Best'"),
    "a budget for no sampler": (["a1.npz", "--budget", "9"], "--budget needs --sampler"),
    "an unknown sampler": (["a1.npz", "--sampler", "Best"], "TPESampler"),
    "no budget": (["a1.npz", "--sampler", "TPESampler", "--budget", "0"], "above 0"),
    "nothing to sample": (["a1.npz", "--sampler", "TPESampler"], "a1 has no params"),
    "no list to foresee": (
        ["a1.npz", "--sampler", "TPESampler", "--policy", "oracle"],
        "With a sampler a policy must be one of hermes, ",
    ),
    "a pruner that is not there": (
        ["a1.npz", "--sampler", "TPESampler", "--policy", "median-stopp"],
        "did you mean 'median-stop'?",
    ),
    "a class that is no policy": (["a1.npz", "--policy", "mine:NoPolicy"], "mine:NoPolicy"),
}


@pytest.mark.parametrize("kind", BAD_WORDS)
def test_bad_input_is_one_line(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Status 2, one line that says what is wrong, and nothing on standard output."""
    save(tmp_path, "a1")
    save(tmp_path, "no-unit", value=np.ones((8, 1)), seconds=np.ones((8, 0)))
    save(tmp_path, "nan", value=np.full((8, 6), np.nan))
    (tmp_path / "mine.py").write_text(OWN_POLICY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPTUNA_STORAGE", raising=False)
    words, says = BAD_WORDS[kind]
    status = run(["simulate", *words])
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert says in err


@pytest.mark.parametrize("words", [["a1.npz"], ["--jobs", "jobs.csv"]], ids=["trials", "jobs"])
def test_a_policy_that_fails_leaves_the_others_their_lines(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Status 2, and what it did: one raises, one assigns nothing while trials or jobs are left."""
    save(tmp_path, "a1")
    (tmp_path / "jobs.csv").write_text("submitted,seconds\n0,9\n1,9\n2,9\n")
    (tmp_path / "mine.py").write_text(OWN_POLICY)
    monkeypatch.chdir(tmp_path)
    assert run(["simulate", *words, "--policy", "mine:Raises,mine:Stops,qssf", "--json"]) == 2
    out, err = capsys.readouterr()
    document = strict_json(out)
    assert {each["policy"] for each in document["results"]} >= {"qssf", "fifo"}
    assert set(document["failed"]) == {"mine:Raises", "mine:Stops"}
    raised, stopped = err.splitlines()
    assert raised.startswith("error: Policy Raises raised KeyError('x') at ")
    assert re.match("error: A policy must serve every (trial|job) in the end but Stops ", stopped)
    assert run(["simulate", *words, "--policy", "mine:Stops"]) == 2
    assert "fifo" in capsys.readouterr().out


def test_with_a_sampler_studies_are_replayed(cli: Cli, tmp_path: Path) -> None:
    """Trials are proposed until the budget is spent; the table says how soon they were good."""
    file = save(tmp_path, "a1", params=np.arange(8.0)[:, None], param_names=np.array(["lr"]))
    words = ("--sampler", "RandomSampler", "--budget", 3, "--seeds", 2)
    done = cli("simulate", file, *words, "--policy", "hermes,asha-stop", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    document = strict_json(done.stdout)
    assert document["settings"]["policies"] == ["hermes", "asha-stop", "fifo"]
    assert len(document["results"]) == 6
    for each in document["results"]:
        assert 0 < each["any5"] <= each["any1"] <= each["fin1"] <= 1
        assert (each["policy"] == "fifo") <= (each["trials_opened"] == 3)
    shown = cli("simulate", file, *words, "--policy", "hermes,asha-stop")
    assert max(map(len, shown.stdout.splitlines())) <= 80
    assert shown.stdout.startswith("a1: RandomSampler, a budget of 3 full trainings")
    rows = [line.split()[0] for line in shown.stdout.splitlines() if "1.00x" in line]
    assert "fifo" in rows


def test_a_study_of_ones_own(cli: Cli, tmp_path: Path, storage_url: str) -> None:
    """A maximised study runs under the page's policy, and is replayed as its ledger has it."""
    (tmp_path / "train.py").write_text(OBJECTIVE)
    where = ("--storage", storage_url, "--study-name", "mine")
    assert cli("create-study", *where, "--direction", "maximize").returncode == 0
    (tmp_path / "mymodule.py").write_text(PAGE_POLICY)
    own = ("--policy", "mymodule:MyPolicy", "--devices", "cpu:2")
    trained = cli("optimize", "train.py:objective", *where, "--n-trials", 6, *own)
    assert trained.returncode == 0, trained.stderr
    study = optuna.load_study(study_name="mine", storage=storage_url)
    study.tell(study.ask(), state=optuna.trial.TrialState.FAIL)
    done = cli("simulate", *where, "--policy", "hermes", "--json")
    says = "1 trial left out (6) that failed, or have no recorded value.\n"
    assert (done.returncode, done.stderr) == (0, says)
    document = strict_json(done.stdout)
    assert document["settings"]["left_out"] == 1
    assert document["settings"]["sets"] == [{"name": "mine", "family": "study", "trials": 6}]
    assert document["settings"]["trials"] == 6, "all of them, however many"
    (oracle,) = (each for each in document["results"] if each["policy"] == "oracle")
    assert 0 < oracle["best_seconds"] < oracle["work_seconds"]


def test_ctrl_c_ends_it(
    start_cli: Callable[..., Any], wait_for: Callable[..., Any], tmp_path: Path
) -> None:
    """Status 130, no traceback, and no process is left."""
    n = 1000
    value = np.random.default_rng(0).random((n, 41))
    arrays = {"value": value, "seconds": np.ones((n, 40)), "length": np.full(n, 40)}
    file = save(tmp_path, "a1", **arrays)
    command = start_cli("simulate", file, "--trials", n, "--seeds", 100)
    process = psutil.Process(command.process.pid)
    children = wait_for(process.children) if len(process.cpu_affinity()) > 1 else []
    command.send(signal.SIGINT)
    done = command.wait(60.0)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    assert not any(child.is_running() for child in children)


@pytest.mark.slow
def test_the_shipped_curves_take_seconds() -> None:
    """Right after install the first command of the page prints its table, start-up and all."""
    loops = [_loop_seconds()]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "optuna_hermes", "simulate", *map(str, SHIPPED)]
    # A user's environment has no number of threads.
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env=env
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    loops.append(_loop_seconds())
    assert (done.returncode, done.stderr) == (0, "")
    assert "hermes" in done.stdout
    # Processor time, in that of a loop: neither other work nor a slow machine stretches the ratio.
    used = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    assert used <= PROMISED_LOOPS * max(loops)


def _loop_seconds() -> float:
    """Processor time of ten million steps of a loop, which take about half a second to two."""
    before = time.process_time()
    total = 0
    for each in range(10**7):
        total += each * each
    return time.process_time() - before
