"""A loop with Lightning's Fabric."""

import optuna
import torch
from lightning.fabric import Fabric
from parts import TRAIN, network, validate
from torch import nn
from torch.utils.data import DataLoader


def objective(trial: optuna.Trial) -> float:
    torch.manual_seed(1)
    fabric = Fabric(accelerator="cpu", devices=1)
    model = network()
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=lr))
    loader = fabric.setup_dataloaders(DataLoader(TRAIN, batch_size=32, shuffle=True))
    for epoch in range(6):
        for x, y in loader:
            optimizer.zero_grad()
            fabric.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
        trial.report(validate(model), epoch)
    return validate(model)


if __name__ == "__main__":
    study = optuna.create_study()
    study.optimize(objective, n_trials=4)
    print(study.best_params)
