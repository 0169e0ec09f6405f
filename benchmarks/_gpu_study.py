"""Whole studies on the device: the quickstart's, one that does not fit, and two trials in turns.

As a script, this file is a study of plain Optuna's, ``_gpu_study.py N_TRIALS``, or a broker that
is shown a part of the device's memory, ``_gpu_study.py DEVICE GIB``.
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

from _gpu_device import GIB, Add, Setting, open_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optuna import Trial

    from optuna_hermes.model import TierName

N_TRIALS, EPOCHS = 16, 15
DRY_TRIALS, DRY_EPOCHS = 3, 2
TURNS_MB = 100
LIVE_TRIALS, LIVE_GIB, SHOWN_GIB = 10, 0.25, 5
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


def large(trial: Trial) -> float:
    """A trial most of whose memory is a table of one number, which nobody else may write to."""
    setting = open_device(Path.cwd(), dry=os.environ["HERMES_GPU_DRY"] == "1")
    import torch
    from torch import nn

    from optuna_hermes.pytorch import suspendable

    device = setting.device
    x = trial.suggest_float("x", 0.1, 1.0)
    net = nn.Linear(8, 1).to(device)
    table = torch.full((int(os.environ["HERMES_GPU_BYTES"]) // 4,), x, device=device)
    net.register_buffer("table", table)
    del table
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    run = suspendable(trial, net=net, optimizer=optimizer)
    for _ in run.epochs(4 if setting.dry else 10):
        for _ in run.batches(range(5)):
            ends = time.monotonic() + (0.02 if setting.dry else 0.1)
            while time.monotonic() < ends:
                loss = (net(torch.ones(4, 8, device=device)) - x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                loss.item()
        run.report(loss.item())
    same = [bool((part == x).all()) for part in net.table.split(1 << 22)]
    if not all(same):
        raise ValueError("the table is not as this trial has left it")
    assert run.value is not None
    return run.value


def keep_alive(setting: Setting, add: Add) -> None:
    """Add a row for a study whose live trials do not fit on the device all at once."""
    import optuna
    from _broker import broker

    from optuna_hermes.broker._devices._source import parse_devices
    from support.events import WRONG, events_of, of_kind

    number, gib, shown = (
        (DRY_TRIALS, 0.02, 0) if setting.dry else (LIVE_TRIALS, LIVE_GIB, SHOWN_GIB)
    )
    os.environ["HERMES_GPU_BYTES"] = str(int(gib * GIB))
    os.environ["HERMES_GPU_DRY"] = str(int(setting.dry))
    device = "cpu:2" if setting.dry else parse_devices("auto")[0].id
    url = f"sqlite:///{setting.folder / 'large.db'}"
    least = "0.2" if setting.dry else "1"
    with broker(setting.folder, device, [sys.executable, __file__, device, str(shown)]):
        options = ["--policy", "round-robin", "--devices", device, "--slice-seconds", least]
        found = _by_hermes("large", url, number, options)
    events = events_of(url)
    left = [detail["tier"] for detail in of_kind(events, "suspended", "evicted")]
    wrong = {event.kind for event in events if event.kind in WRONG}
    trials = optuna.load_study(study_name="s", storage=url).trials
    add(
        GiB_of_each=gib,
        GiB_shown=shown or None,
        complete=[trial.state.name for trial in trials].count("COMPLETE"),
        **{f"into_{tier}": left.count(tier) for tier in TIERS},
        went_wrong=", ".join(sorted(wrong)) or "nothing",
        **{name: each for name, each in found.items() if name != "best"},
    )


def be_broker(device: str, gib: float) -> None:
    """Be a broker to which a device has so much memory, all of it if that is 0."""
    import pynvml

    from optuna_hermes.broker.__main__ import run_broker

    read = pynvml.nvmlDeviceGetMemoryInfo

    def shown(*args: Any, **options: Any) -> Any:
        memory = read(*args, **options)
        hidden = memory.total - int(gib * GIB)
        memory.total -= hidden
        memory.free = max(0, memory.free - hidden)
        return memory

    if gib:
        pynvml.nvmlDeviceGetMemoryInfo = shown
    run_broker(device, idle_seconds=None)


def race(setting: Setting, add: Add) -> None:
    """Add a row for each scheduler of the same study."""
    from _broker import broker

    os.environ["HERMES_GPU_DRY"] = str(int(setting.dry))
    number = DRY_TRIALS if setting.dry else N_TRIALS
    devices = "cpu:2" if setting.dry else "auto"
    # One that a study starts by itself would outlive a part that is ended, and hold the device.
    with broker(setting.folder, devices):
        for policy in ("hermes", "round-robin"):
            url = f"sqlite:///{setting.folder / f'{policy}.db'}"
            options = ["--policy", policy, "--devices", devices]
            add(scheduler=policy, **_by_hermes("objective", url, number, options))
    add(scheduler="plain Optuna", **_by_optuna(number))


def _by_hermes(name: str, url: str, number: int, options: Sequence[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "optuna_hermes", "optimize", f"{__file__}:{name}", *options]
    command += ["--storage", url, "--study-name", "s", "--n-trials", str(number), "--seed", "0"]
    command.append("--json")
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

    size, switches, warm_up = (1, 2, 2) if setting.dry else (TURNS_MB, 12, 4)
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
    if len(sys.argv) == 2:
        be_plain(int(sys.argv[1]))
    else:
        be_broker(sys.argv[1], float(sys.argv[2]))
