"""A plain loop in PyTorch that reports to Optuna."""

import optuna
import torch
from parts import TRAIN, network, validate
from torch import nn
from torch.utils.data import DataLoader


def objective(trial: optuna.Trial) -> float:
    torch.manual_seed(1)
    model = network()
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    loader = DataLoader(TRAIN, batch_size=32, shuffle=True)
    for epoch in range(6):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        loss = validate(model)
        trial.report(loss, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return loss


if __name__ == "__main__":
    study = optuna.create_study()
    study.optimize(objective, n_trials=4)
    print(study.best_params)
