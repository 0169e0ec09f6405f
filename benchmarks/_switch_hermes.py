"""Hermes' switch between two trials of a study: ``optimize()``, a broker, SQLite, two processes.

All of it is the program as users have it, but for the broker's residency: which tier a trial leaves
by follows from the memory of the devices, but this broker asks for the tier that is measured.
It also lets a slice be shorter than 50 switches, or measuring them would take hours.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import optuna
import torch
from _broker import broker
from _switch_runs import Batches, Net, adamw, count_switches, wait
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from optuna_hermes import HermesPruner, HermesSampler, optimize
from optuna_hermes._optuna import study_key
from optuna_hermes.broker.__main__ import run_broker
from optuna_hermes.broker._core import _scheduler
from optuna_hermes.broker._core._memory_manager import MemoryManager
from optuna_hermes.broker._devices._source import parse_devices
from optuna_hermes.ledger import open_ledger
from optuna_hermes.lightning import HermesCallback
from optuna_hermes.model import TierName

SLICE_SECONDS: dict[TierName, float] = {"resident": 0.1, "host": 0.2, "disk": 1.0}
"""Long enough for the next worker to be ready before the slice ends."""

BATCHES = 1_000_000
"""One epoch that never ends: reports and the checkpoints after them are no part of a switch."""


class Trained(LightningModule):
    def __init__(self, state_bytes: int) -> None:
        super().__init__()
        self.net = Net(state_bytes)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


class Clock(Callback):
    def __init__(self, run: int, batches: str, enough: Path) -> None:
        self._run = run
        self._batches = Batches(batches)
        self._enough = enough
        self._start = 0.0

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self._start = time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        wait()
        self._batches.add(self._run, self._start, time.monotonic())
        trainer.should_stop = self._enough.exists()


class Objective:
    def __init__(self, state_bytes: int, batches: Path, enough: Path) -> None:
        self._state_bytes = state_bytes
        self._batches = str(batches)
        self._enough = enough

    def __call__(self, trial: optuna.Trial) -> float | None:
        hermes = HermesCallback(trial, monitor="loss")
        trainer = Trainer(
            max_epochs=1,
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Clock(trial.number, self._batches, self._enough), hermes],
        )
        data = DataLoader(TensorDataset(torch.ones(BATCHES, 1)))
        trainer.fit(Trained(self._state_bytes), data)
        return hermes.value


def measure_hermes(tier: TierName, state_bytes: int, folder: Path, *, switches: int) -> Path:
    """Let two trials take turns until there are enough switches; returns the file of batches."""
    batches, enough = folder / "batches", folder / "enough"
    url = f"sqlite:///{folder / 'study.db'}"
    devices = parse_devices("auto")[0].id if torch.cuda.is_available() else "cpu:1"
    study = optuna.create_study(storage=url, sampler=HermesSampler(), pruner=HermesPruner())
    watch = Watch(url, study_key(study), batches, enough, switches)
    command = [sys.executable, __file__, tier, devices]
    with broker(folder, devices, command), watch:
        optimize(
            study,
            Objective(state_bytes, batches, enough),
            n_trials=2,
            timeout=switches * (20 + state_bytes / 2e7),  # something is wrong by then
            devices=devices,
            policy="round-robin",
            slice_seconds=SLICE_SECONDS[tier],
            seed=0,
            show_progress=False,
        )
    if any(trial.state.name != "COMPLETE" for trial in study.trials):
        logs = [folder / "broker.log", *folder.rglob("output.log")]
        raise SystemExit("A trial did not end well.\n" + "\n".join(f.read_text() for f in logs))
    if watch.tiers != {tier}:
        raise SystemExit(f"The trials should have waited in tier {tier} but did in {watch.tiers}.")
    return batches


class Watch:
    """Says when there are enough switches, and sees in the ledger where runs wait."""

    def __init__(self, url: str, study: str, batches: Path, enough: Path, switches: int) -> None:
        self.tiers: set[TierName] = set()
        self._ledger = open_ledger(url)
        self._study = study
        self._batches = batches
        self._enough = enough
        self._switches = switches
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._enough.touch()
        self._thread.join()
        self._ledger.close()

    def _look(self) -> None:
        while not self._enough.exists():
            time.sleep(0.5)
            runs = self._ledger.load_trials(self._study)
            self.tiers |= {run.tier for run in runs if run.tier is not None}
            if count_switches(self._batches) >= self._switches:
                self._enough.touch()


def main() -> None:
    """``_switch_hermes.py TIER DEVICES``: be the broker."""
    tier, devices = sys.argv[1:]
    MemoryManager.tier_to_leave = lambda *args: tier  # type: ignore[method-assign]
    # Else a trial in host memory is brought back beside the one that trains, where both fit.
    MemoryManager.fits_beside = lambda *args: False  # type: ignore[method-assign]
    _scheduler.SWITCH_SHARE = 2
    run_broker(devices, idle_seconds=None)


if __name__ == "__main__":
    main()
