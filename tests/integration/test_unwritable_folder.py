"""A checkpoint folder that cannot be written costs no trial: runs wait in memory, and that is said.

What stands in the way here is a file: that stops root, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

UNITS = 8

LOOP = f"""
import time
from pathlib import Path

import torch

from optuna_hermes.pytorch import suspendable

TRAINED = Path(__file__).with_name("trained")


def objective(trial):
    model = torch.nn.Linear(1, 1)
    run = suspendable(trial, model=model)
    for epoch in run.epochs({UNITS}):
        for batch in run.batches([1.0, 2.0]):
            time.sleep(0.02)
        with TRAINED.open("a") as file:
            file.write(f"{{trial.number}} {{epoch + 1}}\\n")
        run.report(1.0 / (1 + epoch))
    return run.value
"""

LIGHTNING = f"""
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset
from pathlib import Path

from optuna_hermes.lightning import HermesCallback

TRAINED = Path(__file__).with_name("trained")


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def training_step(self, batch):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Note(L.Callback):
    def __init__(self, number):
        self.number = number

    def on_train_epoch_end(self, trainer, module):
        with TRAINED.open("a") as file:
            file.write(f"{{self.number}} {{trainer.current_epoch + 1}}\\n")


def objective(trial):
    hermes = HermesCallback(trial, monitor="loss")
    trainer = L.Trainer(max_epochs={UNITS}, callbacks=[hermes, Note(trial.number)],
                        enable_progress_bar=False, accelerator="cpu")
    trainer.fit(Net(), DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=4))
    return hermes.value
"""

N_TRIALS = 3


def units(folder: Path) -> list[tuple[int, ...]]:
    file = folder / "trained"
    lines = file.read_text().splitlines() if file.exists() else []
    return sorted(tuple(map(int, line.split())) for line in lines)


ALL = [(number, unit) for number in range(N_TRIALS) for unit in range(1, UNITS + 1)]


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(LOOP, id="loop"),
        pytest.param(LIGHTNING, id="lightning", marks=pytest.mark.slow),
    ],
)
def test_from_the_beginning(script: str, tmp_path: Path, start_cli: Callable[..., Any]) -> None:
    """Every unit is trained once, and one line says where nothing can be written."""
    (tmp_path / "script.py").write_text(script)
    place = tmp_path / "checkpoints"
    place.write_text("a file")
    ended = start_cli(
        *("optimize", "script.py:objective", "--storage", "sqlite:///study.db"),
        *("--study-name", "s", "--n-trials", N_TRIALS, "--devices", "cpu:1", "--json"),
        *("--checkpoint-dir", place, "--policy", "round-robin", "--slice-seconds", 0.1),
        cwd=tmp_path,
    ).wait()
    assert ended.returncode == 0, ended.stderr
    assert {each["state"] for each in json.loads(ended.stdout)["trials"]} == {"COMPLETE"}
    assert units(tmp_path) == ALL
    said = [line for line in ended.stderr.splitlines() if "annot write" in line]
    assert len(said) == 1, ended.stderr
    assert f"Cannot write into {place}/" in said[0]
    assert said[0].endswith("Until then suspended trials wait in memory only.")
    assert place.read_text() == "a file"


def test_in_the_midst(
    tmp_path: Path, start_cli: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    """Trials go on in memory, each says so once, and nothing is trained twice."""
    (tmp_path / "script.py").write_text(LOOP)
    place = tmp_path / "checkpoints"
    running = start_cli(
        *("optimize", "script.py:objective", "--storage", "sqlite:///study.db"),
        *("--study-name", "s", "--n-trials", N_TRIALS, "--devices", "cpu:1", "--json"),
        *("--checkpoint-dir", place, "--policy", "round-robin", "--slice-seconds", 0.1),
        cwd=tmp_path,
    )
    wait_for(lambda: len(list(place.glob("*/trial-*/*.safetensors"))) > 1, 60)
    place.rename(tmp_path / "taken away")
    place.write_text("a file")
    ended = running.wait()
    assert ended.returncode == 0, ended.stderr
    assert units(tmp_path) == ALL
    said = [line for line in ended.stderr.splitlines() if "annot write" in line]
    assert 1 <= len(said) <= 2 * N_TRIALS, ended.stderr
