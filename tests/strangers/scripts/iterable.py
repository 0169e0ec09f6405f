"""A stream of samples in Lightning."""

from collections.abc import Iterator
from typing import Any

import torch
from kit import Module, Points, callback, seed, trainer
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        points = Points()
        for index in torch.randperm(len(points)).tolist():
            x, y = points[index]
            yield x + 0.1 * torch.randn(4), y


def objective(trial: Any) -> float:
    seed()
    pruning = callback(trial)
    trainer(pruning).fit(Module(), DataLoader(Stream(), 4), DataLoader(Points(8), 4))
    return pruning.value
