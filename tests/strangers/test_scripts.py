"""Scripts of the kinds that people write, suspended to disk and resumed in another process.

They train side by side in one study, with a real broker, and are interrupted once in the middle;
plain Optuna trains the same scripts one after the other.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest

Cli = Callable[..., subprocess.CompletedProcess[str]]
FOLDER = Path(__file__).parent
NAMES = sorted(file.stem for file in (FOLDER / "scripts").glob("*.py"))
# All of them take 80 s on a quiet machine, and five minutes beside other tests.
SOME, OTHERS = NAMES[::16], [name for name in NAMES if name not in NAMES[::16]]


def bits(storage: str) -> dict[str, list[bytes]]:
    """By script: each value that was reported, and the last one, as bytes."""
    trials = optuna.load_study(study_name="strangers", storage=storage).trials
    return {
        trial.params["script"]: [
            struct.pack("d", value)
            for value in [*trial.intermediate_values.values(), trial.value or 0.0]
        ]
        for trial in trials
    }


def units(storage: str) -> dict[str, int]:
    """Count the units that each script has reported."""
    study = optuna.load_study(study_name="strangers", storage=storage)
    return {
        trial.params["script"]: len(trial.intermediate_values)
        for trial in study.get_trials(deepcopy=False)
        if trial.params
    }


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("names", [SOME, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=len)
def test_each_script_goes_on_as_if_it_had_not_been_interrupted(
    names: list[str],
    cli: Cli,
    start_cli: Callable[..., Any],
    storage_url: str,
    tmp_path: Path,
    wait_for: Callable[..., Any],
) -> None:
    """Values are plain Optuna's to the bit, and at least two units are trained after a return."""
    study = optuna.create_study(study_name="strangers", storage=storage_url)
    for name in names:
        study.enqueue_trial({"script": name})

    words = [
        *("optimize", f"{FOLDER / 'every.py'}:objective", "--storage", storage_url, "--json"),
        *("--study-name", "strangers", "--n-trials", len(names), "--policy", "round-robin"),
        *("--slice-seconds", 0.2, "--devices"),
    ]
    all_began = tmp_path / "all-began"
    running = start_cli(*words, f"cpu:{len(names)}", env={"STRANGERS": str(all_began)})

    def all_have_begun() -> bool:
        assert running.process.poll() is None, running.stderr
        done = units(storage_url)
        return len(done) == len(names) and min(done.values()) >= 1

    wait_for(all_have_begun, 500)
    all_began.touch()
    running.send(signal.SIGINT)
    stopped = running.wait(60)
    assert stopped.returncode == 130, stopped.stderr
    interrupted = {
        names[trial["number"]]: (trial["state"], trial["units"])
        for trial in json.loads(stopped.stdout)["trials"]
    }
    done = cli(*words, "cpu:2", deadline_seconds=600)
    assert done.returncode == 0, done.stderr
    plain = f"sqlite:///{tmp_path / 'plain.db'}"
    subprocess.run(
        [sys.executable, FOLDER / "every.py", plain, *names],
        env={**os.environ, "STRANGERS": "plain"},
        check=True,
        capture_output=True,
        timeout=300,
    )
    wanted, got = bits(plain), bits(storage_url)
    assert {name for name in names if got[name] != wanted[name]} == set()
    total = {name: len(values) - 1 for name, values in wanted.items()}
    assert {name for name in names if interrupted[name][1] > total[name] - 2} == set()
    assert {name for name in names if interrupted[name][0] != "STORED"} == set()
