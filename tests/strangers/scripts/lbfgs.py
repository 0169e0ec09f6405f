"""All data at once with L-BFGS and a closure: epochs without batches."""

from typing import Any

import torch
from kit import EPOCHS, Points, loop, net, seed, work
from torch import nn


def objective(trial: Any) -> float:
    seed()
    points = Points()
    x, y = (torch.stack(part) for part in zip(*map(points.__getitem__, range(24)), strict=True))
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=4)

    def closure() -> torch.Tensor:
        work()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x).squeeze(-1), y)
        loss.backward()
        return loss

    run = loop(trial, model=model, optimizer=optimizer)
    value = 0.0
    for _ in run.epochs(EPOCHS):
        value = float(optimizer.step(closure))
        run.report(value)
    return value
