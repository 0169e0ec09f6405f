"""Workers that do not persist, a generator of its own, a collate function, and early stopping."""

from typing import Any

import torch
from kit import EPOCHS, Points, loop, net, seed, work
from torch import nn
from torch.utils.data import DataLoader


def stack(samples: Any) -> Any:
    x, y = zip(*samples, strict=True)
    return torch.stack(x) * (1 + 0.1 * torch.rand(())), torch.stack(y)


def objective(trial: Any) -> float:
    seed()
    generator = torch.Generator().manual_seed(11)
    options = {"shuffle": True, "num_workers": 1, "generator": generator, "collate_fn": stack}
    loader, val = DataLoader(Points(), 4, **options), DataLoader(Points(8), 8)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    run = loop(trial, model=model, optimizer=optimizer)
    best, waited = run.kept.setdefault("best", float("inf")), run.kept.setdefault("waited", 0)
    for _ in run.epochs(EPOCHS + 4):
        model.train()
        for x, y in run.batches(loader):
            work()
            loss = nn.functional.mse_loss(model(x).squeeze(-1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            value = sum(nn.functional.mse_loss(model(x).squeeze(-1), y).item() for x, y in val)
        best, waited = run.kept["best"], run.kept["waited"] + 1
        if value < best - 0.5:
            best, waited = value, 0
        run.kept.update(best=best, waited=waited)
        run.report(value)
        if waited > 6:
            break
    return best
