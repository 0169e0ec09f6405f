"""Trials that fail or end their processes by themselves, and studies of nothing but such trials."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest

from optuna_hermes import HermesPruner, HermesSampler, _optuna, optimize
from optuna_hermes.errors import TrialsFailedError
from optuna_hermes.ledger import open_ledger

ENDING = Path(__file__).parent / "ending.py"
STUDY = ("--json", "--study-name", "s", "--storage")

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(cli: Cli, storage_url: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``run(name, n_trials=1, devices="cpu:1")``: optimize an objective of ``ending.py``."""

    def run(name: str, **options: object) -> subprocess.CompletedProcess[str]:
        given = {"devices": "cpu:1", "seed": 0, "slice_seconds": 0.05, **options}
        flags = [part for key, value in given.items() for part in (_flag(key), value)]
        target = f"{ENDING}:{name}"
        done = cli("optimize", target, *STUDY, storage_url, *flags)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return run


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def states(done: Any) -> list[str]:
    return [trial["state"] for trial in json.loads(done.stdout)["trials"]]


def test_trials_that_end_their_own_processes_fail_and_others_go_on(run: Any) -> None:
    """Each is started again twice; then the console names the signal or the status, and its log."""
    done = run("crashing", n_trials=8, devices="cpu:2")
    assert done.returncode == 0, done.stderr
    assert states(done) == ["FAIL"] * 6 + ["COMPLETE"] * 2
    failed = {line.split()[1]: line for line in done.stderr.splitlines() if " has failed: " in line}
    for number, words in enumerate(
        ["exit status 7", "SIGALRM", "SIGSEGV", "SystemExit", "SIGKILL", "SIGABRT"]
    ):
        if number == 3:
            continue  # an exception like any other
        assert words in failed[str(number)]
        assert f"trial-{number:05d}" in failed[str(number)]
    assert "trial 0 ends by _exit" in done.stderr
    assert "Segmentation fault" in done.stderr
    assert "1 of at most 3 times without a new unit; it begins anew" in done.stderr


def test_units_that_are_trained_again_are_no_progress(run: Any) -> None:
    """A trial that begins anew reports its first units again, and is given up all the same."""
    done = run("crashing_late", n_trials=2)
    assert done.returncode == 0, done.stderr
    assert states(done) == ["FAIL", "COMPLETE"]


@pytest.mark.parametrize("objective", ["beginning_anew", "beginning_anew_in_a_loop"])
def test_a_trial_that_begins_anew_reports_what_it_has_now(
    objective: str, run: Any, storage_url: str
) -> None:
    """Policies would take the last value of its first process for its own, and wait for more."""
    done = run(objective, n_trials=1)
    assert states(done) == ["COMPLETE"]
    study = optuna.load_study(study_name="s", storage=storage_url)
    with contextlib.closing(open_ledger(_optuna.ledger_url(study))) as ledger:
        (curve,) = ledger.load_curves(_optuna.study_key(study)).values()
    assert curve.values == (2.0, 1.0, 2 / 3, 0.5)
    assert study.trials[0].intermediate_values == dict(zip(curve.steps, curve.values, strict=True))


def test_a_trial_that_gets_on_is_not_given_up(run: Any) -> None:
    """Four processes lost, each in another unit, cost the trial nothing."""
    done = run("crashing_rarely", n_trials=1)
    assert done.returncode == 0, done.stderr
    assert states(done) == ["COMPLETE"]
    assert "has failed" not in done.stderr


def test_a_trial_that_misuses_the_api_fails_alone(run: Any) -> None:
    """The study goes on, and the console says what the first one did."""
    done = run("misusing", n_trials=4)
    assert done.returncode == 0, done.stderr
    assert states(done) == ["FAIL", "FAIL", "COMPLETE", "COMPLETE"]
    assert "must be called once" in done.stderr


def test_a_study_of_failures_ends_with_a_status_of_its_own(run: Any) -> None:
    """All its trials have failed: status 3, and why the first one has."""
    done = run("failing", n_trials=3)
    assert done.returncode == 3
    assert states(done) == ["FAIL"] * 3
    assert "All trials have failed (3). Trial 0: ValueError('no such column in trial 0')" in (
        done.stderr
    )


def test_equal_failures_in_a_row_end_a_study(run: Any) -> None:
    """Without a bound on its trials too: after ten that differ in numbers only."""
    done = run("failing")
    assert done.returncode == 3
    assert 10 <= len(states(done)) < 20
    assert "trials have failed alike" in done.stderr
    assert "To go on" in done.stderr


def test_a_bad_region_does_not_end_a_study_in_which_another_trial_trains(run: Any) -> None:
    """Twelve equal failures while trial 0 has come further than they did."""
    done = run("failing_at_first", n_trials=15)
    assert done.returncode == 0, done.stderr
    assert states(done) == ["COMPLETE"] + ["FAIL"] * 12 + ["COMPLETE"] * 2


@pytest.mark.parametrize("n_enqueued", [0, 2])
def test_a_call_whose_trials_all_failed_raises(n_enqueued: int, storage_url: str) -> None:
    """In Python the reason is an error, as under plain Optuna, also if some were not begun."""
    sampler, pruner = HermesSampler(), HermesPruner()
    study = optuna.create_study(storage=storage_url, sampler=sampler, pruner=pruner)
    for _ in range(n_enqueued):
        study.enqueue_trial({})
    objective = f"{ENDING}:failing"
    with pytest.raises(TrialsFailedError, match="no such column"):
        optimize(study, objective, n_trials=1, devices="cpu:1", show_progress=False)


@pytest.mark.slow
def test_silence_in_which_a_trial_works_is_no_hang(run: Any) -> None:
    """Loader workers compute for longer than a trial may be idle: none is killed."""
    done = run("silent", n_trials=2, policy="round-robin", hang_seconds=3)
    assert done.returncode == 0, done.stderr
    assert states(done) == ["COMPLETE"] * 2
    assert "lost its process" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["cpu:1", "cpu:4"])
def test_a_trial_that_does_nothing_is_found(run: Any, devices: str) -> None:
    """A deadlock and a stopped process, with others that wait for the device and without."""
    done = run("deadlocked", n_trials=3, policy="round-robin", hang_seconds=2, devices=devices)
    assert done.returncode == 0, done.stderr
    assert states(done) == ["FAIL", "FAIL", "COMPLETE"]
    assert done.stderr.count("since it hung") >= 2
