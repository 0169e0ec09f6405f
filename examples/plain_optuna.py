"""Plain Optuna: only the sampler and the pruner change, and six trials share two CPU slots.

Run it: python examples/plain_optuna.py
"""

from __future__ import annotations

import sys

import numpy as np
import optuna
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split

from optuna_hermes import HermesPruner, HermesSampler

EPOCHS = 30
X, y = load_digits(return_X_y=True)
X_train, X_valid, y_train, y_valid = train_test_split(X / 16.0, y, random_state=0)


def objective(trial: optuna.Trial) -> float:
    """Train a linear classifier epoch by epoch; the loss of its last one."""
    model = SGDClassifier(
        loss="log_loss",
        alpha=trial.suggest_float("alpha", 1e-7, 1e-1, log=True),
        learning_rate=trial.suggest_categorical("learning_rate", ["constant", "invscaling"]),
        eta0=trial.suggest_float("eta0", 1e-4, 1.0, log=True),
        random_state=trial.number,
    )
    loss = float("inf")
    for epoch in range(1, EPOCHS + 1):
        model.partial_fit(X_train, y_train, classes=np.arange(10))
        loss = log_loss(y_valid, model.predict_proba(X_valid))
        trial.report(loss, epoch)
        if trial.should_prune():  # the trial waits in here while others have their turn
            raise optuna.TrialPruned
    return loss


if __name__ == "__main__":
    n_trials = int(sys.argv[1]) if len(sys.argv) > 1 else 24
    study = optuna.create_study(
        storage="sqlite:///plain.db",
        study_name="digits",
        load_if_exists=True,
        sampler=HermesSampler(devices="cpu:2"),
        pruner=HermesPruner(),
    )
    study.optimize(objective, n_trials=n_trials, n_jobs=6)
    print(f"Best of {len(study.trials)}: {study.best_value:.4f} with {study.best_params}")
