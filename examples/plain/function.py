"""The loops are in a function."""

import optuna
import torch
from parts import TRAIN, network, train, validate
from torch.utils.data import DataLoader


def objective(trial: optuna.Trial) -> float:
    torch.manual_seed(1)
    model = network()
    loader = DataLoader(TRAIN, batch_size=32, shuffle=True)
    train(model, loader, epochs=6, lr=trial.suggest_float("lr", 1e-4, 1e-1, log=True))
    return validate(model)


if __name__ == "__main__":
    study = optuna.create_study()
    study.optimize(objective, n_trials=4)
    print(study.best_params)
