"""A loop with Lightning's Fabric."""

from typing import Any

import torch
from kit import EPOCHS, Points, loop, net, seed, work
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader


def objective(trial: Any) -> float:
    seed()
    fabric = Fabric(accelerator="cpu", devices=1)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(Points(), 4, shuffle=True))
    run = loop(trial, model=model, optimizer=optimizer)
    value = 0.0
    for _ in run.epochs(EPOCHS):
        for x, y in run.batches(loader):
            work()
            loss = nn.functional.mse_loss(model(x).squeeze(-1), y)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
        value = loss.item()
        run.report(value)
    return value
