"""Twenty trials take turns on two devices; none is killed."""

from __future__ import annotations

import optuna
import optunahub


def objective(trial: optuna.Trial) -> float:
    """A curve of ten steps."""
    x = trial.suggest_float("x", -5, 5)
    loss = 0.0
    for step in range(10):
        loss = (x - 2) ** 2 + 1 / (step + 1)
        trial.report(loss, step)
        if trial.should_prune():  # others have their turn in here
            raise optuna.TrialPruned
    return loss


if __name__ == "__main__":
    sampler = optunahub.load_module("samplers/hermes").HermesSampler(devices="cpu:2")
    pruner = optunahub.load_module("pruners/hermes").HermesPruner()
    study = optuna.create_study(sampler=sampler, pruner=pruner)
    study.optimize(objective, n_trials=20, n_jobs=5)
    print(study.best_trial.params)
