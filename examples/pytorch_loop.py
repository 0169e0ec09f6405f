"""Tune a network that is trained by a loop of your own: 16 trials take turns on the devices.

Run it with ``python examples/pytorch_loop.py``. Stop it when you like, start it again, and it goes
on where it was. Four lines differ from a loop that cannot be suspended: those with ``run``.
"""

import sys

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from optuna_hermes import HermesPruner, HermesSampler, optimize, suspendable


def digits(device: str) -> tuple[TensorDataset, list[torch.Tensor]]:
    data = load_digits()
    x = torch.tensor(data.data, dtype=torch.float32, device=device) / 16
    y = torch.tensor(data.target, device=device)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, val = order[:1437], order[1437:]
    return TensorDataset(x[train], y[train]), [x[val], y[val]]


def objective(trial: optuna.Trial) -> float | None:
    torch.set_num_threads(1)  # the network is small, and trials run beside each other
    device = "cuda" if torch.cuda.is_available() else "cpu"
    width = trial.suggest_int("width", 16, 512, log=True)
    dropout = nn.Dropout(trial.suggest_float("dropout", 0.0, 0.6))
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), dropout, nn.Linear(width, 10)).to(device)
    lr = trial.suggest_float("lr", 1e-5, 1e-1, log=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    train, (x_val, y_val) = digits(device)
    loader = DataLoader(train, batch_size=64, shuffle=True)

    # Name all that the loop changes: a trial that comes back finds it here as it was.
    run = suspendable(trial, model=model, optimizer=optimizer, scheduler=scheduler)
    for _ in run.epochs(20):
        model.train()
        for x, y in run.batches(loader):  # others may have the device between two batches
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            run.report(nn.functional.cross_entropy(model(x_val), y_val))
    return run.value


if __name__ == "__main__":
    study = optuna.create_study(
        study_name="loop", storage="sqlite:///loop.db", load_if_exists=True,
        sampler=HermesSampler(), pruner=HermesPruner(),
    )  # fmt: skip
    optimize(study, objective, n_trials=int(sys.argv[1]) if len(sys.argv) > 1 else 16)
    print(f"Best of {len(study.trials)}: {study.best_value:.4f} with {study.best_params}")
