"""Calls of ``optimize`` for a study that another process of the host optimizes."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import psutil
import pytest

from optuna_hermes import HermesPruner, HermesSampler, optimize
from optuna_hermes.errors import StudyTakenError
from support.objectives import TRAINS_UNTIL_GO

WAITS = "optimizes this study on this host: waiting for it"


@pytest.fixture
def start(
    tmp_path: Path, start_cli: Callable[..., Any], storage_url: str, without_torch: dict[str, str]
) -> Callable[..., Any]:
    """``start(*more)``: the same call of ``optimize`` in one more process."""
    (tmp_path / "train.py").write_text(TRAINS_UNTIL_GO)
    study = ("--storage", storage_url, "--study-name", "s", "--n-trials", 2, "--devices", "cpu:2")

    def make(*more: object) -> Any:
        call = ("optimize", "train.py:objective", *study, "--json", *more)
        return start_cli(*call, cwd=tmp_path, env=without_torch)

    return make


def states(ended: Any) -> list[str]:
    assert ended.returncode == 0, ended.stderr
    return [trial["state"] for trial in json.loads(ended.stdout)["trials"]]


@pytest.mark.slow
def test_calls_wait_for_the_one_that_optimizes_their_study(
    tmp_path: Path, start: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    """A call that waits keeps to its timeout and Ctrl-C, and takes over from a killed one."""
    first = start()
    wait_for(lambda: len([*tmp_path.glob("begun-*")]) == 2, 120)
    late, stopped, heir = start("--timeout", 20), start(), start("--policy", "round-robin")
    for each in (late, stopped, heir):
        wait_for(lambda each=each: WAITS in each.stderr, 120)
    stopped.send(signal.SIGINT)
    assert stopped.wait().returncode == 130
    assert late.wait().returncode == 0
    goes_on = f"Stopped waiting: process {first.process.pid} goes on with the study."
    assert goes_on in late.stderr
    assert goes_on in stopped.stderr
    for path in tmp_path.glob("begun-*"):
        path.unlink()
    first.kill()
    wait_for(lambda: len([*tmp_path.glob("begun-*")]) == 2, 120)
    (tmp_path / "go").touch()
    assert states(heir.wait()) == ["COMPLETE"] * 2
    assert heir.stderr.count(WAITS) == 1


def test_a_call_that_waited_returns_with_the_study(
    tmp_path: Path, start: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    """Once the first call has all trials, the one that waited has the same result."""
    first = start()
    wait_for(lambda: len([*tmp_path.glob("begun-*")]) == 2, 120)
    second = start()
    wait_for(lambda: WAITS in second.stderr, 120)
    (tmp_path / "go").touch()
    assert states(first.wait()) == states(second.wait()) == ["COMPLETE"] * 2


@pytest.mark.slow
def test_a_broker_that_dies_is_replaced_by_who_optimizes(
    tmp_path: Path, runtime_dir: Path, start: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    """The call that waits does not take the study while its driver starts another broker."""
    first = start()
    wait_for(lambda: len([*tmp_path.glob("begun-*")]) == 2, 120)
    second = start()
    wait_for(lambda: WAITS in second.stderr, 120)
    broker = psutil.Process(json.loads((runtime_dir / "broker.json").read_text())["pid"])
    broker.kill()
    wait_for(lambda: "Starting another one" in first.stderr, 120)
    (tmp_path / "go").touch()
    assert states(first.wait()) == states(second.wait()) == ["COMPLETE"] * 2
    assert WAITS not in first.stderr


def test_a_second_call_in_the_same_process_is_refused(storage_url: str) -> None:
    """A callback that optimizes its own study would wait for itself."""
    study = optuna.create_study(storage=storage_url, sampler=HermesSampler(), pruner=HermesPruner())
    raised: list[str] = []

    def again(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        with pytest.raises(StudyTakenError) as error:
            optimize(study, "math:cos", n_trials=2, devices="cpu:1", show_progress=False)
        raised.append(str(error.value))
        study.stop()

    optimize(study, lambda trial: 1.0, 2, devices="cpu:1", callbacks=[again], show_progress=False)
    assert "already being optimized by process" in raised[0]
