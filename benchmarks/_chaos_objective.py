"""The objective of ``chaos.py``: a small network on scikit-learn's digits."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import optuna
import torch
from _chaos_orders import Orders
from _chaos_records import FOLDER_VARIABLE, Marker, Records
from lightning.pytorch import Callback, LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from optuna_hermes._optuna import session_of
from optuna_hermes.lightning import HermesCallback

N_VALIDATION = 360


class Net(LightningModule):
    def __init__(self, lr: float, dropout: float, width: int) -> None:
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(
            nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(width, 10),
        )  # fmt: skip

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Witness(Callback):
    """Puts down every value before the callback after it reports it, and paces the batches.

    It also obeys orders.
    """

    def __init__(self, trial: optuna.Trial, records: Records) -> None:
        self._trial = trial
        self._records = records
        self._orders = Orders(records.folder)

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self._orders.obey(self._trial.number, "batch")
        pace = self._records.pace_seconds
        if pace:
            time.sleep(pace)  # as a device that computes while the host has nothing to do

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        unit, per_unit = trainer.current_epoch + 1, int(trainer.num_training_batches)
        self._records.batch(self._trial.number, unit, batch_idx, per_unit)

    def on_validation_start(self, *args: Any, **kwargs: Any) -> None:
        self._orders.obey(self._trial.number, "validation")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            value = float(trainer.callback_metrics["val_loss"])
            unit = trainer.current_epoch + 1
            self._records.add(self._trial.number, unit, value)
            print(f"unit {unit}: {value}", flush=True)


def objective(trial: optuna.Trial) -> float | None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    records = Records(Path(os.environ[FOLDER_VARIABLE]))
    marker = Marker(records, trial.number)
    _mark(trial, marker)
    try:
        return train(trial, records)
    finally:
        marker.leave()


def train(trial: optuna.Trial, records: Records) -> float | None:
    setting = records.setting
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    hermes = HermesCallback(trial, monitor="val_loss")
    trainer = Trainer(
        max_epochs=setting.epochs, accelerator="cpu", devices=1, num_sanity_val_steps=0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[Witness(trial, records), hermes],
    )  # fmt: skip
    trainer.fit(Net(lr, trial.suggest_float("dropout", 0.0, 0.6), setting.width), *loaders(setting))
    return hermes.value


def loaders(setting: Any) -> tuple[DataLoader, DataLoader]:
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data / 16).float(), torch.tensor(digits.target))
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
    train, val = order[N_VALIDATION:], order[:N_VALIDATION]
    return (
        DataLoader(torch.utils.data.Subset(data, train), setting.batch_size, shuffle=True),
        DataLoader(torch.utils.data.Subset(data, val), N_VALIDATION),
    )


def _mark(trial: optuna.Trial, marker: Marker) -> None:
    """Hold the marker of the trial's device whenever the trial has the device."""
    session = session_of(trial)
    assert session is not None
    park = session.park

    def parked(state: Any) -> None:
        marker.leave()
        park(state)
        marker.take(session.devices[0])

    session.park = parked  # type: ignore[method-assign]
    if session.devices:  # else it is set up, and parks at its first batch
        marker.take(session.devices[0])
