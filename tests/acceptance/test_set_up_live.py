"""Objectives that are called before there is a device for their trials."""

from __future__ import annotations

import contextlib
import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest

from optuna_hermes import _optuna
from optuna_hermes.ledger import open_ledger

OBJECTIVE = textwrap.dedent(
    """
    import time
    from pathlib import Path
    import torch
    from optuna_hermes import suspendable, wait_for_device

    FOLDER = Path(__file__).parent

    def train_until_another_is_called():
        end = time.monotonic() + 60.0
        while len([*FOLDER.glob("called-*")]) < 2 and time.monotonic() < end:
            time.sleep(0.01)

    def objective(trial):
        called = FOLDER / f"called-{{trial.number}}"
        print("CALLED", time.time(), flush=True)
        if {waits}:
            called.touch()
            wait_for_device(trial)
        print("GOES ON", time.time(), flush=True)
        called.touch()
        x = torch.randn(16, 2)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=trial.suggest_float("lr", 0.01, 0.1))
        loader = torch.utils.data.DataLoader(x, batch_size=4, shuffle=True)
        run = suspendable(trial, model=model, optimizer=optimizer)
        for _ in run.epochs(4):
            for batch in run.batches(loader):
                train_until_another_is_called()
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.05)  # what a larger network would take, without the heat
            run.report(model(x).square().mean().item())
        return run.value
    """
)


def trained(
    cli: Callable[..., Any], folder: Path, name: str, *, waits: bool, devices: int
) -> tuple[list[float], list[dict[str, float]]]:
    """Values of the trials of a study, and when each was called, went on and had a device."""
    (folder / "train.py").write_text(OBJECTIVE.format(waits=waits))
    storage = f"sqlite:///{folder / name}.db"
    done = cli(
        *("optimize", "train.py:objective", "--storage", storage, "--study-name", "s", "--json"),
        *("--n-trials", 6, "--devices", f"cpu:{devices}", "--seed", 0),
        *("--slice-seconds", 0.2, "--policy", "round-robin"),
    )
    assert done.returncode == 0, done.stderr
    values = [trial["value"] for trial in json.loads(done.stdout)["trials"]]
    study = optuna.load_study(study_name="s", storage=storage)
    key = _optuna.study_key(study)
    with contextlib.closing(open_ledger(_optuna.ledger_url(study))) as ledger:
        leases = ledger.load_leases(since=0)
    times = []
    for number in range(6):
        (log,) = folder.glob(f"{name}.db.hermes/{key}/trial-{number:05d}/output.log")
        lines = [line.rpartition(" ") for line in log.read_text().splitlines()]
        first = {words: float(at) for words, _, at in reversed(lines) if words.isupper()}
        leased = min(lease.started for lease in leases if lease.number == number)
        times.append({**first, "LEASED": leased})
    return values, times


@pytest.fixture
def run(cli: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    return lambda name, **options: trained(cli, tmp_path, name, **options)


@pytest.mark.slow
def test_an_objective_is_called_before_there_is_a_device(run: Callable[..., Any]) -> None:
    """It comes to its first batch while others train, and trains as it does without."""
    values, times = run("early", waits=False, devices=1)
    assert any(each["GOES ON"] < each["LEASED"] for each in times)
    waiting, _ = run("waits", waits=True, devices=2)
    assert values == waiting


def test_what_must_have_its_device_can_wait_for_it(run: Callable[..., Any]) -> None:
    """The objective is called before, and goes on under its lease."""
    _, times = run("waits", waits=True, devices=1)
    assert any(each["CALLED"] < each["LEASED"] for each in times)
    assert all(each["GOES ON"] > each["LEASED"] - 0.01 for each in times)
