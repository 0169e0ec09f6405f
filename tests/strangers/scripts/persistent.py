"""Loaders whose workers persist, fetch ahead, and draw noise."""

import random
from typing import Any

import numpy as np
import torch
from kit import Module, Points, callback, seed, trainer
from torch.utils.data import DataLoader


class Noisy(Points):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(4) + 0.1 * np.random.rand() + 0.1 * random.random(), y


def objective(trial: Any) -> float:
    seed()
    pruning = callback(trial)
    ahead = {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3}
    loader = DataLoader(Noisy(), 4, shuffle=True, **ahead)
    trainer(pruning).fit(Module(), loader, DataLoader(Noisy(8), 4, **ahead))
    return pruning.value
