"""Tune XGBoost on scikit-learn's breast cancer data: 16 trials take turns on the devices.

Run it with ``python examples/xgboost_boosting.py``. Stop it when you like, start it again, and it
goes on where it was. Two lines differ from a training that cannot be suspended: those with
``hermes``.
"""

import sys

import optuna
import xgboost
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split

from optuna_hermes import HermesPruner, HermesSampler, optimize
from optuna_hermes.xgboost import HermesCallback


def objective(trial: optuna.Trial) -> float | None:
    x, y = load_breast_cancer(return_X_y=True)
    x_train, x_valid, y_train, y_valid = train_test_split(x, y, random_state=0)
    train, valid = xgboost.DMatrix(x_train, y_train), xgboost.DMatrix(x_valid, y_valid)
    params = {
        "objective": "binary:logistic",
        "nthread": 1,  # the data are few, and trials run beside each other
        "eta": trial.suggest_float("eta", 0.005, 0.5, log=True),
        "max_depth": trial.suggest_int("max_depth", 1, 8),
        "subsample": trial.suggest_float("subsample", 0.3, 1.0),
        "colsample_bytree": trial.suggest_float("colsample_bytree", 0.3, 1.0),
        "lambda": trial.suggest_float("lambda", 1e-3, 10.0, log=True),
    }
    hermes = HermesCallback(trial, "valid-logloss")
    xgboost.train(
        params, train, 300, evals=[(valid, "valid")], callbacks=[hermes], verbose_eval=False
    )
    return hermes.value


if __name__ == "__main__":
    study = optuna.create_study(
        study_name="xgboost", storage="sqlite:///xgboost.db", load_if_exists=True,
        sampler=HermesSampler(), pruner=HermesPruner(),
    )  # fmt: skip
    optimize(study, objective, n_trials=int(sys.argv[1]) if len(sys.argv) > 1 else 16)
    print(f"Best of {len(study.trials)}: {study.best_value:.4f} with {study.best_params}")
