"""The study of ``optuna-hermes quickstart``: a small network on scikit-learn's digits.

It has the parts that a user writes: a model, an objective, and one callback.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import TYPE_CHECKING

import torch
from optuna import Trial
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from optuna_hermes.lightning import HermesCallback

# L, as Lightning's own documentation writes it.
if TYPE_CHECKING or importlib.util.find_spec("lightning") is not None:
    import lightning as L  # noqa: N812
else:
    import pytorch_lightning as L  # noqa: N812

EPOCHS = 15
BATCH_SIZE = 64
_N_TRAIN = 1437
"""Four fifths of the digits."""


class Digits(L.LightningModule):
    """A classifier with two layers."""

    def __init__(self, *, width: int, dropout: float, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 10)
        )

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The loss of one batch."""
        return self._loss(batch)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Log the loss as ``val_loss``."""
        self.log("val_loss", self._loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam with the trial's learning rate."""
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)


@cache
def data() -> tuple[TensorDataset, TensorDataset]:
    """Images of 8 x 8 pixels with their digits, for training and for validation."""
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images / 16.0, dtype=torch.float32)
    targets = torch.tensor(labels)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    train, held_out = order[:_N_TRAIN], order[_N_TRAIN:]
    return (
        TensorDataset(inputs[train], targets[train]),
        TensorDataset(inputs[held_out], targets[held_out]),
    )


def objective(trial: Trial) -> float | None:
    """Train one network, and return the validation loss of its last epoch."""
    model = Digits(
        width=trial.suggest_int("width", 8, 256, log=True),
        dropout=trial.suggest_float("dropout", 0.0, 0.6),
        lr=trial.suggest_float("lr", 1e-4, 1e-1, log=True),
    )
    train, held_out = data()
    hermes = HermesCallback(trial, monitor="val_loss")
    trainer = L.Trainer(
        max_epochs=EPOCHS,
        callbacks=[hermes],
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        model,
        DataLoader(train, batch_size=BATCH_SIZE, shuffle=True),
        DataLoader(held_out, batch_size=len(held_out)),
    )
    return hermes.value
