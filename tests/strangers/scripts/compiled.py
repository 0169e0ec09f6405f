"""A model that is compiled."""

from typing import Any

import torch
from kit import EPOCHS, Points, loop, net, seed, work
from torch import nn
from torch.utils.data import DataLoader


def objective(trial: Any) -> float:
    seed()
    model = net()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(compiled.parameters(), 0.01, momentum=0.9)
    loader = DataLoader(Points(), 4, shuffle=True)
    run = loop(trial, model=compiled, optimizer=optimizer)
    value = 0.0
    for _ in run.epochs(EPOCHS):
        for x, y in run.batches(loader):
            work()
            loss = nn.functional.mse_loss(compiled(x).squeeze(-1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        value = loss.item()
        run.report(value)
    return value
