"""Whole studies on the device: the quickstart's under several schedulers, and two trials in turns.

As a script, this file is a study of plain Optuna's: ``_gpu_study.py N_TRIALS``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _gpu_device import Add, Setting, open_device

if TYPE_CHECKING:
    from optuna import Trial

    from optuna_hermes.model import TierName

N_TRIALS, EPOCHS = 16, 15
DRY_TRIALS, DRY_EPOCHS = 3, 2
TURNS_MB = 100
TIERS: tuple[TierName, ...] = ("resident", "host", "disk")


def objective(trial: Trial) -> float:
    """The quickstart's network and data, in a loop of one's own on the device."""
    dry = os.environ["HERMES_GPU_DRY"] == "1"
    setting = open_device(Path.cwd(), dry=dry)
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    from optuna_hermes.pytorch import suspendable
    from optuna_hermes.quickstart import data

    device = setting.device
    width = trial.suggest_int("width", 8, 256, log=True)
    model = nn.Sequential(
        nn.Linear(64, width),
        nn.ReLU(),
        nn.Dropout(trial.suggest_float("dropout", 0.0, 0.6)),
        nn.Linear(width, 10),
    ).to(device)
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    optimizer = torch.optim.Adam(model.parameters(), lr)
    train, held_out = data()
    loader = DataLoader(train, batch_size=64, shuffle=True, pin_memory=True)
    x_held_out, y_held_out = (each.to(device) for each in held_out.tensors)
    run = suspendable(trial, model=model, optimizer=optimizer)
    for _ in run.epochs(DRY_EPOCHS if dry else EPOCHS):
        model.train()
        for x, y in run.batches(loader):
            out = model(x.to(device, non_blocking=True))
            loss = nn.functional.cross_entropy(out, y.to(device, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        model.eval()
        with torch.no_grad():
            run.report(nn.functional.cross_entropy(model(x_held_out), y_held_out).item())
    assert run.value is not None
    return run.value


def race(setting: Setting, add: Add) -> None:
    """Add a row for each scheduler of the same study."""
    os.environ["HERMES_GPU_DRY"] = str(int(setting.dry))
    number = DRY_TRIALS if setting.dry else N_TRIALS
    for policy in ("hermes", "fifo", "round-robin"):
        add(scheduler=policy, **_by_hermes(setting, policy, number))
    add(scheduler="plain Optuna", **_by_optuna(number))


def _by_hermes(setting: Setting, policy: str, number: int) -> dict[str, Any]:
    url = f"sqlite:///{setting.folder / f'{policy}.db'}"
    command = [sys.executable, "-m", "optuna_hermes", "optimize", f"{__file__}:objective"]
    command += ["--storage", url, "--study-name", "s", "--n-trials", str(number), "--seed", "0"]
    command += ["--devices", "cpu:2" if setting.dry else "auto", "--policy", policy, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr.strip().splitlines()[-1])
    found = json.loads(done.stdout)
    kinds = {name: seconds for name, seconds in found["overhead_seconds"].items() if seconds}
    return {
        "devices": len(found["devices"]),
        "trials": len(found["trials"]),
        "seconds": found["elapsed_seconds"],
        "device_seconds": found["device_seconds"],
        "overhead_fraction": found["overhead_fraction"],
        "overhead": ", ".join(f"{name} {seconds:.1f} s" for name, seconds in kinds.items()),
        "switches": found["switches"],
        "best": found["best"]["value"],
    }


def _by_optuna(number: int) -> dict[str, Any]:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, __file__, str(number)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr.strip().splitlines()[-1])
    best = float(done.stdout.splitlines()[-1])
    return {"devices": 1, "trials": number, "seconds": time.monotonic() - began, "best": best}


def be_plain(number: int) -> None:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(objective, n_trials=number)
    print(study.best_value)


def take_turns(setting: Setting, add: Add) -> None:
    """Add what a switch between two trials takes, in memory."""
    from _switch_hermes import measure_hermes
    from _switch_runs import read_switches

    size, switches, warm_up = (1, 2, 2) if setting.dry else (TURNS_MB, 20, 4)
    for tier in TIERS[:1] if setting.dry else TIERS:
        folder = setting.folder / tier
        folder.mkdir()
        batches = measure_hermes(tier, int(1e6 * size), folder, switches=warm_up + switches)
        seen = read_switches(batches, skip=warm_up)
        add(
            state=f"{size} MB",
            tier=tier,
            switches=len(seen.to_batch),
            median_ms=1e3 * statistics.median(seen.to_batch),
            longest_ms=1e3 * max(seen.to_batch),
            with_the_first_step_ms=1e3 * statistics.median(seen.to_step),
        )


if __name__ == "__main__":
    be_plain(int(sys.argv[1]))
