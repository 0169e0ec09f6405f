"""The number of units left that a trial sends with each of its reports."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import optuna
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from optuna_hermes.lightning import HermesCallback
from optuna_hermes.pytorch import PyTorchLoop
from optuna_hermes.testing import FakeSession


class Line(LightningModule):
    """Four weights, and a metric of each loop."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(24.0).reshape(6, 4)), batch_size=1)


def fit(session: FakeSession, times: int = 1, monitor: str = "val_loss", **options: Any) -> None:
    hermes = HermesCallback(optuna.create_study().ask(), monitor, _session=session)
    for _ in range(times):
        Trainer(
            **{"max_epochs": 4, **options},
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[hermes],
        ).fit(Line(), data(), data())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"monitor": "train_loss"},
        {"val_check_interval": 3},
        {"val_check_interval": 0.34},
        {"val_check_interval": 4},
        {"check_val_every_n_epoch": 2},
        {"check_val_every_n_epoch": 3, "val_check_interval": 2},
        {"check_val_every_n_epoch": None, "val_check_interval": 7},
        {"limit_train_batches": 2},
    ],
)
def test_the_last_report_has_none_left(options: dict[str, Any]) -> None:
    """However often there is a validation, the reports count down to zero."""
    session = FakeSession()
    fit(session, **options)
    assert session.units_left == list(range(len(session.reports)))[::-1]
    assert session.reports


@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": 20},
        {"max_epochs": -1, "max_steps": 20},
        {"check_val_every_n_epoch": None, "val_check_interval": timedelta(microseconds=1)},
    ],
)
def test_where_epochs_do_not_decide_nothing_is_said(options: dict[str, Any]) -> None:
    """Nobody knows how many validations there are in a number of steps, or by the clock."""
    session = FakeSession()
    fit(session, **options)
    assert len(session.units_left) >= 3
    assert set(session.units_left) == {None}


def test_a_second_fit_is_not_foreseen() -> None:
    """The units of a trial that fits twice are those of both."""
    session = FakeSession()
    fit(session, times=2)
    assert session.units_left == [3, 2, 1, 0, None, None, None, None]


@pytest.mark.parametrize(
    ("reports", "expected"), [(1, [2, 1, 0]), (2, [2, None, None, None, None, None])]
)
def test_a_loop_with_one_report_an_epoch_counts_down(
    reports: int, expected: list[int | None]
) -> None:
    """In plain PyTorch the number of epochs is known; more reports than epochs are not foreseen."""
    session = FakeSession()
    model = torch.nn.Linear(4, 1)
    run = PyTorchLoop(optuna.create_study().ask(), {"model": model}, session)
    for _ in run.epochs(3):
        for _batch in run.batches(data()):
            pass
        for _ in range(reports):
            run.report(0.5)
    assert session.units_left == expected
