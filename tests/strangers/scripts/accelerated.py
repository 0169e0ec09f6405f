"""A loop with Accelerate."""

from typing import Any

import torch
from accelerate import Accelerator
from kit import EPOCHS, Points, loop, net, seed, work
from torch import nn
from torch.utils.data import DataLoader


def objective(trial: Any) -> float:
    seed()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, DataLoader(Points(), 4, shuffle=True), schedule
    )
    run = loop(trial, model=model, optimizer=optimizer, schedule=schedule)
    value = 0.0
    for _ in run.epochs(EPOCHS):
        for x, y in run.batches(loader):
            work()
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x).squeeze(-1), y)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        value = loss.item()
        run.report(value)
    return value
