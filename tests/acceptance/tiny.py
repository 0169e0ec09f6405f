"""A study that trains for real and is small enough for tests."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import optuna
import torch
from optuna.trial import TrialState
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from optuna_hermes.lightning import HermesCallback
from optuna_hermes.testing import FakeSession

EPOCHS = 8


class Net(L.LightningModule):
    def __init__(self, lr: float, dropout: float) -> None:
        super().__init__()
        self.lr = lr
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 32),
            torch.nn.BatchNorm1d(32),
            torch.nn.Dropout(dropout),
            torch.nn.ReLU(),
            torch.nn.Linear(32, 3),
        )

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        self.log("val_loss", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def train(
    trial: optuna.Trial,
    monitor: str = "val_loss",
    times: int = 1,
    callbacks: tuple[L.Callback, ...] = (),
    **options: Any,
) -> float | None:
    """Train for ``EPOCHS``; in each the data are gone through so many ``times``."""
    data = _flowers()
    hermes = HermesCallback(trial, monitor=monitor, **options)
    trainer = L.Trainer(
        max_epochs=EPOCHS,
        callbacks=[hermes, *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Net(trial.suggest_float("lr", 1e-4, 1e-1, log=True), trial.suggest_float("p", 0, 0.5))
    trainer.fit(
        model,
        DataLoader(ConcatDataset([data] * times), batch_size=4, shuffle=True),
        DataLoader(data, batch_size=150),
    )
    return hermes.value


def _flowers() -> TensorDataset:
    """Made-up measures of three kinds: importing those of scikit-learn takes a second."""
    kinds = torch.arange(150) % 3
    noise = torch.randn(150, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(kinds[:, None] * torch.tensor([1.0, -1.0, 0.5, 0.0]) + noise, kinds)


def objective(trial: optuna.Trial) -> float | None:
    return train(trial)


def long_epochs(trial: optuna.Trial) -> float | None:
    return train(trial, times=10)


def misnamed(trial: optuna.Trial) -> float | None:
    return train(trial, monitor="accuracy")


def failing(trial: optuna.Trial) -> float | None:
    if trial.number == 1:
        raise RuntimeError("out of luck")
    return train(trial)


def hungry(trial: optuna.Trial) -> float | None:
    """Trial 1 needs more memory than others leave it, trial 2 more than there is."""
    attempts = Path(f"attempts-{trial.number}")
    attempts.touch()
    with attempts.open("a") as file:
        file.write("x")
    if trial.number == 2 or (trial.number == 1 and attempts.stat().st_size == 1):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    return train(trial)


def told_and_died(trial: optuna.Trial) -> float:
    """Its process dies right after Optuna knows the value."""
    trial.study._storage.set_trial_state_values(trial._trial_id, TrialState.COMPLETE, [0.5])
    os._exit(9)


def only_reports(trial: optuna.Trial) -> float:
    """No callback: it can wait in memory, and not leave its process."""
    x = trial.suggest_float("x", -1, 1)
    for unit in range(1, 6):
        trial.report(x * x + 1 / unit, unit)
        if trial.should_prune():
            raise optuna.TrialPruned
    return x * x


class Batches(L.Callback):
    """Writes a line for every batch that was trained, to the bit."""

    def __init__(self, file: Path, session: FakeSession | None) -> None:
        self._file = file
        self._session = session

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, at: int
    ) -> None:
        size = trainer.train_dataloader.batch_size  # type: ignore[union-attr]
        line = [trainer.current_epoch, at, size, float(outputs["loss"]).hex()]
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self._session is not None:
            self._session.tick()


def elastic(trial: optuna.Trial, session: FakeSession | None = None) -> float | None:
    """As ``objective``, with batches of 4 that may have 2 to 32 samples."""
    torch.set_num_threads(1)
    batches = Batches(Path(f"batches-{trial.number}"), session)
    return train(trial, callbacks=(batches,), elastic_batch=(2, 32), _session=session)
