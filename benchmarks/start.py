"""Seconds from a process's start to its first batch, with plain Optuna and with Hermes.

Run it with ``python benchmarks/start.py [--objective torch] [--rounds 10] [--json]``. The objective
imports nothing, torch, or torch and Lightning, as scripts do: at the top of its file. Three
contestants take turns on fresh SQLite databases, with no broker there: a script that calls
``study.optimize``, the same script with ``optimize``, and the command ``optuna-hermes optimize``.
Exit status 1 if the script with ``optimize`` takes more than 1.3 times as long as plain Optuna's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT = 1.3

STAMP = """
import time
from pathlib import Path


def stamp():
    first = Path(__file__).with_name("first")
    if not first.exists():
        first.write_text(repr(time.time()))
"""

NOTHING = f"""{STAMP}

def objective(trial):
    stamp()
    return trial.suggest_float("x", 0.0, 1.0)
"""

TORCH = f"""{STAMP}
import torch
from torch.utils.data import DataLoader, TensorDataset


def objective(trial):
    x = torch.randn(256, 4)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=64, shuffle=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=trial.suggest_float("lr", 1e-3, 1e-1))
    for x, y in loader:
        stamp()
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()
"""

LIGHTNING = f"""{STAMP}
import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Net(lightning.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.lr, self.layer = lr, torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        stamp()
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def objective(trial):
    x = torch.randn(256, 4)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=64, shuffle=True)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Net(trial.suggest_float("lr", 1e-3, 1e-1)), loader)
    return trainer.callback_metrics.get("loss", torch.tensor(0.0)).item()
"""

OBJECTIVES = {"none": NOTHING, "torch": TORCH, "lightning": LIGHTNING}

PLAIN = """

if __name__ == "__main__":
    import optuna

    study = optuna.create_study(storage="sqlite:///study.db", study_name="start")
    study.optimize(objective, n_trials=1)
"""

HERMES = """

if __name__ == "__main__":
    import optuna

    from optuna_hermes import HermesPruner, HermesSampler, optimize

    study = optuna.create_study(
        storage="sqlite:///study.db",
        study_name="start",
        sampler=HermesSampler(),
        pruner=HermesPruner(),
    )
    optimize(study, objective, n_trials=1, devices="cpu:2", show_progress=False)
"""

COMMAND = [
    *("-m", "optuna_hermes", "optimize", "train.py:objective", "--storage", "sqlite:///study.db"),
    *("--study-name", "start", "--n-trials", "1", "--devices", "cpu:2"),
]

CONTESTANTS = {
    "Optuna, script": (PLAIN, ["train.py"]),
    "Hermes, script": (HERMES, ["train.py"]),
    "Hermes, command": ("", COMMAND),
}


def seconds_to_first_batch(script: str, arguments: list[str]) -> float:
    """Run a script or command in an empty folder, and read when its first batch began."""
    folder = Path(tempfile.mkdtemp(prefix="start-"))
    try:
        (folder / "train.py").write_text(script)
        runtime = folder / "runtime"
        runtime.mkdir(mode=0o700)
        began = time.time()
        subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env={**os.environ, "OPTUNA_HERMES_RUNTIME_DIR": str(runtime)},
            check=True,
            capture_output=True,
        )
        return float((folder / "first").read_text()) - began
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Let the contestants take turns, and show the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objective", choices=OBJECTIVES, default="none")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    taken: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for number in range(options.rounds + 1):
        for name, (script, arguments) in CONTESTANTS.items():
            seconds = seconds_to_first_batch(OBJECTIVES[options.objective] + script, arguments)
            if number > 0:  # the first round fills the caches of files
                taken[name].append(seconds)
    medians = {name: statistics.median(each) for name, each in taken.items()}
    plain = medians["Optuna, script"]
    ratios = {name: each / plain for name, each in medians.items()}
    passed = ratios["Hermes, script"] <= LIMIT
    if options.json:
        print(json.dumps({"seconds": taken, "medians": medians, "ratios": ratios, "ok": passed}))
        return 0 if passed else 1
    version = platform.python_version()
    print(f"{options.rounds} rounds, objective {options.objective}, Python {version}; medians")
    for name, median in medians.items():
        print(f"{name:<18}{median:8.2f} s  {ratios[name]:5.2f} times plain Optuna")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
