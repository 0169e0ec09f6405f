"""A variational autoencoder, which draws in every pass, with loaders made anew each two epochs."""

from typing import Any

import torch
from kit import Module, Points, callback, seed, trainer, work
from torch import nn
from torch.utils.data import DataLoader


class Autoencoder(Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(2, 4)

    def loss(self, batch: Any) -> torch.Tensor:
        x, _ = batch
        mean, spread = self.encoder(x).chunk(2, dim=1)
        code = mean + torch.randn_like(mean) * (spread / 2).exp()
        divergence = (mean.square() + spread.exp() - spread - 1).mean() / 2
        return nn.functional.mse_loss(self.decoder(code), x) + 0.1 * divergence

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        work()
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def train_dataloader(self) -> Any:
        torch.rand(())
        return DataLoader(Points(24, 7 + self.current_epoch), 4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Points(8), 4)


def objective(trial: Any) -> float:
    seed()
    pruning = callback(trial)
    trainer(pruning, reload_dataloaders_every_n_epochs=2, check_val_every_n_epoch=1).fit(
        Autoencoder()
    )
    return pruning.value
