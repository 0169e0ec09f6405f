"""A trial of Lightning's command line, whose callback saves its configuration."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import optuna
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from optuna_hermes import HermesCallback
from optuna_hermes.testing import FakeSession
from support.loops import by_way_of_disk


@pytest.fixture(autouse=True)
def without_warnings_of_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning uses what it deprecates."""
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


class Net(pl.LightningModule):
    """Learns a line."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.net(batch[0]) - batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", (self.net(batch[0]) - batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Data(pl.LightningDataModule):
    """Eight numbers."""

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.linspace(0, 1, 8)[:, None]), 2)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


class Ticks(pl.Callback):
    """Tells the session of each batch."""

    def __init__(self, session: FakeSession) -> None:
        self.session = session

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.session.tick()


def train(session: FakeSession, root: Path, place: int | None, logger: bool) -> float:
    """One process of the trial; its callback is appended, or inserted at a place."""
    options = {
        "max_epochs": 4,
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(root),
        "logger": logger
        and {
            "class_path": "lightning.pytorch.loggers.CSVLogger",
            "init_args": {"save_dir": str(root)},
        },
    }
    cli = LightningCLI(Net, Data, seed_everything_default=1, run=False, args={"trainer": options})
    hermes = HermesCallback(optuna.create_study().ask(), "val_loss", _session=session)
    callbacks = cli.trainer.callbacks
    callbacks.insert(len(callbacks) if place is None else place, hermes)
    callbacks.append(Ticks(session))
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    assert hermes.value is not None
    return hermes.value


@pytest.mark.parametrize("place", [0, None])
@pytest.mark.parametrize("logger", [True, False])
def test_a_trial_goes_on_in_its_log_folder(logger: bool, place: int | None, tmp_path: Path) -> None:
    """Its configuration is saved once, and is not in the way of the next processes."""
    value = train(FakeSession(), tmp_path / "whole", place, logger)
    root = tmp_path / "parts"
    parts = functools.partial(train, root=root, place=place, logger=logger)
    assert by_way_of_disk(parts, tmp_path, 6, 5) == value
    (config,) = root.rglob("config.yaml")
    assert config.parent == (root / "lightning_logs" / "version_0" if logger else root)
    assert not list(root.rglob("version_1"))
