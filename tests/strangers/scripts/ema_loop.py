"""A moving average of the weights in a loop of one's own, by torch's own class."""

from typing import Any

import torch
from kit import EPOCHS, Points, loop, net, seed, work
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader


def objective(trial: Any) -> float:
    seed()
    model = net()
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [10])
    loader, val = DataLoader(Points(), 4, shuffle=True), DataLoader(Points(8), 8)
    run = loop(trial, model=model, mean=mean, optimizer=optimizer, schedule=schedule)
    value = 0.0
    for _ in run.epochs(EPOCHS):
        model.train()
        for x, y in run.batches(loader):
            work()
            loss = nn.functional.mse_loss(model(x).squeeze(-1), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            mean.update_parameters(model)
        mean.eval()
        with torch.no_grad():
            value = sum(nn.functional.mse_loss(mean(x).squeeze(-1), y).item() for x, y in val)
        run.report(value)
    return value
