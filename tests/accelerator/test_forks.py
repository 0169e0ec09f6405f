"""Workers are forked where an accelerator still works in a fork, and only there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest

pytestmark = pytest.mark.accelerator

Cli = Callable[..., subprocess.CompletedProcess[str]]

TESTS = Path(__file__).parents[1]
OBJECTIVE = """
import torch
from support.accelerator import KIND, install
install()
{at_import}

def objective(trial):
    install()  # where only this function was sent to
    total = torch.full((3,), trial.suggest_float("x", 0.5, 1), device=f"{{KIND}}:0")
    for unit in range(1, 4):
        total.mul_(0.5)
        trial.report(total.sum().item(), unit)
        trial.should_prune()
    return total.sum().item()
"""
SCRIPT = """
import optuna
from optuna_hermes import HermesPruner, HermesSampler, optimize

if __name__ == "__main__":
    {before}
    study = optuna.create_study(
        study_name="s", storage="{url}", sampler=HermesSampler(), pruner=HermesPruner()
    )
    optimize(study, objective, n_trials=2, devices="cpu:1", show_progress=False)
"""


@pytest.fixture(autouse=True)
def _support_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(TESTS), before])))


def optimized(cli: Cli, url: str, file: Path, at_import: str) -> subprocess.CompletedProcess[str]:
    file.write_text(OBJECTIVE.format(at_import=at_import))
    options = ("--storage", url, "--study-name", "s", "--n-trials", 2, "--devices", "cpu:1")
    return cli("optimize", f"{file}:objective", *options)


def assert_done(url: str) -> None:
    trials = optuna.load_study(study_name="s", storage=url).trials
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 2


def test_asking_for_accelerators_at_import_spoils_no_fork(
    cli: Cli, storage_url: str, tmp_path: Path
) -> None:
    """Torch is told to ask in a way that does not wake them up, and workers are forked."""
    asks = "assert torch.accelerator.is_available()"
    done = optimized(cli, storage_url, tmp_path / "asks.py", asks)
    assert done.returncode == 0, done.stderr
    assert "start slowly" not in done.stderr
    assert_done(storage_url)


def test_workers_are_new_processes_where_asking_has_woken_them_up(
    cli: Cli, storage_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a user who has told torch otherwise."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")
    asks = "assert torch.accelerator.is_available()"
    done = optimized(cli, storage_url, tmp_path / "asks.py", asks)
    assert done.returncode == 0, done.stderr
    assert "since an accelerator was used" in done.stderr
    assert_done(storage_url)


def test_a_context_at_import_is_refused(cli: Cli, storage_url: str, tmp_path: Path) -> None:
    """It would take memory of a device that is not leased."""
    done = optimized(cli, storage_url, tmp_path / "uses.py", "torch.ones(1, device=f'{KIND}:0')")
    assert done.returncode != 0
    assert "must not use an accelerator" in done.stderr


@pytest.mark.parametrize(
    "before",
    ["pass", "torch.accelerator.is_available()", "torch.ones(1, device=f'{KIND}:0')"],
    ids=["nothing", "asked", "used"],
)
def test_trials_of_a_script_use_the_accelerator(
    before: str, storage_url: str, tmp_path: Path
) -> None:
    """Also if the script has woken the driver up, or used a device, before it optimizes."""
    file = tmp_path / "script.py"
    script = SCRIPT.format(url=storage_url, before=before)
    file.write_text(OBJECTIVE.format(at_import="") + script)
    done = subprocess.run(
        [sys.executable, str(file)], cwd=tmp_path, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert_done(storage_url)
