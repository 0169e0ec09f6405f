"""Parts shared by the scripts: the package's callback and loop, or plain Optuna's, small data.

``STRANGERS=plain`` makes each script one of plain Optuna: nothing of this package is imported.
``STRANGERS=FILE`` makes batches take long: a script that has reported a value waits until the file
is there, and so all have begun before any has ended.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import optuna
import torch
from torch import nn
from torch.utils.data import Dataset

PLAIN = os.environ.get("STRANGERS") == "plain"
SLOW = None if PLAIN else os.environ.get("STRANGERS")
EPOCHS = 8
SAMPLES = 24

TRIALS: list[optuna.Trial] = []


class _Reporting(pl.Callback):
    """Tells Optuna the metric after each validation, or each epoch where nothing validates."""

    def __init__(self, trial: optuna.Trial, monitor: str) -> None:
        self._trial = trial
        self._monitor = monitor
        self.value = float("nan")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._report(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch and not trainer.enable_validation:
            self._report(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.enable_validation:
            self._report(trainer)

    def _report(self, trainer: pl.Trainer) -> None:
        if self._monitor in trainer.callback_metrics:
            self.value = float(trainer.callback_metrics[self._monitor])
            self._trial.report(self.value, len(_reported(self._trial)) + 1)


class _Loop:
    """The loops of ``suspendable``, without it."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.kept: dict[str, Any] = {}
        self._trial = trial

    def epochs(self, number: int) -> Iterator[int]:
        yield from range(number)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        yield from loader

    def report(self, value: float) -> None:
        self._trial.report(value, len(_reported(self._trial)) + 1)


def _reported(trial: optuna.Trial) -> dict[int, float]:
    return trial.storage.get_trial(trial._trial_id).intermediate_values


def callback(trial: optuna.Trial, monitor: str = "val_loss") -> Any:
    """``HermesCallback``, or what a plain script has in its place."""
    TRIALS.append(trial)
    if PLAIN:
        return _Reporting(trial, monitor)
    from optuna_hermes import HermesCallback

    return HermesCallback(trial, monitor=monitor)


def loop(trial: optuna.Trial, **parts: Any) -> Any:
    """``suspendable``, or a plain loop."""
    TRIALS.append(trial)
    if PLAIN:
        return _Loop(trial)
    from optuna_hermes import suspendable

    return suspendable(trial, **parts)


def work() -> None:
    """Wait for the time that a batch takes beside its few numbers."""
    if SLOW is None:
        return
    time.sleep(0.3)
    if all(_reported(trial) for trial in TRIALS):
        while not os.path.exists(SLOW):
            time.sleep(0.1)
        # The rest of the training is not to pass before the interruption is heard.
        time.sleep(3.0)


def seed(number: int = 1) -> None:
    """As scripts begin."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Some points and their sums."""

    def __init__(self, length: int = SAMPLES, number: int = 7) -> None:
        self._x = torch.randn(length, 4, generator=torch.Generator().manual_seed(number))

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._x[index], self._x[index].sum()


def net() -> nn.Sequential:
    """A small network with dropout."""
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))


class Module(pl.LightningModule):
    """A module as in tutorials."""

    def __init__(self, lr: float = 0.02) -> None:
        super().__init__()
        self.lr = lr
        self.net = net()

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x).squeeze(-1), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        work()
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def trainer(*callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """A quiet Trainer."""
    quiet = {"logger": False, "enable_checkpointing": False, "max_epochs": EPOCHS}
    shown = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return pl.Trainer(**{**quiet, **shown, "callbacks": list(callbacks), **options})
