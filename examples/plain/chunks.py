"""scikit-learn's partial_fit."""

import numpy as np
import optuna
from parts import X, Y
from sklearn.linear_model import SGDRegressor


def objective(trial: optuna.Trial) -> float:
    x, y = X.numpy(), Y.numpy().ravel()
    rng = np.random.default_rng(1)
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    model = SGDRegressor(random_state=1, learning_rate="constant", eta0=lr)
    for epoch in range(6):
        for chunk in np.array_split(rng.permutation(256), 8):
            model.partial_fit(x[chunk], y[chunk])
        loss = float(np.mean((model.predict(x[256:]) - y[256:]) ** 2))
        trial.report(loss, epoch)
    return loss


if __name__ == "__main__":
    study = optuna.create_study()
    study.optimize(objective, n_trials=4)
    print(study.best_params)
