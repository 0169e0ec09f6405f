"""``optimize()`` as scripts call it: real processes, an objective of ``__main__``."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest

from optuna_hermes import HermesPruner, HermesSampler, optimize
from optuna_hermes.broker import connect_or_start
from optuna_hermes.broker._power_commands import power_commands
from optuna_hermes.errors import StorageError, UnknownPolicyError

SCRIPT = """
import optuna
from helper import loss  # beside the script, as users have it

from optuna_hermes import HermesPruner, HermesSampler, optimize


def objective(trial):
    x = trial.suggest_float("x", -1, 1)
    for unit in range(1, 5):
        trial.report(loss(x, unit), unit)
        if trial.should_prune():
            raise optuna.TrialPruned
    print("objective says hello")
    return loss(x, 4)


study = optuna.create_study(
    storage="sqlite:///study.db", study_name="s", load_if_exists=True,
    sampler=HermesSampler(), pruner=HermesPruner(),
)
{call}
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "helper.py").write_text("def loss(x, unit):\n    return x * x + 1 / unit\n")

    def run(call: str) -> subprocess.CompletedProcess[str]:
        (folder / "train.py").write_text(SCRIPT.format(call=call))
        command = [sys.executable, "scripts/train.py"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


def study_in(tmp_path: Path) -> optuna.Study:
    return optuna.load_study(study_name="s", storage=f"sqlite:///{tmp_path / 'study.db'}")


def test_a_script_in_development_mode_shows_nothing_of_ours(
    script: Callable[[str], subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its own process nor the fork server leaves a socket or a file open."""
    monkeypatch.setenv("PYTHONDEVMODE", "1")
    done = script("optimize(study, objective, 2, devices='cpu:1', show_progress=False)")
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


def test_without_progress_only_warnings_are_shown(script: Any) -> None:
    """Nothing where all goes well; but trials that nobody can store would be lost in silence.

    So they would be for a script that configures logging, which disables what it does not name.
    """
    call = "import logging.config\nlogging.config.dictConfig({{'version': 1}})\n"
    call += "optimize(study, objective, {}, devices='cpu:1', show_progress=False{})"
    (optunas,) = script(call.format(1, "")).stderr.splitlines()
    assert "A new study created" in optunas
    _, shown, *_ = script(call.format(2, ", checkpoint_dir=__file__")).stderr.splitlines()
    assert shown.startswith("Cannot write into ")
    assert shown.endswith(" Until then suspended trials wait in memory only.")


def test_a_call_with_nothing_left_to_train_says_why(script: Any) -> None:
    """As where a script has called ``study.optimize(objective, n_trials=1)`` in a loop."""
    done = script("for _ in range(2): optimize(study, objective, n_trials=1, devices='cpu:1')")
    said = [line for line in done.stderr.splitlines() if line.startswith("Nothing was left")]
    assert said == [
        "Nothing was left to train: n_trials=1 is the number of trials that the study shall have "
        "in the end, and it has 1."
    ]


def test_what_a_script_does_not_get_is_said(script: Any) -> None:
    """An objective that collects its values fills a list of its own process."""
    done = script(
        "values = []\n"
        "def collects(trial):\n"
        "    values.append(objective(trial))\n"
        "    return values[-1]\n"
        "optimize(study, collects, n_trials=2, devices='cpu:1')\n"
        "print(values)\n"
    )
    assert done.stdout == "[]\n", done.stderr
    assert done.stderr.count(" changes values in its own process: ") == 1


def test_a_script_without_a_main_guard_runs_once(script: Any, tmp_path: Path) -> None:
    """Workers take the objective by value and import what the script could import."""
    done = script("optimize(study, objective, n_trials=3, devices='cpu:1', seed=1)\nprint('end')")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["end"]
    assert [trial.state.name for trial in study_in(tmp_path).trials] == ["COMPLETE"] * 3
    logs = list((tmp_path / "study.db.hermes").rglob("output.log"))
    assert len(logs) == 3
    assert all("objective says hello" in log.read_text() for log in logs)


def test_the_seed_of_the_sampler_counts(script: Any) -> None:
    """Under ``optimize``, too, it makes a study repeatable, as if it were given to the call."""
    done = script(
        "for name, of_call, of_sampler in (('a', 5, None), ('b', None, 5)):\n"
        "    study = optuna.create_study(\n"
        "        storage='sqlite:///study.db', study_name=name,\n"
        "        sampler=HermesSampler(seed=of_sampler), pruner=HermesPruner(),\n"
        "    )\n"
        "    optimize(study, objective, n_trials=2, devices='cpu:1', seed=of_call)\n"
        "    print(*(trial.params['x'] for trial in study.trials))\n"
    )
    assert done.returncode == 0, done.stderr
    of_call, of_sampler = done.stdout.splitlines()
    assert of_call == of_sampler


def test_the_devices_of_the_sampler_count(script: Any) -> None:
    """Unless the call names others."""
    call = "print(*optimize(study, objective, n_trials={}{}).devices)\n"
    done = script(
        "study.sampler = HermesSampler(devices='cpu:3')\n"
        + call.format(1, "")
        + call.format(2, ", devices='cpu:1'")
    )
    assert done.stdout.splitlines() == ["cpu:0 cpu:1 cpu:2", "cpu:0"], done.stderr


@pytest.mark.parametrize("commands", [(), ("/bin/echo {device}",) * 2], ids=["none", "broker's"])
def test_a_policy_that_could_power_no_device_down(script: Any, commands: tuple[str, ...]) -> None:
    """A line says so, unless a broker at work has the commands."""
    power = power_commands(*commands) if commands else None
    with contextlib.closing(connect_or_start("viewer", "cpu:1", power)):
        done = script(
            "optimize(study, objective, n_trials=1, devices='cpu:1', policy='energy:fifo')"
        )
    assert done.returncode == 0, done.stderr
    noted = done.stderr.count("energy:fifo powers no device down: this host's broker was started")
    assert noted == (0 if commands else 1)


def test_devices_that_an_earlier_call_named_are_not_those_of_the_next(script: Any) -> None:
    """While they are in use they are, and a line says so."""
    call = "print(*optimize(study, objective, n_trials={}).devices)"
    with contextlib.closing(connect_or_start("driver", "cpu:1")) as other:
        done = script(call.format(1))
        assert done.stdout.split() == ["cpu:0"], done.stderr
        broker = f"the broker (process {other.welcome.pid}) was started with these devices"
        assert f"Trains on cpu:1: {broker}, and another process uses it." in done.stderr
    done = script(call.format(2))
    assert done.stdout.split() not in ([], ["cpu:0"]), done.stderr
    assert "Trains on" not in done.stderr


def test_a_study_in_memory_is_refused_at_the_callers_line(script: Any) -> None:
    """Whoever made a mistake in the call sees the call, and not what is beneath it."""
    done = script(
        "study = optuna.create_study()\noptimize(study, objective, n_trials=1, checkpoint_dir='c')"
    )
    assert done.returncode == 1
    assert "but this study is in memory" in done.stderr.splitlines()[-1]
    frames = [line for line in done.stderr.splitlines() if line.startswith('  File "')]
    assert len(frames) == 2


def test_checkpoints_may_go_to_a_folder_by_its_name(script: Any, tmp_path: Path) -> None:
    """A string does as well as a path."""
    done = script("optimize(study, objective, 1, devices='cpu:1', checkpoint_dir='elsewhere')")
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "elsewhere").rglob("output.log"))


def test_a_callback_can_stop_the_study(script: Any, tmp_path: Path) -> None:
    """Callbacks get study and trial as in Optuna, and ``study.stop()`` suspends the rest."""
    done = script(
        "finished = []\n"
        "def enough(study, trial):\n"
        "    finished.append(trial.state.name)\n"
        "    if len(finished) == 3:\n"  # the policy decides which ones
        "        study.stop()\n"
        "optimize(study, objective, devices='cpu:1', callbacks=[enough])\n"
        "print(finished)"
    )
    assert done.returncode == 0, done.stderr
    assert "['COMPLETE', 'COMPLETE', 'COMPLETE'" in done.stdout
    assert 3 <= len(study_in(tmp_path).trials) < 200


def test_an_error_of_a_callback_is_not_the_broker_s(script: Any) -> None:
    """A callback may ask another broker, or optimize another study: its error ends the call."""
    done = script(
        "from optuna_hermes.errors import BrokerError\n"
        "def fails(study, trial):\n"
        "    raise BrokerError('mine')\n"
        "optimize(study, objective, devices='cpu:1', callbacks=[fails])\n"
    )
    assert done.returncode == 1
    assert done.stderr.endswith("BrokerError: mine\n")
    assert "Starting another one" not in done.stderr


def test_ctrl_c_is_raised_in_the_script(script: Any, tmp_path: Path) -> None:
    """After everything is suspended the caller gets its KeyboardInterrupt."""
    done = script(
        "import os, signal\n"
        "def interrupt(study, trial):\n"
        f"    os.kill(os.getpid(), {int(signal.SIGINT)})\n"
        "try:\n"
        "    optimize(study, objective, devices='cpu:1', callbacks=[interrupt])\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')"
    )
    assert "interrupted" in done.stdout, done.stderr


def test_a_managers_signal_ends_the_script_with_status_75(script: Any, tmp_path: Path) -> None:
    """Everything is suspended, and the manager is told to run the script again."""
    done = script(
        "import os, signal\n"
        "def end(study, trial):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "optimize(study, objective, n_trials=50, devices='cpu:1', grace=9, callbacks=[end])\n"
        "print('went on')"
    )
    assert done.returncode == 75, done.stderr
    assert "SIGTERM: suspending every live trial, within 6 s." in done.stderr
    assert "went on" not in done.stdout


def test_dashboards_see_state_and_device_time(script: Any, tmp_path: Path) -> None:
    """Each finished trial carries ``hermes:state`` and ``hermes:device_seconds``."""
    assert script("optimize(study, objective, n_trials=1, devices='cpu:1')").returncode == 0
    (trial,) = study_in(tmp_path).trials
    assert trial.user_attrs["hermes:state"] == "done"
    assert trial.user_attrs["hermes:device_seconds"] > 0


def test_a_first_unit_that_is_heard_of_late_is_no_overhead(script: Any) -> None:
    """An objective that only calls ``should_prune`` says nothing until its first unit is over."""
    done = script(
        "import time\n"
        "def slow(trial):\n"
        "    time.sleep(2.0)\n"
        "    trial.report(1.0, 0)\n"
        "    trial.should_prune()\n"
        "    return 1.0\n"
        "result = optimize(study, slow, n_trials=1, devices='cpu:1')\n"
        "assert result.overhead_seconds['opening'] == 0.0, result.overhead_seconds"
    )
    assert done.returncode == 0, done.stderr


def test_maximising_studies_find_the_largest(script: Any, tmp_path: Path) -> None:
    """The best trial of a maximised study is the one with the largest value."""
    done = script(
        "study = optuna.create_study(storage='sqlite:///study.db', study_name='m',\n"
        "    direction='maximize', sampler=HermesSampler(), pruner=HermesPruner())\n"
        "result = optimize(study, objective, n_trials=3, devices='cpu:1')\n"
        "assert result.best['value'] == max(t.value for t in study.trials), result"
    )
    assert done.returncode == 0, done.stderr


def test_a_loaded_study_is_told_which_parts_it_lacks(script: Any) -> None:
    """Optuna stores neither sampler nor pruner: once a call, before anything trains."""
    done = script(
        "study = optuna.load_study(study_name='s', storage='sqlite:///study.db')\n"
        "optimize(study, objective, n_trials=1, devices='cpu:1')"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("pruner MedianPruner") == done.stderr.count("sampler TPESampler") == 1


def test_a_study_in_memory_is_refused() -> None:
    """Other processes cannot reach it: the message says what to do."""
    study = optuna.create_study(sampler=HermesSampler(), pruner=HermesPruner())
    with pytest.raises(StorageError, match="create_study"):
        optimize(study, lambda trial: 0.0, n_trials=1)


def test_an_unknown_policy_is_refused_before_anything_starts(
    storage_url: str, runtime_dir: Path
) -> None:
    """No broker, no worker, no table."""
    study = optuna.create_study(storage=storage_url)
    with pytest.raises(UnknownPolicyError, match="round-robin"):
        optimize(study, lambda trial: 0.0, n_trials=1, policy="astrology")
    assert not list(runtime_dir.iterdir())
