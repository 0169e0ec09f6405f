"""Tune scikit-learn's neural network on its digits: 16 trials take turns on the devices.

Run it with ``python examples/sklearn_partial_fit.py``. Stop it when you like, start it again, and
it goes on where it was. Four lines differ from a loop that cannot be suspended: those with
``run``.
"""

import sys

import numpy as np
import optuna
from sklearn.datasets import load_digits
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler

from optuna_hermes import HermesPruner, HermesSampler, optimize
from optuna_hermes.sklearn import suspendable


def objective(trial: optuna.Trial) -> float | None:
    x, y = load_digits(return_X_y=True)
    x_train, x_valid, y_train, y_valid = train_test_split(x, y, random_state=0)
    model = MLPClassifier(
        (trial.suggest_int("width", 8, 256, log=True),),
        alpha=trial.suggest_float("alpha", 1e-6, 1.0, log=True),
        learning_rate_init=trial.suggest_float("learning_rate_init", 1e-5, 1e-1, log=True),
        random_state=0,
    )
    scaler, rng = StandardScaler(), np.random.default_rng(0)

    # Name all that the loop changes: a trial that comes back finds it here as it was.
    run = suspendable(trial, model=model, scaler=scaler, rng=rng)
    for _ in run.epochs(20):
        for batch in run.batches(np.array_split(rng.permutation(len(x_train)), 10)):
            scaler.partial_fit(x_train[batch])
            features = scaler.transform(x_train[batch])
            model.partial_fit(features, y_train[batch], classes=range(10))
        run.report(log_loss(y_valid, model.predict_proba(scaler.transform(x_valid))))
    return run.value


if __name__ == "__main__":
    study = optuna.create_study(
        study_name="sklearn", storage="sqlite:///sklearn.db", load_if_exists=True,
        sampler=HermesSampler(), pruner=HermesPruner(),
    )  # fmt: skip
    optimize(study, objective, n_trials=int(sys.argv[1]) if len(sys.argv) > 1 else 16)
    print(f"Best of {len(study.trials)}: {study.best_value:.4f} with {study.best_params}")
