"""A loop with Accelerate."""

import optuna
import torch
from accelerate import Accelerator
from parts import TRAIN, network, validate
from torch import nn
from torch.utils.data import DataLoader


def objective(trial: optuna.Trial) -> float:
    torch.manual_seed(1)
    accelerator = Accelerator(cpu=True)
    model = network()
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    loader = DataLoader(TRAIN, batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(6):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
        trial.report(validate(model), epoch)
    return validate(model)


if __name__ == "__main__":
    study = optuna.create_study()
    study.optimize(objective, n_trials=4)
    print(study.best_params)
