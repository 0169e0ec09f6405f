"""Tune a small network on scikit-learn's digits: 16 trials take turns on the devices there are.

Run it with ``python examples/digits_lightning.py``. Stop it when you like, start it again, and it
goes on where it was.
"""

import logging

import optuna
import torch
from lightning import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from optuna_hermes import HermesPruner, HermesSampler, optimize
from optuna_hermes.lightning import HermesCallback


class Net(LightningModule):
    def __init__(self, lr: float, weight_decay: float, width: int, dropout: float) -> None:
        super().__init__()
        self.lr = lr
        self.weight_decay = weight_decay
        self.layers = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(width, 10),
        )  # fmt: skip

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.layers(x), y)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.layers(x), y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)


def loaders() -> tuple[DataLoader, DataLoader]:
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, val = order[:1437], order[1437:]
    return (
        DataLoader(TensorDataset(x[train], y[train]), batch_size=64, shuffle=True),
        DataLoader(TensorDataset(x[val], y[val]), batch_size=len(val)),
    )


def objective(trial: optuna.Trial) -> float | None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.set_num_threads(1)  # the network is small, and trials run beside each other
    model = Net(
        lr=trial.suggest_float("lr", 1e-5, 1e-1, log=True),
        weight_decay=trial.suggest_float("weight_decay", 1e-6, 1e-1, log=True),
        width=trial.suggest_int("width", 16, 512, log=True),
        dropout=trial.suggest_float("dropout", 0.0, 0.6),
    )
    hermes = HermesCallback(trial, monitor="val_loss")
    trainer = Trainer(
        max_epochs=20, accelerator="auto", devices=1, callbacks=[hermes],
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, *loaders())
    return hermes.value


if __name__ == "__main__":
    study = optuna.create_study(
        study_name="digits", storage="sqlite:///digits.db", load_if_exists=True,
        sampler=HermesSampler(), pruner=HermesPruner(),
    )  # fmt: skip
    optimize(study, objective, n_trials=16)
    print(f"best val_loss {study.best_value:.4f} with {study.best_params}")
