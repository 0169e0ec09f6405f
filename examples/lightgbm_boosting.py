"""Tune LightGBM on scikit-learn's breast cancer data: 16 trials take turns on the devices.

Run it with ``python examples/lightgbm_boosting.py``. Stop it when you like, start it again, and it
goes on where it was. Two lines differ from a training that cannot be suspended, those with
``hermes``, and the data keep what they were made of: ``free_raw_data=False``.
"""

import sys

import lightgbm
import optuna
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split

from optuna_hermes import HermesPruner, HermesSampler, optimize
from optuna_hermes.lightgbm import HermesCallback


def objective(trial: optuna.Trial) -> float | None:
    x, y = load_breast_cancer(return_X_y=True)
    x_train, x_valid, y_train, y_valid = train_test_split(x, y, random_state=0)
    train = lightgbm.Dataset(x_train, y_train, free_raw_data=False)
    valid = train.create_valid(x_valid, y_valid)
    params = {
        "objective": "binary",
        "num_threads": 1,  # the data are few, and trials run beside each other
        "force_row_wise": True,  # the same sums in the same order, whenever it comes back
        "verbosity": -1,
        "learning_rate": trial.suggest_float("learning_rate", 0.005, 0.5, log=True),
        "num_leaves": trial.suggest_int("num_leaves", 2, 64, log=True),
        "bagging_freq": 1,
        "bagging_fraction": trial.suggest_float("bagging_fraction", 0.3, 1.0),
        "feature_fraction": trial.suggest_float("feature_fraction", 0.3, 1.0),
    }
    hermes = HermesCallback(trial, "valid_0-binary_logloss")
    lightgbm.train(params, train, 300, valid_sets=[valid], callbacks=[hermes])
    return hermes.value


if __name__ == "__main__":
    study = optuna.create_study(
        study_name="lightgbm", storage="sqlite:///lightgbm.db", load_if_exists=True,
        sampler=HermesSampler(), pruner=HermesPruner(),
    )  # fmt: skip
    optimize(study, objective, n_trials=int(sys.argv[1]) if len(sys.argv) > 1 else 16)
    print(f"Best of {len(study.trials)}: {study.best_value:.4f} with {study.best_params}")
