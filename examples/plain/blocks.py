"""k-fold with a training in a function that makes its loader itself."""

import numpy as np
import optuna
import torch
from parts import TRAIN, network, train, validate
from sklearn.model_selection import KFold
from torch.utils.data import DataLoader, Subset


def objective(trial: optuna.Trial) -> float:
    torch.manual_seed(1)
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    folds = list(KFold(3, shuffle=True, random_state=1).split(np.arange(len(TRAIN))))
    losses = np.zeros(3)
    for fold in range(3):
        model = network()
        train(model, DataLoader(Subset(TRAIN, folds[fold][0]), batch_size=32), epochs=3, lr=lr)
        losses[fold] = validate(model)
        trial.report(losses[fold], fold)
    return losses.mean()


if __name__ == "__main__":
    study = optuna.create_study()
    study.optimize(objective, n_trials=4)
    print(study.best_params)
