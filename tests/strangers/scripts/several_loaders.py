"""A dict of training loaders of unequal lengths, and a list of validation loaders."""

from typing import Any

import torch
from kit import Module, Points, callback, seed, trainer, work
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader


class Both(Module):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        work()
        return self.loss(batch["labelled"]) + 0.1 * self.net(batch["unlabelled"][0]).var()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log(f"val_loss_{dataloader_idx}", self.loss(batch), add_dataloader_idx=False)


def objective(trial: Any) -> float:
    seed()
    pruning = callback(trial, "val_loss_1")
    loaders = {
        "labelled": DataLoader(Points(), 4, shuffle=True),
        "unlabelled": DataLoader(Points(16, 8), 4, shuffle=True),
    }
    vals = [DataLoader(Points(8, number), 4) for number in (1, 2)]
    trainer(pruning).fit(Both(), CombinedLoader(loaders, "max_size_cycle"), vals)
    return pruning.value
