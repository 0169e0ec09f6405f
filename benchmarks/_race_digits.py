"""A task of ``race.py``: a convolutional network on scikit-learn's digits, in Lightning."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from _race_loop import rate
from _race_tasks import UNITS, Params, Range, digest
from _race_watch import Watch
from lightning.pytorch import Callback, LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

KIND = "lightning"
MONITOR = "val_loss"
N_TRAINED = 512
N_HELD_OUT = 512
WRONG = 0.1
"""Share of the training labels that are wrong: who learns by heart gets worse again."""
SPACE = {
    "lr": Range(low=1e-4, high=1e-1, log=True),
    "decay": Range(low=0.75, high=1.0),
    "weight_decay": Range(low=1e-5, high=1.0, log=True),
    "dropout": Range(low=0.0, high=0.6),
    "width": Range(low=4, high=24, log=True, whole=True),
    "batch_size": Range(low=32, high=128, log=True, whole=True),
}

logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


def _images() -> tuple[torch.Tensor, torch.Tensor]:
    digits = load_digits()
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(digits.target), generator=generator)
    x = torch.tensor(digits.data, dtype=torch.float32)[order].view(-1, 1, 8, 8) / 16
    y = torch.tensor(digits.target)[order]
    wrong = torch.rand(N_TRAINED, generator=generator) < WRONG
    y[:N_TRAINED][wrong] = torch.randint(10, (int(wrong.sum()),), generator=generator)
    return x, y


_x, _y = _images()
DATA = TensorDataset(_x[:N_TRAINED], _y[:N_TRAINED])
HELD_OUT = TensorDataset(_x[-N_HELD_OUT:], _y[-N_HELD_OUT:])


class Net(LightningModule):
    def __init__(self, params: Params) -> None:
        super().__init__()
        self._params = params
        self._seed = digest(params)
        torch.manual_seed(self._seed)
        width = params["width"]
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Dropout(params["dropout"]), nn.Linear(8 * width, 10),
        )  # fmt: skip

    def on_train_epoch_start(self) -> None:
        unit = self.current_epoch + 1
        torch.manual_seed(self._seed + unit)
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = rate(self._params, unit)

    def training_step(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: Any) -> None:
        self.log(MONITOR, nn.functional.cross_entropy(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        lr, weight_decay = self._params["lr"], self._params["weight_decay"]
        return torch.optim.AdamW(self.parameters(), lr=lr, weight_decay=weight_decay)


class Paced(Callback):
    """The trial's watch; the first of all callbacks, so that none has spent the batch's time."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._begun = 0.0

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self._begun = time.time()

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._watch.end_batch(trainer.current_epoch + 1, self._begun)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        value = float(trainer.callback_metrics[MONITOR])
        self._watch.value(trainer.current_epoch + 1, value)


class Reported(Callback):
    """Passes on each unit's value, and a function that saves the training into a folder."""

    def __init__(self, report: Callable[[float, Callable[[Path], None]], object]) -> None:
        self._report = report

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        value = float(trainer.callback_metrics[MONITOR])
        self._report(value, lambda folder: trainer.save_checkpoint(folder / "lightning.ckpt"))


def n_batches(params: Params) -> int:
    return -(-N_TRAINED // int(params["batch_size"]))


def fit(
    params: Params, watch: Watch, callbacks: Sequence[Callback], resumed: Path | None = None
) -> None:
    torch.set_num_threads(1)
    trainer = Trainer(
        max_epochs=UNITS, accelerator="cpu", devices=1, num_sanity_val_steps=0,
        callbacks=[Paced(watch), *callbacks], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    # With a generator of its own a loader draws nothing from the one that each unit seeds: whether
    # it is begun before that or after differs between a first fit and a resumed one.
    trained = DataLoader(
        DATA, params["batch_size"], sampler=RandomSampler(DATA), generator=torch.Generator()
    )
    held_out = DataLoader(HELD_OUT, N_HELD_OUT)
    checkpoint = None if resumed is None else str(resumed / "lightning.ckpt")
    trainer.fit(Net(params), trained, held_out, ckpt_path=checkpoint)
