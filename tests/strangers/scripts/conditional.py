"""A space in which each choice has parameters of its own, a sampler by weights, and noise."""

from typing import Any

import numpy as np
import torch
from kit import EPOCHS, Points, loop, seed, work
from torch import nn
from torch.utils.data import DataLoader, WeightedRandomSampler


def objective(trial: Any) -> float:
    seed()
    layers: list[nn.Module] = []
    width = 4
    for number in range(trial.suggest_int("layers", 2, 2)):
        wider = trial.suggest_int(f"width_{number}", 6, 6)
        layers += [nn.Linear(width, wider), nn.BatchNorm1d(wider), nn.ReLU()]
        width = wider
    model = nn.Sequential(*layers, nn.Linear(width, 1))
    name = trial.suggest_categorical("optimizer", ["RMSprop"])
    if name == "RMSprop":
        options = {"momentum": trial.suggest_float("momentum", 0.5, 0.5)}
    optimizer = getattr(torch.optim, name)(model.parameters(), 0.005, **options)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    points = Points()
    sampler = WeightedRandomSampler([1.0, 3.0] * 12, 24)
    loader = DataLoader(points, 4, sampler=sampler, drop_last=True)
    run = loop(trial, model=model, optimizer=optimizer, plateau=plateau)
    run.kept.setdefault("best", float("inf"))
    for _ in run.epochs(EPOCHS):
        for x, y in run.batches(loader):
            work()
            part = float(np.random.beta(0.4, 0.4))
            other = torch.randperm(len(x))
            mixed = part * x + (1 - part) * x[other]
            wanted = part * y + (1 - part) * y[other]
            loss = nn.functional.mse_loss(model(mixed).squeeze(-1), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        plateau.step(loss.item())
        run.kept["best"] = min(run.kept["best"], loss.item())
        run.report(run.kept["best"])
    return run.kept["best"]
