"""Lightning's own requeueing of a job of SLURM, in a Trainer of a trial."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch.utils.data import DataLoader, TensorDataset

from optuna_hermes._lightning import _requeue
from optuna_hermes.lightning import HermesCallback
from optuna_hermes.testing import FakeSession

JOB = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


class Line(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        self.log("val_loss", self.layer(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Handlers(Callback):
    """Notes whether SIGUSR1 has a handler while a trial trains."""

    def __init__(self) -> None:
        self.set = False

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.set = signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL


@pytest.fixture(autouse=True)
def _in_a_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    _requeue._say_once.cache_clear()
    yield
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def train(session: FakeSession | None, **options: Any) -> bool:
    """Train a trial for an epoch; return whether SIGUSR1 had a handler."""
    handlers = Handlers()
    trial = optuna.create_study().ask()
    hermes = HermesCallback(trial, monitor="val_loss", _session=session)
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[hermes, handlers],
        **options,
    )
    data = DataLoader(TensorDataset(torch.ones(4, 4)))
    trainer.fit(Line(), data, data)
    assert isinstance(trainer._accelerator_connector.cluster_environment, SLURMEnvironment)
    return handlers.set


def said(caplog: pytest.LogCaptureFixture) -> int:
    return sum("requeueing under SLURM is switched off" in each for each in caplog.messages)


def test_trials_of_optimize_leave_it_to_the_driver(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No trial sets a handler, and the first of a study says so."""
    caplog.set_level(logging.WARNING)
    for number in range(2):
        assert not train(FakeSession(checkpoint_dir=tmp_path / "study" / str(number)))
    assert said(caplog) == 1


def test_trials_of_plain_optuna_do_too(caplog: pytest.LogCaptureFixture) -> None:
    """The next job would load the checkpoint of one trial into another; it is said once."""
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        assert not train(FakeSession())
    assert said(caplog) == 1


def test_an_environment_of_ones_own_is_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    """One that does not requeue is left as it is, in silence."""
    caplog.set_level(logging.WARNING)
    assert not train(FakeSession(), plugins=[SLURMEnvironment(auto_requeue=False)])
    assert said(caplog) == 0
    assert not train(FakeSession(), plugins=[SLURMEnvironment()])
    assert said(caplog) == 1


def test_a_trial_without_a_broker_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Lightning's handler is there where the callback only reports."""
    assert train(None)
    assert said(caplog) == 0
