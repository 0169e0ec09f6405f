"""A study whose trials wait in place of training: no process imports anything large for it."""

from __future__ import annotations

import time

import optuna

UNITS = 12


def objective(trial: optuna.Trial) -> float:
    x = trial.suggest_float("x", -1, 1)
    value = 0.0
    for unit in range(1, UNITS + 1):
        time.sleep(0.05)  # training
        value = x * x + 1 / unit
        trial.report(value, unit)
        if trial.should_prune():
            raise optuna.TrialPruned
    return value
