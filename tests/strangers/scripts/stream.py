"""A stream of samples in a loop of one's own, with a worker process."""

from collections.abc import Iterator
from typing import Any

import torch
from kit import EPOCHS, Points, loop, net, seed, work
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        points = Points()
        for index in range(len(points)):
            yield points[index]


def objective(trial: Any) -> float:
    seed()
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    loader = DataLoader(Stream(), 4, num_workers=1)
    run = loop(trial, model=model, optimizer=optimizer)
    value = 0.0
    for _ in run.epochs(EPOCHS):
        for x, y in run.batches(loader):
            work()
            loss = nn.functional.mse_loss(model(x).squeeze(-1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        value = loss.item()
        run.report(value)
    return value
