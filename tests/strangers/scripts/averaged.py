"""Stochastic weight averaging, with its own schedule."""

from typing import Any

from kit import Module, Points, callback, seed, trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch.utils.data import DataLoader


def objective(trial: Any) -> float:
    seed()
    pruning, model = callback(trial), Module()
    swa = StochasticWeightAveraging(0.01, swa_epoch_start=4, annealing_epochs=2)
    loader = DataLoader(Points(), 4, shuffle=True)
    trainer(pruning, swa).fit(model, loader, DataLoader(Points(8), 4))
    return pruning.value + float(model.net[0].weight.sum())
