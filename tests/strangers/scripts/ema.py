"""A moving average of the weights in a callback of one's own, which validates with it."""

import copy
from typing import Any

import lightning.pytorch as pl
import torch
from kit import Module, Points, callback, seed, trainer
from torch.utils.data import DataLoader


class Ema(pl.Callback):
    def __init__(self, decay: float = 0.9) -> None:
        self.decay = decay
        self.steps = 0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.shadow = copy.deepcopy(pl_module.net)

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.steps += 1
        decay = min(self.decay, self.steps / (self.steps + 5))
        for mean, now in zip(self.shadow.parameters(), pl_module.net.parameters(), strict=True):
            mean.lerp_(now, 1 - decay)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.trained = pl_module.net
        pl_module.net = self.shadow

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net = self.trained


def objective(trial: Any) -> float:
    seed()
    pruning = callback(trial)
    loader = DataLoader(Points(), 4, shuffle=True)
    trainer(pruning, Ema()).fit(Module(), loader, DataLoader(Points(8), 4))
    return pruning.value
