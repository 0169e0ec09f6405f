"""Its head first, then all of it with another learning rate."""

from typing import Any

from kit import Module, Points, callback, seed, trainer
from torch.utils.data import DataLoader


def objective(trial: Any) -> float:
    seed()
    pruning, model = callback(trial), Module()
    loaders = DataLoader(Points(), 4, shuffle=True), DataLoader(Points(8), 4)
    model.net[0].requires_grad_(False)
    trainer(pruning, max_epochs=4).fit(model, *loaders)
    model.net[0].requires_grad_(True)
    model.lr = 0.002
    trainer(pruning, max_epochs=4).fit(model, *loaders)
    return pruning.value
