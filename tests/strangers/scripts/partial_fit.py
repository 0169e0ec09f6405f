"""scikit-learn's ``partial_fit`` over chunks in a fixed order."""

from typing import Any

import numpy as np
from kit import EPOCHS, PLAIN, TRIALS, loop, seed, work
from sklearn.linear_model import SGDClassifier


def objective(trial: Any) -> float:
    seed()
    x = np.random.RandomState(1).randn(60, 4)
    y = (x.sum(1) > 0).astype(int)
    model = SGDClassifier(random_state=2, loss="log_loss")
    if PLAIN:
        run = loop(trial)
    else:
        TRIALS.append(trial)
        from optuna_hermes.sklearn import suspendable

        run = suspendable(trial, model=model)
    value = 0.0
    for _ in run.epochs(EPOCHS):
        for part in run.batches(np.array_split(np.arange(60), 6)):
            work()
            model.partial_fit(x[part], y[part], classes=[0, 1])
        value = float(np.abs(model.coef_).sum())
        run.report(value)
    return value
