"""The diffs of ``docs/you-have-a-script.md``, each applied to its script and run.

All scripts are trials of one study. Plain Optuna trains them as they are; with the diffs they train
side by side, are interrupted once, and go on in other processes.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "plain"
PAGE = (ROOT / "docs" / "you-have-a-script.md").read_text().partition("## From Ray Tune")[0]
SHOWN = r"\[(\w+)\.py\]\(\.\./examples/plain/\1\.py\)(.*?)^```diff\n(.*?)^```"
DIFFS = {name: diff for name, _, diff in re.findall(SHOWN, PAGE, re.DOTALL | re.MULTILINE)}
NEEDED = {"command_line": "jsonargparse", "hugging_face": "transformers"}
"""Libraries that one of the scripts needs, and that not every Python has."""

NAMES = [
    name
    for name in sorted(DIFFS)
    if name != "study" and importlib.util.find_spec(NEEDED.get(name, "torch"))
]
IN_MEMORY = {"function"}
"""Those whose trials begin anew, as the page says."""

EVERY = """
import os
import sys
import time
import warnings
import optuna
import torch
import {names}
from torch.optim.optimizer import register_optimizer_step_post_hook

now = []

def slowly(*args):
    if os.environ.get("SLOWLY") and now:
        time.sleep(2.0 if now[0].storage.get_trial(now[0]._trial_id).intermediate_values else 0.02)

register_optimizer_step_post_hook(slowly)

def objective(trial):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    now[:] = [trial]
    name = trial.suggest_categorical("script", {strings})
    fit = chunks.SGDRegressor.partial_fit
    chunks.SGDRegressor.partial_fit = lambda *args: (slowly(), fit(*args))[1]
    try:
        return globals()[name].objective(trial)
    finally:
        chunks.SGDRegressor.partial_fit = fit

if __name__ == "__main__":
    nothing = optuna.pruners.NopPruner()
    study = optuna.load_study(study_name="all", storage=sys.argv[1], pruner=nothing)
    study.optimize(objective, {number})
"""

pytestmark = pytest.mark.docs


def applied(diff: str, text: str) -> str:
    """A script with a diff, whose parts each fit at one place; ``@@`` stands between them."""
    for part in re.split(r"^@@\n", diff, flags=re.MULTILINE):
        lines = part.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] != "+")
        new = "".join(line[1:] for line in lines if line[0] != "-")
        if old:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        else:
            text = re.sub(r"^(?=import |from )", new, text, count=1, flags=re.MULTILINE)
    return text


def folder(into: Path, *, changed: bool) -> Path:
    """The scripts, and a program whose trials they are."""
    shutil.copytree(SCRIPTS, into, ignore=shutil.ignore_patterns("__pycache__"))
    for name, diff in DIFFS.items() if changed else ():
        file = into / f"{name}.py"
        file.write_text(applied(diff, file.read_text()))
    words = {"names": ", ".join(NAMES), "strings": repr(NAMES), "number": len(NAMES)}
    (into / "every.py").write_text(EVERY.format(**words))
    return into


def new_study(url: str) -> str:
    study = optuna.create_study(study_name="all", storage=url)
    for name in NAMES:
        study.enqueue_trial({"script": name, "lr": 0.02})
    return url


def python(*words: object, cwd: Path) -> str:
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def ends(url: str) -> dict[str, tuple[str, bytes]]:
    """By script: how its trial ended, and its value to the bit."""
    trials = optuna.load_study(study_name="all", storage=url).trials
    return {t.params["script"]: (t.state.name, struct.pack("d", t.value or 0.0)) for t in trials}


def test_each_script_has_a_diff_of_four_lines_at_most() -> None:
    """No more is asked of whoever has a script."""
    assert {*DIFFS, "parts", "modules"} == {file.stem for file in SCRIPTS.glob("*.py")}
    for diff in DIFFS.values():
        marks = [line[0] for line in diff.splitlines()]
        assert marks.count("-") <= marks.count("+") <= 4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_values_stay_the_same(
    start_cli: Callable[..., Any],
    cli: Callable[..., subprocess.CompletedProcess[str]],
    wait_for: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """To the bit, though the study is interrupted and goes on in other processes."""
    before, after = (
        folder(tmp_path / name, changed=name == "after") for name in ("as_is", "after")
    )
    plain = new_study(f"sqlite:///{tmp_path / 'plain.db'}")
    python("every.py", plain, cwd=before)
    url = new_study(f"sqlite:///{tmp_path / 'study.db'}")
    words = ["optimize", "every.py:objective", "--storage", url, "--study-name", "all", "--json"]
    words += ["--n-trials", len(NAMES), "--policy", "round-robin", "--slice-seconds", 0.2]
    devices = ("--devices", f"cpu:{len(NAMES)}")
    running = start_cli(*words, *devices, cwd=after, env={"SLOWLY": "1"})

    def all_have_begun() -> bool:
        assert running.process.poll() is None, running.stderr
        trials = optuna.load_study(study_name="all", storage=url).get_trials(deepcopy=False)
        return sum(bool(trial.intermediate_values) for trial in trials) == len(NAMES)

    wait_for(all_have_begun, 200)
    running.send(signal.SIGINT)
    stopped = running.wait(60)
    assert stopped.returncode == 130, stopped.stderr
    states = {NAMES[each["number"]]: each["state"] for each in json.loads(stopped.stdout)["trials"]}
    done = cli(*words, "--devices", "cpu:2", cwd=after, deadline_seconds=300)
    assert done.returncode == 0, done.stderr
    assert {name for name, state in states.items() if state != "STORED"} == IN_MEMORY
    assert ends(url) == ends(plain)


def test_a_study_of_optuna_goes_on(tmp_path: Path) -> None:
    """Made by Optuna's command line, run by the script as it is, and by the changed one."""
    words = ("create-study", "--storage", "sqlite:///study.db", "--study-name", "sums")
    before = folder(tmp_path / "as_is", changed=False)
    python("-c", "import optuna.cli; optuna.cli.main()", *words, cwd=before)
    python("study.py", cwd=before)
    after = folder(tmp_path / "after", changed=True)
    script = (after / "study.py").read_text().replace("n_trials=4", "n_trials=6")
    (after / "study.py").write_text(script)
    shutil.copy(before / "study.db", after)
    python("study.py", cwd=after)
    url = f"sqlite:///{after / 'study.db'}"
    trials = optuna.load_study(study_name="sums", storage=url).trials
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 6
    sys.path.insert(0, str(before))
    try:
        spec: Any = importlib.util.spec_from_file_location("study_as_is", before / "study.py")
        as_is = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(as_is)
        for trial in trials:
            assert as_is.objective(optuna.trial.FixedTrial(trial.params)) == trial.value
    finally:
        sys.path.remove(str(before))
        sys.modules.pop("parts", None)
