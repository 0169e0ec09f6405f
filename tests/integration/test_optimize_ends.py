"""The end of a call of ``optimize`` whose workers do not end."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import psutil
import pytest

from optuna_hermes import HermesPruner, HermesSampler, _optuna, optimize
from optuna_hermes.ledger import open_ledger
from optuna_hermes.pytorch import suspendable
from optuna_hermes.workers import _driver
from optuna_hermes.workers._optimize import OptimizeResult


@pytest.fixture
def study(storage_url: str) -> optuna.Study:
    return optuna.create_study(storage=storage_url, sampler=HermesSampler(), pruner=HermesPruner())


@pytest.fixture
def stop_when(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], bool]], None]:
    """``stop_when(condition)`` ends the call when a status of the study fulfils it."""

    def stop(condition: Callable[[Any], bool]) -> None:
        monkeypatch.setattr(_driver.Driver, "_should_stop", lambda self, mine: condition(mine))

    return stop


def run(study: optuna.Study, objective: Callable[[optuna.Trial], float]) -> OptimizeResult:
    return optimize(
        study, objective, n_trials=3, devices="cpu:1", slice_seconds=0.05, show_progress=False
    )


def test_a_worker_that_outlasts_the_call_is_ended_before_its_result_is_read(
    study: optuna.Study, stop_when: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A first batch that never ends leaves a trial to begin again, no process and no lease."""
    monkeypatch.setattr(_driver, "suspending_seconds", lambda grace_seconds: 0.2)
    mark = tmp_path / "pid"

    def endless(trial: optuna.Trial) -> float:
        mark.with_suffix(".new").write_text(str(os.getpid()))
        mark.with_suffix(".new").rename(mark)
        threading.Event().wait()
        return 0.0

    stop_when(lambda mine: mark.exists())
    result = run(study, endless)
    assert [trial.state for trial in result.trials] == ["PENDING"]
    assert result.unfinished == 1
    assert not psutil.pid_exists(int(mark.read_text()))
    ledger = open_ledger(_optuna.ledger_url(study))
    (known,) = ledger.load_trials(_optuna.study_key(study))
    (lease,) = ledger.load_leases()
    ledger.close()
    assert known.state == "pending"
    assert lease.ended is not None


def test_a_trial_that_can_only_wait_in_memory_begins_again(
    study: optuna.Study, stop_when: Any, tmp_path: Path
) -> None:
    """The end of the call is the end of its process, and the result says what that leaves."""
    mark = tmp_path / "short"

    def forgetful(trial: optuna.Trial) -> float:
        for unit in range(1, 3 if mark.exists() else 1_000_000):
            trial.report(1 / unit, unit)
            if trial.should_prune():
                raise optuna.TrialPruned
        return 0.0

    stop_when(lambda mine: mine.counts.parked > 0)
    states = {trial.state for trial in run(study, forgetful).trials}
    assert states == {"PENDING"}
    mark.touch()
    stop_when(lambda mine: False)
    again = run(study, forgetful)
    assert [trial.state for trial in again.trials] == ["COMPLETE"] * 3


def test_an_objective_that_catches_all(study: optuna.Study, stop_when: Any, tmp_path: Path) -> None:
    """Its trials are suspended all the same, not pruned, and go on with the next call."""
    mark = tmp_path / "short"

    def careless(trial: optuna.Trial) -> float:
        run = suspendable(trial)
        try:
            for _ in run.epochs(3 if mark.exists() else 1_000_000):
                run.report(1.0)
        except:  # noqa: E722
            raise optuna.TrialPruned from None
        return 0.0

    stop_when(lambda mine: mine.counts.parked > 0)
    first = run(study, careless)
    assert "STORED" in {trial.state for trial in first.trials}
    assert {trial.state.name for trial in study.trials} == {"RUNNING"}
    mark.touch()
    stop_when(lambda mine: False)
    assert [trial.state for trial in run(study, careless).trials] == ["COMPLETE"] * 3
