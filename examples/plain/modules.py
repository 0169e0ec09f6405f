"""Parts that the scripts with Lightning share, and that none of them may change."""

import lightning.pytorch as pl
import torch
from parts import TRAIN, VALID, network
from torch import nn
from torch.utils.data import DataLoader


class Net(pl.LightningModule):
    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        self.lr = lr
        self.net = network()

    def training_step(self, batch: list) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(TRAIN, batch_size=32, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(VALID, batch_size=64)


def make_trainer(**options: object) -> pl.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    options = {"max_epochs": 6, "enable_checkpointing": False, **quiet, **options}
    return pl.Trainer(accelerator="cpu", **options)


def fit(model: pl.LightningModule, callbacks: list) -> float:
    """A training that others wrote, which takes callbacks."""
    trainer = make_trainer(callbacks=callbacks)
    trainer.fit(model, datamodule=Data())
    return trainer.callback_metrics["val_loss"].item()
