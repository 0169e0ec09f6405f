"""``once`` under ``optimize``: real processes that share what is the same for all trials."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optuna_hermes.suspend._state import trial_seed

N_TRIALS = 24
FEW_TRIALS = 12

OBJECTIVE = """
import os, random, signal, socket, sys, threading, time
import numpy as np
from optuna_hermes import once, suspendable

def say(word):
    with open("said", "a") as file:
        file.write(f"{word} {os.getpid()}\\n")

def load(kind):
    say("load")
    if kind == "fails":
        if not os.path.exists("mended"):
            open("mended", "w").close()
            raise OSError("no data yet")
    if kind == "thread":
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    if kind == "file":
        return [np.random.rand(), socket.socket()]
    return [np.random.rand()]

def own_to(number):
    return number

def objective(trial):
    x = trial.suggest_float("x", 0, 1)
    values = once(load, KIND)
    if KIND == "killed" and not os.path.exists("killed") and "load" in open("said").read():
        # Only a successor has a fork server above itself that is no driver.
        with open(f"/proc/{os.getppid()}/stat") as file:
            above = int(file.read().rpartition(")")[2].split()[1])
        with open(f"/proc/{above}/cmdline") as file:
            if "_fork_server" in file.read():
                open("killed", "w").close()
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(60)
    say("trial")
    own = random.random()
    values[0] += 1000 * trial.number  # private: others must not see it
    if KIND == "fails":
        once(lambda: x)
    if KIND == "many":
        once(own_to, trial.number)
        chain, pid = 0, os.getpid()
        while pid > 1:
            with open(f"/proc/{pid}/stat") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
            chain += 1
        with open("chains", "a") as file:
            file.write(f"{chain}\\n")
    run = suspendable(trial)
    for epoch in run.epochs(2):
        for _ in run.batches(range(4)):
            time.sleep(0.02)
        run.report(values[0] + own + 1 / (epoch + 1))
    return run.value
"""

Study = Callable[..., tuple[list[dict[str, Any]], Counter[str], str]]


@pytest.fixture
def run_study(cli: Any, tmp_path: Path, without_torch: dict[str, str]) -> Study:
    def run(kind: str, n_trials: int = N_TRIALS) -> tuple[list[dict[str, Any]], Counter[str], str]:
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "train.py").write_text(f"KIND = {kind!r}\n{OBJECTIVE}")
        done = cli(
            *("optimize", "train.py:objective", "--storage", "sqlite:///study.db", "--json"),
            *("--study-name", "s", "--n-trials", n_trials, "--devices", "cpu:2", "--seed", 0),
            *("--slice-seconds", 0.1),
            cwd=folder,
            env=without_torch,
        )
        assert done.returncode == 0, done.stderr
        said = Counter(line.split()[0] for line in (folder / "said").read_text().splitlines())
        return json.loads(done.stdout)["trials"], said, done.stderr

    return run


def is_exact(trial: dict[str, Any]) -> bool:
    """True for the value that a process computes which shares nothing."""
    shared = float(np.random.RandomState(0).rand()) + 1000 * trial["number"]
    own = random.Random(trial_seed(0, trial["number"])).random()
    return bool(trial["value"] == shared + own + 1 / 2)


def test_trials_inherit_what_the_first_ones_have_loaded(run_study: Study) -> None:
    """It is loaded by few processes, kept from changes of other trials, and changes no value."""
    trials, said, words = run_study("shared")
    # The trials that begin before the successor has loaded, which are short here, and itself.
    assert said["load"] <= N_TRIALS / 2, said
    assert said["trial"] >= N_TRIALS
    assert "once()" not in words
    assert all(map(is_exact, trials))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("thread", "threads were started"),
        pytest.param("file", "it keeps files open", marks=pytest.mark.slow),
    ],
)
def test_what_forks_cannot_share_each_trial_loads(run_study: Study, kind: str, why: str) -> None:
    """The user is told once."""
    trials, said, words = run_study(kind, FEW_TRIALS)
    assert said["load"] >= FEW_TRIALS, said
    assert words.count(f"once() calls load in each trial, since {why}") == 1, words
    assert all(map(is_exact, trials))


def test_an_error_fails_the_trial_and_is_not_kept(run_study: Study) -> None:
    """The trial that meets it is FAIL as in plain Optuna; the next ones load."""
    trials, _, words = run_study("fails", FEW_TRIALS)
    assert Counter(trial["state"] for trial in trials) == {"COMPLETE": FEW_TRIALS - 1, "FAIL": 1}
    assert all(is_exact(trial) for trial in trials if trial["state"] == "COMPLETE")
    assert words.count("make it a function of the file") == 1  # the lambda


def test_a_successor_that_is_killed_takes_no_trial_along(run_study: Study) -> None:
    """The fork server forks again itself, and trials whose processes are gone begin anew."""
    trials, _, _ = run_study("killed")
    assert all(map(is_exact, trials))


@pytest.mark.slow
def test_processes_do_not_become_more_with_each_value(run_study: Study, tmp_path: Path) -> None:
    """Each shared value is kept by a process above the workers: those of 16 arguments are."""
    _, _, words = run_study("many")
    chains = list(map(int, (tmp_path / "many" / "chains").read_text().split()))
    assert max(chains) - min(chains) <= 16
    assert words.count("once() calls own_to in each trial, since 16 other values") == 1, words
