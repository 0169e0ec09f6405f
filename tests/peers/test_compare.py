"""``nox -s peers`` on trees of two or three tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMPARE = Path(__file__).with_name("compare.py")

OPTUNA = """
import optuna

def test_that_knows_the_default():
    assert type(optuna.create_study().sampler) is optuna.samplers.TPESampler

def test_that_fails_anyway():
    assert False

def test_of_a_study():
    study = optuna.create_study()
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=2)
    assert len(study.trials) == 2
"""

LIGHTNING = """
import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

class Counted(BoringModel):
    def __init__(self):
        super().__init__()
        self.batches = []

    def training_step(self, batch, batch_idx):
        self.batches.append(batch_idx)
        return super().training_step(batch, batch_idx)

def test_a_fit(tmp_path):
    torch.manual_seed(1)
    trainer = pl.Trainer(
        default_root_dir=tmp_path, max_epochs=2, limit_train_batches=3, limit_val_batches=1,
        enable_progress_bar=False, enable_model_summary=False, logger=False,
    )
    model = Counted()
    trainer.fit(model)
    assert trainer.global_step == 6
    assert model.batches == [0, 1, 2, 0, 1, 2]
    assert list(tmp_path.rglob("*.ckpt"))
"""


def compare(folder: Path, only: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, COMPARE, folder, "--only", only, "--results", folder / "results"]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.slow
def test_what_fails_only_with_hermes_is_named(tmp_path: Path) -> None:
    """The table counts, tests that fail anyway do not matter, and the status is 1."""
    tree = tmp_path / "optuna/tests/pruners_tests"
    tree.mkdir(parents=True)
    (tree / "test_it.py").write_text(OPTUNA)
    done = compare(tmp_path, "optuna/pruners, memory")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "| optuna/pruners, memory | 2 | 1 | 1 | 2 | 1 |" in done.stdout
    broken = [line for line in done.stdout.splitlines() if line.startswith("BROKEN")]
    assert len(broken) == 1
    assert broken[0].endswith("test_that_knows_the_default")


@pytest.mark.slow
def test_fits_are_suspended_to_every_tier(tmp_path: Path) -> None:
    """A fit goes on in another process, in which it is suspended to both tiers of memory."""
    tree = tmp_path / "pytorch-lightning/tests/tests_pytorch/loops"
    tree.mkdir(parents=True)
    (tree / "test_it.py").write_text(LIGHTNING)
    done = compare(tmp_path, "lightning/loops, disk")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| lightning/loops, disk | 1 | 0 | 1 | 0 | 0 |" in done.stdout
    log = (tmp_path / "results/lightning-loops-disk-with.log").read_text()
    told = next(line for line in log.splitlines() if line.startswith("Hermes: "))
    assert json.loads(told.removeprefix("Hermes: ")) == {
        "fits": 1,
        "left alone": 0,
        "resident": 2,
        "host": 2,
        "disk": 1,
        "begun again": 0,
    }
