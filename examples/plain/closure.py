"""A loop with a closure: L-BFGS on all data."""

import optuna
import torch
from parts import TRAIN, network, validate
from torch import nn


def objective(trial: optuna.Trial) -> float:
    torch.manual_seed(1)
    x, y = TRAIN.tensors
    model = network()
    lr = trial.suggest_float("lr", 1e-2, 1.0, log=True)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=lr, max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    for epoch in range(6):
        optimizer.step(closure)
        loss = validate(model)
        trial.report(loss, epoch)
    return loss


if __name__ == "__main__":
    study = optuna.create_study()
    study.optimize(objective, n_trials=4)
    print(study.best_params)
