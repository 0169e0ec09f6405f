"""One study of all scripts: each trial runs one of them.

``STRANGERS=plain python every.py STORAGE NAME...`` trains some with plain Optuna, one after the
other.
"""

import importlib
import sys
import warnings
from pathlib import Path

import optuna

FOLDER = Path(__file__).parent
NAMES = sorted(file.stem for file in (FOLDER / "scripts").glob("*.py"))
sys.path[:0] = [str(FOLDER), str(FOLDER / "scripts")]


def objective(trial: optuna.Trial) -> float:
    """Train the script that the trial is about."""
    warnings.simplefilter("ignore")
    name = trial.suggest_categorical("script", NAMES)
    return float(importlib.import_module(name).objective(trial))


if __name__ == "__main__":
    _, storage, *chosen = sys.argv
    study = optuna.create_study(study_name="strangers", storage=storage)
    for each in chosen:
        study.enqueue_trial({"script": each})
    study.optimize(objective, len(chosen))
