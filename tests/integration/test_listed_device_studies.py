"""Studies on devices that a file lists, as processes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import optuna

Cli = Callable[..., subprocess.CompletedProcess[str]]

OBJECTIVE = """
import os

def objective(trial):
    x = trial.suggest_float("x", -1, 1)
    trial.set_user_attr("visible", os.environ["HIP_VISIBLE_DEVICES"])
    for unit in range(1, 4):
        trial.report(x * x + 1 / unit, unit)
        if trial.should_prune():
            raise optuna.TrialPruned
    return x * x
"""


def command(url: str, devices: str) -> list[str]:
    common = ["--storage", url, "--study-name", "s", "--n-trials", "4", "--devices", devices]
    return ["optimize", "trials.py:objective", *common]


def written(folder: Path) -> None:
    (folder / "trials.py").write_text(OBJECTIVE)
    devices = [{"id": f"amd-{index}", "shown_as": str(index)} for index in range(2)]
    listed = {"variable": "HIP_VISIBLE_DEVICES", "devices": devices}
    (folder / "amd.json").write_text(json.dumps(listed))


def test_trials_see_the_device_they_were_granted(
    cli: Cli, storage_url: str, tmp_path: Path
) -> None:
    """The path of the list is the user's; each process is shown its own device by its variable."""
    written(tmp_path)
    done = cli(*command(storage_url, "amd.json"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    trials = optuna.load_study(study_name="s", storage=storage_url).trials
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 4
    assert {trial.user_attrs["visible"] for trial in trials} == {"0", "1"}


def test_a_list_that_is_wrong_is_one_line(cli: Cli, storage_url: str, tmp_path: Path) -> None:
    """The exit status is 2, nothing is begun, and the line says what to do."""
    written(tmp_path)
    for text, reason in ((None, "cannot be read"), ("{}", "missing required field `variable`")):
        path = tmp_path / "other.json"
        if text is not None:
            path.write_text(text)
        for words in (command(storage_url, str(path)), ["broker", "--devices", str(path)]):
            done = cli(*words, cwd=tmp_path)
            assert done.returncode == 2
            (line,) = done.stderr.strip().splitlines()
            assert reason in line
    assert not (tmp_path / "study.db").exists()
