"""A study whose trials get one device or several, from slice to slice."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import lightning as L  # noqa: N812
import optuna
import pytest
import torch
from sklearn.datasets import load_iris
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from optuna_hermes import HermesCallback, HermesPruner, HermesSampler, optimize
from optuna_hermes.ledger import open_ledger

EPOCHS = 24


class Net(L.LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 256), torch.nn.ReLU(), torch.nn.Linear(256, 3)
        )

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def objective(trial: optuna.Trial) -> float | None:
    inputs, labels = load_iris(return_X_y=True)
    data = TensorDataset(torch.tensor(inputs, dtype=torch.float32), torch.tensor(labels))
    hermes = HermesCallback(trial, monitor="loss", max_devices=2)
    trainer = L.Trainer(
        max_epochs=EPOCHS,
        callbacks=[hermes],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **hermes.trainer_options,
    )
    model = Net(trial.suggest_float("lr", 1e-4, 1e-2, log=True))
    trainer.fit(model, DataLoader(ConcatDataset([data] * 4), batch_size=32, shuffle=True))
    return hermes.value


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_ones_gives_trials_several_devices(tmp_path: Path) -> None:
    """The ledger shows leases of one and of two devices, never two of a device at a time."""
    url = f"sqlite:///{tmp_path}/study.db"
    study = optuna.create_study(storage=url, sampler=HermesSampler(), pruner=HermesPruner())
    result = optimize(
        study,
        f"{__file__}:objective",
        n_trials=3,
        devices="cpu:4",
        policy="ones",
        slice_seconds=2.0,
        show_progress=False,
        seed=1,
    )
    assert [trial.state for trial in result.trials] == ["COMPLETE"] * 3
    ledger = open_ledger(url)
    leases = ledger.load_leases()
    ledger.close()
    assert {len(lease.devices) for lease in leases} == {1, 2}
    for device in {id_ for lease in leases for id_ in lease.devices}:
        spans = sorted((x.started, x.ended or 0) for x in leases if device in x.devices)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans)), device
    for trial in result.trials:
        held = [(x.ended or 0) - x.started for x in leases if x.number == trial.number]
        assert trial.device_seconds >= sum(held), "each device counts"
