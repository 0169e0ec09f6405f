"""Trainings whose objects change as they train: other parameters, and gradients that are sparse."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
import torch
from torch import nn

from optuna_hermes.pytorch import Run
from optuna_hermes.testing import FakeSession
from support.loops import by_way_of_disk, descend


def unfreezing(session: FakeSession) -> list[float]:
    """A loop that trains a second layer from its third epoch on."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model[1].parameters(), lr=0.05)
    run = Run(optuna.create_study().ask(), {"model": model, "optimizer": optimizer}, session)
    losses = run.kept.setdefault("losses", [])
    for epoch in run.epochs(5):
        if epoch == 2:
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})
        for x in run.batches([0.5, 1.0, 1.5]):
            loss = model(torch.full((2, 4), x)).square().mean()
            descend(loss, optimizer, losses, session)
        run.report(losses[-1])
    return losses


def test_a_trial_that_gets_other_parameters_waits_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No process could go on from its state; one that begins goes back to the last that fits."""
    losses = unfreezing(FakeSession())
    folder = tmp_path / "study" / "trial"
    assert unfreezing(FakeSession({8: "disk", 10: "disk"}, checkpoint_dir=folder)) == losses
    (warning,) = [each.message for each in caplog.records if "from here on" in each.message]
    assert "optimizer has other parameters than when it was named" in warning
    assert by_way_of_disk(unfreezing, tmp_path / "other", 4) == losses


def embedding(session: FakeSession) -> list[float]:
    """A loop that leaves the sparse gradients of its last batch where they are."""
    torch.manual_seed(1)
    table = nn.Embedding(20, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.05)
    run = Run(optuna.create_study().ask(), {"table": table, "optimizer": optimizer}, session)
    losses = run.kept.setdefault("losses", [])
    for _ in run.epochs(3):
        for first in run.batches([0, 4, 8]):
            loss = (table(torch.tensor([first, first, 3])) - 1).square().mean()
            # Gradients of two batches add up.
            descend(loss, optimizer, losses, session, anew=run.batch != 1)
        run.report(losses[-1])
    return losses


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_sparse_gradients_come_back(tier: str, tmp_path: Path) -> None:
    """Coalesced or not."""
    losses = embedding(FakeSession())
    if tier == "host":
        session = FakeSession({1: "host", 5: "host"}, checkpoint_dir=tmp_path / "study" / "trial")
        assert embedding(session) == losses
    else:
        assert by_way_of_disk(embedding, tmp_path, 1, 4) == losses
