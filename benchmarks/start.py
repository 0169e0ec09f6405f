"""Seconds from a process's start to its first trial, with plain Optuna and with Hermes.

Run it with ``python benchmarks/start.py [--rounds 10] [--json]``. The objective imports neither
torch nor anything else. Three contestants take turns on fresh SQLite databases, with no broker
there: a script that calls ``study.optimize``, the same script with ``optimize``, and the command
``optuna-hermes optimize``.
Exit status 1 if the script with ``optimize`` takes more than 1.5 times as long as plain Optuna's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT = 1.5

OBJECTIVE = """
import time
from pathlib import Path


def objective(trial):
    stamp = Path(__file__).with_name("first")
    if not stamp.exists():
        stamp.write_text(repr(time.time()))
    return trial.suggest_float("x", 0.0, 1.0)
"""

PLAIN = f"""{OBJECTIVE}

if __name__ == "__main__":
    import optuna

    study = optuna.create_study(storage="sqlite:///study.db", study_name="start")
    study.optimize(objective, n_trials=1)
"""

HERMES = f"""{OBJECTIVE}

if __name__ == "__main__":
    import optuna

    from optuna_hermes import HermesPruner, HermesSampler, optimize

    study = optuna.create_study(
        storage="sqlite:///study.db",
        study_name="start",
        sampler=HermesSampler(),
        pruner=HermesPruner(),
    )
    optimize(study, objective, n_trials=1, devices="cpu:2", show_progress=False)
"""

COMMAND = [
    *("-m", "optuna_hermes", "optimize", "train.py:objective", "--storage", "sqlite:///study.db"),
    *("--study-name", "start", "--n-trials", "1", "--devices", "cpu:2"),
]

CONTESTANTS = {
    "Optuna, script": (PLAIN, ["train.py"]),
    "Hermes, script": (HERMES, ["train.py"]),
    "Hermes, command": (OBJECTIVE, COMMAND),
}


def seconds_to_first_trial(script: str, arguments: list[str]) -> float:
    """Run a script or command in an empty folder, and read when its first trial began."""
    folder = Path(tempfile.mkdtemp(prefix="start-"))
    try:
        (folder / "train.py").write_text(script)
        runtime = folder / "runtime"
        runtime.mkdir(mode=0o700)
        began = time.time()
        subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env={**os.environ, "OPTUNA_HERMES_RUNTIME_DIR": str(runtime)},
            check=True,
            capture_output=True,
        )
        return float((folder / "first").read_text()) - began
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Let the contestants take turns, and show the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    taken: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for number in range(options.rounds + 1):
        for name, (script, arguments) in CONTESTANTS.items():
            seconds = seconds_to_first_trial(script, arguments)
            if number > 0:  # the first round fills the caches of files
                taken[name].append(seconds)
    medians = {name: statistics.median(each) for name, each in taken.items()}
    plain = medians["Optuna, script"]
    ratios = {name: each / plain for name, each in medians.items()}
    passed = ratios["Hermes, script"] <= LIMIT
    if options.json:
        print(json.dumps({"seconds": taken, "medians": medians, "ratios": ratios, "ok": passed}))
        return 0 if passed else 1
    print(f"{options.rounds} rounds in turn, Python {platform.python_version()}; medians")
    for name, median in medians.items():
        print(f"{name:<18}{median:8.2f} s  {ratios[name]:5.2f} times plain Optuna")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
