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
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _gpu_device import GIB, Add, Setting, open_device

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optuna import Trial

    from optuna_hermes.model import TierName

N_TRIALS, EPOCHS = 16, 15
DRY_TRIALS, DRY_EPOCHS = 3, 2
TURNS_MB = 100
LIVE_TRIALS, LIVE_GIB, SHOWN_GIB = 10, 0.25, 5
WRONG = ("no room", "outgrew its memory", "process lost", "killed", "failed", "released")
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

    from optuna_hermes._optuna import study_key
    from optuna_hermes.broker._devices._source import parse_devices
    from optuna_hermes.ledger import open_ledger

    number, gib = (3, 0.02) if setting.dry else (LIVE_TRIALS, LIVE_GIB)
    os.environ["HERMES_GPU_BYTES"] = str(int(gib * GIB))
    os.environ["HERMES_GPU_DRY"] = str(int(setting.dry))
    device = "cpu:2" if setting.dry else parse_devices("auto")[0].id
    with _broker(setting, device):
        options = ["--devices", device, "--slice-seconds", "0.2" if setting.dry else "1"]
        found = _by_hermes(setting, "round-robin", number, "large", options)
    url = f"sqlite:///{setting.folder / 'large-round-robin.db'}"
    study = optuna.load_study(study_name="s", storage=url)
    ledger = open_ledger(url)
    events = list(ledger.load_events(study_key(study)))
    ledger.close()
    left = [each.detail["tier"] for each in events if each.kind in ("suspended", "evicted")]
    wrong = [each.kind for each in events if each.kind in WRONG]
    states = [trial.state.name for trial in study.trials]
    add(
        GiB_of_each=gib,
        GiB_shown=None if setting.dry else SHOWN_GIB,
        complete=states.count("COMPLETE"),
        **{f"into_{tier}": left.count(tier) for tier in TIERS},
        went_wrong=", ".join(sorted(set(wrong))) or "nothing",
        **{name: each for name, each in found.items() if name != "best"},
    )


@contextmanager
def _broker(setting: Setting, device: str) -> Iterator[None]:
    """A broker of this benchmark's own, where studies of this process look for one."""
    from optuna_hermes.broker._election import socket_path

    command = [sys.executable, __file__, device, "0" if setting.dry else str(SHOWN_GIB)]
    with subprocess.Popen(command) as broker:
        while not socket_path(setting.folder).exists():
            if broker.poll() is not None:
                raise SystemExit(f"The broker has ended with status {broker.returncode}.")
            time.sleep(0.02)
        yield
        broker.terminate()


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
    os.environ["HERMES_GPU_DRY"] = str(int(setting.dry))
    number = DRY_TRIALS if setting.dry else N_TRIALS
    for policy in ("hermes", "round-robin"):
        add(scheduler=policy, **_by_hermes(setting, policy, number))
    add(scheduler="plain Optuna", **_by_optuna(number))


def _by_hermes(
    setting: Setting,
    policy: str,
    number: int,
    name: str = "objective",
    options: Sequence[str] = (),
) -> dict[str, Any]:
    url = f"sqlite:///{setting.folder / f'{name}-{policy}.db'}"
    command = [sys.executable, "-m", "optuna_hermes", "optimize", f"{__file__}:{name}", *options]
    command += ["--storage", url, "--study-name", "s", "--n-trials", str(number), "--seed", "0"]
    if "--devices" not in options:
        command += ["--devices", "cpu:2" if setting.dry else "auto"]
    command += ["--policy", policy, "--json"]
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
