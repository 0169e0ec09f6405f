"""Thaws its layers one after the other, stores predictions, and counts in callbacks of its own."""

from typing import Any

import lightning.pytorch as pl
import torch
from kit import Module, Points, callback, seed, trainer
from lightning.pytorch.callbacks import BaseFinetuning
from torch.utils.data import DataLoader


class Thaw(BaseFinetuning):
    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 3:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.001)


class Difficult(pl.Callback):
    """Weights each batch by how hard it was before."""

    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = float(outputs["loss"])
        self.seen[batch_idx] = 0.5 * self.seen.get(batch_idx, loss) + 0.5 * loss
        pl_module.weight = 1 + self.seen[batch_idx] / (1 + sum(self.seen.values()))


class Weighted(Module):
    weight = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * self.weight

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], self.lr)


def objective(trial: Any) -> float:
    seed()
    pruning = callback(trial)
    loader = DataLoader(Points(), 4, shuffle=True)
    trainer(pruning, Thaw(), Difficult()).fit(Weighted(), loader, DataLoader(Points(8), 4))
    return pruning.value
