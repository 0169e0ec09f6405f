"""A run that is parked and brought back many times takes no more memory than in the end."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import optuna
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from optuna_hermes.errors import Suspended
from optuna_hermes.lightning import HermesCallback
from optuna_hermes.model import TierName
from optuna_hermes.testing import FakeSession

CYCLES = [100, pytest.param(200, marks=pytest.mark.slow)]
EVERY = 20
ALLOWED = 0.01


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Linear(512, 1))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Count(pl.Callback):
    """Tells the session of every batch, and notes the process's memory now and then."""

    def __init__(self, session: FakeSession, sizes: list[int]) -> None:
        self._session = session
        self._sizes = sizes

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._session.tick()
        if len(self._session.parks) % EVERY == EVERY - 1:
            self._sizes.append(resident_bytes())


def resident_bytes() -> int:
    """Memory of this process, without what the allocator only keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def train(session: FakeSession, sizes: list[int], cycles: int) -> None:
    data = TensorDataset(torch.randn(8 * (cycles + 1), 64))
    trial = optuna.create_study().ask()
    hermes = HermesCallback(trial, "loss", _session=session)
    pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[hermes, Count(session, sizes)],
    ).fit(Net(), DataLoader(data, batch_size=8))


@pytest.fixture(autouse=True)
def _quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    torch.set_num_threads(1)


@pytest.mark.parametrize("cycles", CYCLES)
@pytest.mark.parametrize("tier", ["resident", "host"])
def test_in_memory(tier: TierName, cycles: int, tmp_path: Path) -> None:
    """Many cycles through memory leave nothing behind."""
    sizes: list[int] = []
    yields = dict.fromkeys(range(1, cycles + 1), tier)
    session = FakeSession(yields, checkpoint_dir=tmp_path)
    train(session, sizes, cycles)
    assert session.parks == [tier] * cycles
    check(sizes, cycles)


@pytest.mark.parametrize("cycles", CYCLES)
def test_on_disk(cycles: int, tmp_path: Path) -> None:
    """Many cycles over disk leave nothing in the process, and two checkpoints on disk."""
    sizes: list[int] = []
    session = FakeSession({1: "disk"}, checkpoint_dir=tmp_path)
    for cycle in range(cycles):
        with pytest.raises(Suspended):
            train(session, [], cycles)
        session = session.again({1: "disk"})
        if cycle % EVERY == EVERY - 1:
            sizes.append(resident_bytes())
    check(sizes, cycles)
    assert len(list(tmp_path.iterdir())) <= 3


def check(sizes: list[int], cycles: int) -> None:
    assert len(sizes) == cycles // EVERY
    assert max(sizes[1:]) <= sizes[0] * (1 + ALLOWED)
