"""A study made by `optuna create-study --storage sqlite:///study.db --study-name sums`."""

import optuna
import torch
from parts import TRAIN, network, train, validate
from torch.utils.data import DataLoader


def objective(trial: optuna.Trial) -> float:
    torch.manual_seed(1)
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    model = network()
    train(model, DataLoader(TRAIN, batch_size=32, shuffle=True), epochs=2, lr=lr)
    return validate(model)


if __name__ == "__main__":
    study = optuna.load_study(study_name="sums", storage="sqlite:///study.db")
    study.optimize(objective, n_trials=4)
    print(study.best_params)
