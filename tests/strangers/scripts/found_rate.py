"""A learning rate that is found first."""

from typing import Any

from kit import Module, Points, callback, seed, trainer
from lightning.pytorch.callbacks import LearningRateFinder
from torch.utils.data import DataLoader


def objective(trial: Any) -> float:
    seed()
    pruning, model = callback(trial), Module()
    finder = LearningRateFinder(num_training_steps=12)
    loader = DataLoader(Points(), 4, shuffle=True)
    trainer(pruning, finder).fit(model, loader, DataLoader(Points(8), 4))
    return pruning.value + model.lr
