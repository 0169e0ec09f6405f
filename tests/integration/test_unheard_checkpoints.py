"""A checkpoint stored without a broker is not trained again, even if its worker dies too."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

UNITS = 25

SCRIPT = f"""
import os, time
from pathlib import Path

import torch

from optuna_hermes.pytorch import suspendable

TRAINED = Path(__file__).with_name("trained")


def objective(trial):
    model = torch.nn.Linear(1, 1)
    run = suspendable(trial, model=model)
    for epoch in run.epochs({UNITS}):
        for batch in run.batches([1.0, 2.0]):
            time.sleep(0.05)
        with TRAINED.open("a") as file:
            file.write(f"{{epoch + 1}} {{os.getpid()}}\\n")
        run.report(1.0 / (1 + epoch))
    return run.value
"""


def test_units_of_a_broker_s_absence_are_trained_once(
    tmp_path: Path,
    runtime_dir: Path,
    start_cli: Callable[..., Any],
    wait_for: Callable[..., Any],
) -> None:
    """A broker hears nothing for six units, then it and the worker die: one unit is repeated."""
    trained = tmp_path / "trained"
    (tmp_path / "script.py").write_text(SCRIPT)

    def rows() -> list[tuple[int, ...]]:
        text = trained.read_text() if trained.exists() else ""
        return [tuple(map(int, line.split())) for line in text.splitlines()]

    running = start_cli(
        *("optimize", "script.py:objective", "--storage", "sqlite:///study.db"),
        *("--study-name", "s", "--n-trials", 1, "--devices", "cpu:1", "--json"),
        cwd=tmp_path,
    )
    wait_for(lambda: len(rows()) > 2, 60)
    broker = json.loads((runtime_dir / "broker.json").read_text())["pid"]
    os.kill(broker, signal.SIGSTOP)
    stopped_at = len(rows())
    wait_for(lambda: len(rows()) >= stopped_at + 7, 60)
    worker = rows()[-1][1]

    def has_stored_all_but_one() -> bool:
        """Stop it where only the last unit is not stored yet: it writes while it trains on."""
        os.kill(worker, signal.SIGSTOP)
        names = (each.stem for each in tmp_path.rglob("*-unit-*.safetensors"))
        stored = max((int(each.partition("-unit-")[2]) for each in names), default=0)
        if stored >= len(rows()) - 1:
            return True
        os.kill(worker, signal.SIGCONT)
        return False

    wait_for(has_stored_all_but_one, 60)
    os.kill(worker, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(broker, signal.SIGKILL)
    ended = running.wait()
    assert ended.returncode == 0, ended.stderr
    units = [unit for unit, _ in rows()]
    assert set(units) == set(range(1, UNITS + 1))
    assert len({pid for _, pid in rows()}) == 2
    assert len(units) <= UNITS + 1, units
