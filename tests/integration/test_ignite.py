"""PyTorch-Ignite's engines, trained as docs/frameworks.md says."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from optuna_hermes.pytorch import PyTorchLoop
from optuna_hermes.testing import FakeSession
from support.loops import by_way_of_disk

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of what it imports of torch
    from ignite.engine import Engine, Events
    from ignite.metrics import RunningAverage

DATA = TensorDataset(torch.linspace(-1, 1, 64).reshape(16, 4))
EPOCHS = 4


def train(session: FakeSession) -> list[float]:
    """Keeps counts of its own, a mean and the best loss in the engine's state."""
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(engine: Engine, batch: list[torch.Tensor]) -> float:
        optimizer.zero_grad()
        loss = (model(batch[0]) - 1).square().mean()
        loss.backward()
        optimizer.step()
        state: Any = engine.state
        state.seen += len(batch[0])
        state.losses.append(loss.item())
        return loss.item()

    trainer = Engine(step)
    RunningAverage(output_transform=lambda output: output).attach(trainer, "mean")
    state: Any = trainer.state
    state.seen, state.losses, state.best = 0, [], None

    @trainer.on(Events.EPOCH_COMPLETED)
    def note_best(engine: Any) -> None:
        state.best = min(engine.state.losses if state.best is None else [state.best])

    named = {"model": model, "optimizer": optimizer, "trainer": trainer}
    run = PyTorchLoop(optuna.create_study().ask(), named, session)
    values = run.kept.setdefault("values", [])
    for epoch in run.epochs(EPOCHS):
        session.tick()
        if epoch:
            values.append(state.metrics["mean"])
        trainer.run(DataLoader(DATA, batch_size=4, shuffle=True), max_epochs=epoch + 1)
        values += [state.seen, len(state.losses), state.best, state.losses[-1]]
        run.report(values[-1])
    return values


@pytest.mark.parametrize("stops", [(2,), (1, 1), (3,)])
def test_what_an_engines_state_holds_is_kept(
    stops: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also what Ignite's own state_dict leaves out."""
    expected = train(FakeSession())
    assert expected[-4] == EPOCHS * len(DATA)
    with caplog.at_level(logging.WARNING, "optuna_hermes"):
        assert by_way_of_disk(train, tmp_path, *stops) == expected
    assert [each for each in caplog.records if each.name.startswith("optuna_hermes")] == []
