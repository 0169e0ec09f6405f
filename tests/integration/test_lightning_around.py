"""The surroundings of a training do not notice that it was suspended either."""

from __future__ import annotations

import copy
import gc
import hashlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import lightning.pytorch as pl
import numpy as np
import optuna
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.utilities import CombinedLoader, GradClipAlgorithmType
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision, MulticlassRecall

from optuna_hermes.errors import Suspended
from optuna_hermes.lightning import HermesCallback
from optuna_hermes.model import Checkpoint, TierName
from optuna_hermes.suspend import CleanPoint
from optuna_hermes.suspend._loaders._kinds import has_workers
from optuna_hermes.suspend._loaders._workers import RandomWatch
from optuna_hermes.testing import FakeSession

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata

EPOCHS = 3
BATCHES = 10
WAIT = 100_000
SCRIPT: tuple[tuple[dict[int, TierName], tuple[TierName, ...]], ...] = (
    ({2: "resident", 5: "host", 7: "disk"}, ()),
    ({13: "resident"}, ("disk",)),  # after the last batch of an epoch
    ({3: "host"}, ("disk",)),
)
"""By process: where the run waits, by number of its batches, and where it goes from there."""


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points of three kinds, never the same twice, by generators of all sorts."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self._x = torch.randn(length, 8, generator=generator)
        self._generator = generator
        self._numpy = np.random.default_rng(7)
        self._python = random.Random(7)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self._x[index]
        noise = (
            self._numpy.normal()
            + self._python.gauss(0, 1)
            + torch.randn(8, generator=self._generator)
        )
        return x + 0.1 * (noise + torch.randn(8)), (x[0] > 0).long() + (x[1] > 0).long()


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"lr": 0.05})
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.net = nn.Sequential(self.backbone, nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]


class Trace(Callback):
    """Record of a run, to the bit; it tells the session of every batch."""

    def __init__(self) -> None:
        self.session = FakeSession()
        self.processes = 0
        self.seen: dict[Any, Any] = {}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        self.note(("loss", trainer.fit_loop.total_batch_idx), trainer.callback_metrics)
        self.session.tick()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.note(("validation", trainer.fit_loop.total_batch_idx), trainer.callback_metrics)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.note("weights", pl_module.state_dict())
        for index, optimizer in enumerate(trainer.optimizers):
            groups = [{**group, "params": None} for group in optimizer.param_groups]
            self.note(("optimizer", index), groups)

    def note(self, key: Any, value: Any) -> None:
        bits = _bits(value)
        assert self.seen.setdefault(key, bits) == bits, f"{key} is another one"


def _bits(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_bits(item) for item in value]
    if isinstance(value, torch.Tensor):
        return value.dtype, value.detach().contiguous().view(-1).numpy().tobytes()
    return repr(value)


def train(
    trace: Trace,
    session: FakeSession,
    *,
    net: type[Net] = Net,
    before: Callable[[pl.Trainer], Any] = lambda trainer: None,
    workers: Mapping[str, Any] | None = None,
    loader: Any = DataLoader,
    validation: Any = None,
    ckpt_path: Path | None = None,
    **options: Any,
) -> pl.Trainer:
    """One process of a run; a new one has other random numbers."""
    trace.session = session
    trace.processes += 1
    pl.seed_everything(1, verbose=False)
    module = net()
    pl.seed_everything(trace.processes, verbose=False)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    hermes = HermesCallback(optuna.create_study().ask(), "val_loss", _session=session)
    settings: dict[str, Any] = {
        "max_epochs": EPOCHS,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        **options,
        "callbacks": [hermes, *options.get("callbacks", ()), trace],
    }
    trainer = pl.Trainer(**settings)
    batches = loader(Points(BATCHES * 4), batch_size=4, shuffle=True, **(workers or {}))
    before(trainer)
    if validation is None:
        validation = DataLoader(Points(8), batch_size=4)
    trainer.fit(module, batches, validation, ckpt_path=ckpt_path)
    return trainer


def whole(options: Callable[[], dict[str, Any]]) -> tuple[Trace, pl.Trainer]:
    """The run that is never suspended."""
    trace = Trace()
    return trace, train(trace, FakeSession(), **options())


def suspended(
    options: Callable[[], dict[str, Any]], folder: Path, wait: Callable[[], Any] = lambda: None
) -> tuple[Trace, pl.Trainer]:
    """The same run in several processes, each with objects of its own.

    ``wait`` is called whenever somebody else trains.
    """
    trace = Trace()
    session = FakeSession(checkpoint_dir=folder)
    for yields, evicts in SCRIPT:
        session = FakeSession(
            yields,
            checkpoint_dir=folder,
            checkpoints=session.checkpoints,
            while_parked=lambda: (torch.manual_seed(5), wait()),
            evicts=evicts,
        )
        with pytest.raises(Suspended):
            train(trace, session, **options())
        wait()
    return trace, train(trace, session.again(), **options())


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


# -- state ----------------------------------------------------------------------------------------


class ByHand(Net):
    """Two optimizers that take turns, each with a scheduler, and gradients clipped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        turn = batch_idx % 3 == 0
        optimizer, scheduler = self.optimizers()[turn], self.lr_schedulers()[turn]
        self.toggle_optimizer(optimizer)
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.1)
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)
        scheduler.step()
        return loss

    def configure_optimizers(self) -> Any:
        body = torch.optim.AdamW(self.backbone.parameters(), lr=0.01)
        head = torch.optim.SGD(self.net[3].parameters(), lr=0.05, momentum=0.9)
        return [body, head], [torch.optim.lr_scheduler.StepLR(each, 4) for each in (body, head)]


class Plateau(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, threshold=9.0, threshold_mode="abs"
        )  # nothing is ever good enough
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"},
        }


class Measured(Net):
    """Metrics that share their states where they can."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (MulticlassAccuracy, MulticlassPrecision, MulticlassRecall)
        self.scores = MetricCollection({kind.__name__: kind(3) for kind in kinds})
        self.epoch_scores = self.scores.clone(prefix="epoch_")

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        out = self.net(batch[0])
        self.log_dict(self.scores(out, batch[1]))
        self.epoch_scores.update(out, batch[1])
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.epoch_scores.compute())
        self.epoch_scores.reset()


class OwnAverages(Net):
    """Averages of its weights, and what else people hang on a module."""

    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(self.net)
        self.slow = [copy.deepcopy(self.net)]  # in a list, so that no optimizer finds it
        self.shadow = {name: p.detach().clone() for name, p in self.net.named_parameters()}
        self.noise = torch.Generator().manual_seed(3)
        self.dice = np.random.default_rng(3)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.net[1].p = min(0.9, 0.02 * (1 + self.trainer.global_step))
        batch[0] = batch[0] + 0.1 * torch.randn(8, generator=self.noise) * self.dice.normal()
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            teacher = nn.functional.cross_entropy(self.slow[0](batch[0]), batch[1])
        return loss * (1 + 0.01 * teacher)

    def on_train_batch_end(self, *args: Any) -> None:
        now = dict(self.net.named_parameters())
        with torch.no_grad():
            for name, average in (*self.average.named_parameters(), *self.shadow.items()):
                average.lerp_(now[name], 0.1)
            for name, slow in self.slow[0].named_parameters():
                slow.lerp_(self.shadow[name], 0.5)

    def on_train_end(self) -> None:
        for each in (*self.slow[0].parameters(), *self.shadow.values()):
            self.net[3].weight.data += each.sum()


class HiddenBuffer(Net):
    """Its loss depends on a buffer that no ``state_dict`` has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8), persistent=False)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.seen = self.seen + 0.1 * batch[0].mean(0)
        return super().training_step([batch[0] + self.seen, batch[1]], batch_idx)


class OwnAccumulation(Net):
    """Steps with the gradients of four batches, by hooks of its own."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 4 == 0:
            optimizer.zero_grad()

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer_closure()
        if batch_idx % 4 == 3:
            optimizer.step()


class Sets(Callback):
    """Lets a training of one epoch go on, with other settings."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.fit_loop.max_epochs = EPOCHS
        if trainer.current_epoch == 1:
            trainer.gradient_clip_val = 0.05
            trainer.gradient_clip_algorithm = GradClipAlgorithmType.VALUE
            trainer.check_val_every_n_epoch = 2
            trainer.limit_val_batches = 1  # but loaders are made: there are as many as before


class Shortens(Callback):
    """Lets the next epoch have other batches."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.limit_train_batches = BATCHES - trainer.current_epoch


def options_of(name: str) -> dict[str, Any]:
    """Return the special options of a run, by name; made anew each time."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=3)
    return {
        "early stopping": {
            "callbacks": [EarlyStopping("val_loss", patience=7, min_delta=0.2)],
            "val_check_interval": 0.3,
        },
        "swa": {"callbacks": [StochasticWeightAveraging(0.02, 1, annealing_epochs=2)]},
        "weight averaging": {"callbacks": [WeightAveraging()]},
        "ema": {"callbacks": [EMAWeightAveraging(decay=0.8, update_starting_at_step=4)]},
        "own averages": {"net": OwnAverages},
        "hidden buffer": {"net": HiddenBuffer},
        "own accumulation": {"net": OwnAccumulation},
        "bf16": {"precision": "bf16-mixed"},
        "fp16": {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)], "net": Plateau},
        "accumulation": {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 3})]},
        "metrics": {"net": Measured},
        "plateau": {"net": Plateau},
        "by hand": {"net": ByHand},
        "clipped": {"gradient_clip_val": 0.05},
        "finetuning": {"callbacks": [BackboneFinetuning(1, verbose=False)]},
        "settings": {"callbacks": [Sets()], "max_epochs": 1},
        "shorter": {"callbacks": [Shortens()], "reload_dataloaders_every_n_epochs": 1},
    }[name]


@pytest.mark.parametrize(
    "name",
    [
        "early stopping",
        "swa",
        "weight averaging",
        "ema",
        "own averages",
        "hidden buffer",
        "own accumulation",
        "bf16",
        "fp16",
        "accumulation",
        "metrics",
        "plateau",
        "by hand",
        "clipped",
        "finetuning",
        "settings",
        "shorter",
    ],
)
def test_state(name: str, tmp_path: Path) -> None:
    """Losses, metrics, learning rates and weights are those of the run never suspended."""
    expected, _ = whole(lambda: options_of(name))
    trace, _ = suspended(lambda: options_of(name), tmp_path)
    assert trace.seen == expected.seen


def test_spikes(tmp_path: Path) -> None:
    """The losses that SpikeDetection compares with come back, which Lightning fails to load."""

    def options() -> dict[str, Any]:
        return {"callbacks": [SpikeDetection(atol=1e9, exclude_batches_path=tmp_path / "a.json")]}

    def known(trainer: pl.Trainer) -> Any:
        spikes = next(each for each in trainer.callbacks if isinstance(each, SpikeDetection))
        return _bits([spikes.last_val, spikes.running_mean.compute()])

    _, expected = whole(options)
    _, trainer = suspended(options, tmp_path / "run")
    assert known(trainer) == known(expected)


class CountsHooks(Callback):
    """Counts its hooks, and keeps something that no checkpoint can hold."""

    def __init__(self) -> None:
        self.hooks: dict[str, int] = {}

    def count(self, name: str) -> None:
        self.hooks = {**self.hooks, name: self.hooks.get(name, 0) + 1}

    def on_sanity_check_start(self, *args: Any) -> None:
        self.count("sanity check")

    def on_train_start(self, *args: Any) -> None:
        self.count("training")
        self.lock = threading.Lock()

    def on_validation_batch_end(self, *args: Any) -> None:
        self.count("validation batch")

    def on_train_epoch_start(self, *args: Any) -> None:
        self.count("epoch")

    def on_train_batch_start(self, *args: Any) -> None:
        self.count("batch")

    def on_train_epoch_end(self, *args: Any) -> None:
        self.count("end of epoch")

    def on_train_end(self, *args: Any) -> None:
        self.count("end")


class CountedAverages(StochasticWeightAveraging):
    """A user's subclass, with a hook of its own."""

    epochs = 0

    def on_train_epoch_start(self, *args: Any) -> None:
        super().on_train_epoch_start(*args)
        self.epochs += 1


class CountedBar(TQDMProgressBar):
    """A user's progress bar that counts what it is told of."""

    validated = 0

    def on_validation_batch_end(self, *args: Any) -> None:
        super().on_validation_batch_end(*args)
        self.validated += 1


def test_hooks_are_called_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Over all processes a callback counts each hook as often as in a run never suspended.

    So it does those of the sanity check and of the first epoch's beginning, which come before the
    first batch and are not called again. What ``on_train_start`` makes is made again.
    """

    def options() -> dict[str, Any]:
        bar = CountedBar()
        callbacks = [CountsHooks(), CountedAverages(0.02, 1, annealing_epochs=2), bar]
        return {"callbacks": callbacks, "num_sanity_val_steps": 2, "enable_progress_bar": True}

    def counts(trainer: pl.Trainer) -> Any:
        hooks, averages, bar = trainer.callbacks[1:4]
        return hooks.hooks, averages.epochs, bar.validated

    expected, first = whole(options)
    trace, trainer = suspended(options, tmp_path)
    assert trace.seen == expected.seen
    assert counts(trainer) == counts(first)
    assert counts(first)[0]["validation batch"] == counts(first)[2] == 2 + 2 * EPOCHS + 2
    assert "CountsHooks" not in caplog.text  # no attribute of it was lost


@pytest.mark.parametrize("mode", ["resident", "disk"])
def test_from_a_users_checkpoint(mode: TierName, tmp_path: Path) -> None:
    """A fit that begins where another one ended an epoch, or within one, is suspended as others."""
    for step in (BATCHES, BATCHES + 4):
        models = tmp_path / f"models-{step}"

        def first(folder: Path = models, step: int = step) -> dict[str, Any]:
            saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=step, save_top_k=-1)
            if step == BATCHES:
                saves = ModelCheckpoint(folder, "{step}", every_n_epochs=1, save_top_k=-1)
            return {"callbacks": [saves], "enable_checkpointing": True, "max_epochs": 2}

        whole(first)
        found = models / f"step={step}.ckpt"
        expected, _ = whole(lambda found=found: {"ckpt_path": found})  # type: ignore[misc]
        trace = Trace()
        session = FakeSession({2: mode}, checkpoint_dir=tmp_path / f"trial-{step}")
        if mode == "disk":
            with pytest.raises(Suspended):
                train(trace, session, ckpt_path=found)
            session = session.again()
        train(trace, session, ckpt_path=found)
        assert trace.seen == expected.seen


class LogsInTraining(Net):
    """Logs the metric in training too, for a validation that has nothing."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("val_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: int, batch_idx: int) -> None:  # type: ignore[override]
        self.log("validated", float(batch), batch_size=1)


@pytest.mark.parametrize("validation", [[], [1, 2], range(3)], ids=["empty", "list", "range"])
def test_validation_without_a_loader(validation: Any, tmp_path: Path) -> None:
    """Validation data may be a plain sequence, also an empty one."""
    expected, _ = whole(lambda: {"net": LogsInTraining, "validation": validation})
    trace, _ = suspended(lambda: {"net": LogsInTraining, "validation": validation}, tmp_path)
    assert trace.seen == expected.seen


def test_validation_by_the_training_loader(tmp_path: Path) -> None:
    """A loader that is both trained on and validated with comes back to its place."""

    def options() -> dict[str, Any]:
        loader = DataLoader(Points(BATCHES * 4), batch_size=4, shuffle=True)
        return {"loader": lambda *args, **settings: loader, "validation": loader}

    assert suspended(options, tmp_path)[0].seen == whole(options)[0].seen


def test_callback_without_a_class_of_its_own(tmp_path: Path) -> None:
    """A mock may stand for a callback, and a run with it is suspended as others."""
    mock = Mock(spec=Callback)
    mock.state_key, mock.state_dict.return_value = "mock", {}
    session = FakeSession({3: "resident", 5: "host"}, checkpoint_dir=tmp_path)
    train(Trace(), session, callbacks=[mock])
    assert mock.on_train_batch_end.call_count == BATCHES * EPOCHS


def test_averages_of_batch_norm(tmp_path: Path) -> None:
    """The pass over the data that SWA ends with is not interrupted by a way to disk."""
    expected, _ = whole(lambda: options_of("swa"))
    trace = Trace()
    session = FakeSession({EPOCHS * BATCHES: "disk"}, checkpoint_dir=tmp_path)
    train(trace, session, **options_of("swa"))
    assert trace.seen == expected.seen


# -- checkpoints ----------------------------------------------------------------------------------


class Seldom(Net):
    """Steps by hand on every third batch, so that three batches have the same step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        if batch_idx % 3 == 1:
            self.optimizers().step()
            self.optimizers().zero_grad()
        return loss


@pytest.mark.parametrize("net", [Net, Seldom])
def test_checkpoints(net: type[Net], tmp_path: Path) -> None:
    """ModelCheckpoint saves the same files with the same weights, and knows the same best ones."""

    def options(folder: Path) -> dict[str, Any]:
        best = ModelCheckpoint(folder / "best", "{step}-{val_loss:.6f}", "val_loss", save_top_k=2)
        worst = ModelCheckpoint(
            folder / "worst",
            monitor="val_loss",
            mode="max",
            save_last="link",
            save_on_exception=True,
        )
        steps = ModelCheckpoint(folder / "steps", save_top_k=-1, every_n_train_steps=1)
        deferred = ModelCheckpoint(
            folder / "deferred",
            monitor="val_loss",
            every_n_train_steps=6,
            save_top_k=-1,
            save_on_train_epoch_end=False,
        )
        callbacks = [best, worst, steps, deferred]
        return {"net": net, "callbacks": callbacks, "enable_checkpointing": True}

    def outcome(trainer: pl.Trainer, folder: Path) -> Any:
        saves = [each.state_dict() for each in trainer.checkpoint_callbacks]
        files = sorted(folder.rglob("*.ckpt"))
        weights = {str(file): torch.load(file, weights_only=False)["state_dict"] for file in files}
        assert len(files) >= 12
        return str(_bits([saves, weights])).replace(str(folder), "")

    _, trainer = whole(lambda: options(tmp_path / "whole"))
    expected = outcome(trainer, tmp_path / "whole")
    _, trainer = suspended(lambda: options(tmp_path / "parts"), tmp_path / "run")
    assert outcome(trainer, tmp_path / "parts") == expected


@pytest.mark.parametrize("lost", ["folder", "file"])
def test_checkpoints_that_are_gone(
    lost: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that comes to another host, or was killed, goes on without them, and keeps others."""

    def options(folder: str) -> dict[str, Any]:
        first = ModelCheckpoint(monitor="step", save_top_k=1)  # none is as good as the first
        every = ModelCheckpoint(monitor="val_loss", save_top_k=-1)
        return {
            "net": WithTest,
            "callbacks": [first, every],
            "default_root_dir": tmp_path / folder,
            "enable_checkpointing": True,
        }

    session = FakeSession({BATCHES + 5: "disk"}, checkpoint_dir=tmp_path / "run")
    with pytest.raises(Suspended):
        train(Trace(), session, **options("here"))
    (mine,) = (file for file in (tmp_path / "here").rglob("*.ckpt") if "-v1" not in file.name)
    if lost == "folder":
        shutil.rmtree(tmp_path / "here")
    else:
        mine.unlink()
    trainer = train(Trace(), session.again(), **options("there"))
    saves: Any = trainer.checkpoint_callbacks
    first, every = saves
    models = [first.best_model_path, *first.best_k_models, *every.best_k_models]
    assert all(Path(model).exists() for model in models)
    assert len(every.best_k_models) == (EPOCHS - 1 if lost == "folder" else EPOCHS)
    assert Path(first.best_model_path).is_relative_to(
        tmp_path / ("there" if lost == "folder" else "here")
    )
    assert float(first.best_model_score) == 2 * BATCHES
    assert f"1 of the models in {mine.parent} are gone" in caplog.text
    # Also on the console, once a study: best models may be what the objective returns.
    loud = [each for each in caplog.records if each.name.startswith("optuna_hermes.suspend.")]
    assert sum("ModelCheckpoint has saved are gone" in each.message for each in loud) == 1
    trainer.test(trainer.lightning_module, DataLoader(Points(8), 4), ckpt_path="best")


def test_a_folder_without_models_is_that_of_each_process(tmp_path: Path) -> None:
    """A folder of another host or job is not made again for models that none was saved of yet."""

    def options(folder: str) -> dict[str, Any]:
        return {"callbacks": [ModelCheckpoint(tmp_path / folder)], "enable_checkpointing": True}

    session = FakeSession({2: "disk"}, checkpoint_dir=tmp_path / "run")
    with pytest.raises(Suspended):
        train(Trace(), session, **options("here"))
    train(Trace(), session.again(), **options("there"))
    assert not (tmp_path / "here").exists()
    assert len(list((tmp_path / "there").glob("*.ckpt"))) == 1


def test_learning_rates(tmp_path: Path) -> None:
    """LearningRateMonitor logs the same rows, and remembers all of them."""

    def options(folder: Path) -> dict[str, Any]:
        monitor = LearningRateMonitor("step", log_momentum=True, log_weight_decay=True)
        return {"callbacks": [monitor], "logger": CSVLogger(folder)}

    def outcome(trainer: pl.Trainer) -> Any:
        monitor = next(c for c in trainer.callbacks if isinstance(c, LearningRateMonitor))
        rows = Path(trainer.log_dir or "", "metrics.csv").read_bytes()
        return rows, monitor.lrs, monitor.last_momentum_values, monitor.last_weight_decay_values

    _, trainer = whole(lambda: options(tmp_path / "whole"))
    expected = outcome(trainer)
    assert len(expected[1]["lr-AdamW"]) == EPOCHS * BATCHES
    _, trainer = suspended(lambda: options(tmp_path / "parts"), tmp_path / "run")
    assert outcome(trainer) == expected


# -- time -----------------------------------------------------------------------------------------


class Clock(Callback):
    """Time that passes with each batch and not otherwise, in whole seconds."""

    _now: ClassVar[list[float]]

    def __init__(self, seconds: list[float]) -> None:
        type(self)._now = seconds  # an attribute of its own would come back with the run

    def on_train_batch_start(self, *args: Any) -> None:
        self._now[0] += 600

    def on_validation_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self._now[0] += 60


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of every clock, in a list of one."""
    now = [1e6]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_time(seconds: list[float], tmp_path: Path) -> None:
    """Parts that go by the clock go by the time that was spent on training, to the second."""

    def options(folder: Path) -> dict[str, Any]:
        saves = ModelCheckpoint(
            folder / "saves", "{step}", save_top_k=-1, train_time_interval=timedelta(minutes=25)
        )
        throughput = ThroughputMonitor(lambda batch: len(batch[0]), window_size=5)
        return {
            "callbacks": [Clock(seconds), saves, throughput],
            "logger": CSVLogger(folder),
            "enable_checkpointing": True,
            "max_time": timedelta(minutes=275),
            "val_check_interval": timedelta(minutes=65),
            "check_val_every_n_epoch": None,
        }

    def outcome(trainer: pl.Trainer, folder: Path) -> Any:
        timer = next(each for each in trainer.callbacks if isinstance(each, Timer))
        elapsed = [timer.time_elapsed(stage) for stage in ("train", "validate")]
        files = sorted(file.name for file in folder.rglob("*.ckpt"))
        return elapsed, files, next(folder.rglob("metrics.csv")).read_bytes()

    expected, trainer = whole(lambda: options(tmp_path / "whole"))
    known = outcome(trainer, tmp_path / "whole")
    assert known[0] == [27 * 600 + 4 * 120, 120]
    assert len(known[1]) >= 8

    def wait() -> None:
        seconds[0] += WAIT

    trace, trainer = suspended(lambda: options(tmp_path / "parts"), tmp_path / "run", wait)
    assert trace.seen == expected.seen
    assert outcome(trainer, tmp_path / "parts") == known


def test_profile(seconds: list[float], tmp_path: Path) -> None:
    """SimpleProfiler does not count the time that a run waits in memory."""

    def profile(session: FakeSession) -> Any:
        profiler = SimpleProfiler()
        train(Trace(), session, callbacks=[Clock(seconds)], profiler=profiler)
        return profiler.recorded_durations["run_training_epoch"]

    def wait() -> None:
        seconds[0] += WAIT

    yields: dict[int, TierName] = {3: "resident", 10: "host", 17: "resident"}
    known = profile(FakeSession())
    session = FakeSession(yields, checkpoint_dir=tmp_path, while_parked=wait)
    assert profile(session) == known == [BATCHES * 600 + 120] * EPOCHS


# -- progress bars --------------------------------------------------------------------------------


def test_tqdm(seconds: list[float], tmp_path: Path) -> None:
    """The time of the bar stands still while the trial is parked."""
    bar = TQDMProgressBar()
    seen: list[tuple[str, float]] = []

    def look() -> None:
        line = bar.train_progress_bar
        seen.append((str(line), line.format_dict["elapsed"]))

    waits: list[int] = []

    def wait() -> None:
        waits.append(len(seen))
        look()
        seconds[0] += WAIT

    class After(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            look()

    session = FakeSession({12: "resident"}, checkpoint_dir=tmp_path, while_parked=wait)
    train(Trace(), session, callbacks=[bar, After()], enable_progress_bar=True)
    ((text, elapsed), later) = seen[waits[0] : waits[0] + 2]
    assert text.startswith("Epoch 1: ")
    assert later[0].startswith("Epoch 1: ")
    assert "2/10" in later[0]
    # Its own clock is a real one, on which nothing has passed.
    assert later[1] == pytest.approx(elapsed - WAIT, abs=60)


def test_rich(seconds: list[float], tmp_path: Path) -> None:
    """Nor does the other bar take the wait into its speed."""
    bar = RichProgressBar()
    seen: list[tuple[str, float, list[float]]] = []

    def look() -> None:
        task = bar.train_progress_bar
        assert task.start_time is not None
        samples = [sample.timestamp for sample in task._progress]
        seen.append((task.description.rstrip(), task.start_time, samples))

    def wait() -> None:
        look()
        seconds[0] += WAIT

    class After(Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.fit_loop.total_batch_idx == 17:
                look()

    session = FakeSession({17: "resident"}, checkpoint_dir=tmp_path, while_parked=wait)
    train(Trace(), session, callbacks=[bar, After()], enable_progress_bar=True)
    (text, start, samples), (later_text, later_start, later_samples) = seen
    assert text == later_text == "Epoch 1/2"
    assert later_start == start + WAIT
    assert later_samples == [sample + WAIT for sample in samples] != []


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_bar_of_a_next_process_counts_to_the_end(kind: Any, tmp_path: Path) -> None:
    """In the last process the bar comes to the number of batches, as in a run never suspended."""

    def options() -> dict[str, Any]:
        return {"callbacks": [kind()], "enable_progress_bar": True}

    _, trainer = suspended(options, tmp_path)
    bar: Any = trainer.progress_bar_callback
    done = "n" if kind is TQDMProgressBar else "completed"
    for line in (bar.train_progress_bar, bar.val_progress_bar):
        assert getattr(line, done) == line.total > 0
    assert bar.train_progress_bar.total == BATCHES


def test_bar_of_a_next_process(tmp_path: Path) -> None:
    """A run that goes on in the middle of an epoch shows where it is."""
    seen: list[str] = []

    class Look(Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            bar = trainer.progress_bar_callback
            assert isinstance(bar, TQDMProgressBar)
            seen.append(str(bar.train_progress_bar))

    session = FakeSession({13: "disk"}, checkpoint_dir=tmp_path)
    with pytest.raises(Suspended):
        train(Trace(), session)
    train(Trace(), session.again(), callbacks=[TQDMProgressBar(), Look()], enable_progress_bar=True)
    assert seen[0].startswith("Epoch 1: ")
    assert "3/10" in seen[0]


# -- loggers --------------------------------------------------------------------------------------


class Killed(Callback):
    """SIGKILL in a hook, at its n-th call, once there is such a checkpoint."""

    def __init__(self, hook: str, calls: int, folder: Path, checkpoint: str) -> None:
        self._left = calls
        self._checkpoints = folder, checkpoint
        setattr(self, hook, self._count)

    def _count(self, *args: Any) -> None:
        self._left -= 1
        if self._left == 0:
            folder, checkpoint = self._checkpoints
            while not any(folder.glob(checkpoint)):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


class Pairs(Callback):
    """Writes past Lightning, as people do."""

    def on_train_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self._writer: Any = trainer.logger.experiment  # type: ignore[union-attr]
        self._writer.add_text("note", "begun")

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        step = trainer.global_step
        if step > 11:
            self._writer.add_scalars("pair", {"step": step, "half": step / 2}, step)


class Counts(Callback):
    """Logs past Lightning: what it logs itself it also saves at once."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        for logger in trainer.loggers:
            logger.log_metrics({"count": trainer.global_step})


def log_more(trainer: pl.Trainer) -> None:
    """Log what an objective may log before the training."""
    trainer.logger.log_hyperparams({"more": 1})  # type: ignore[union-attr]
    trainer.logger.log_metrics({"early": 2.0}, 0)  # type: ignore[union-attr]


def in_child(call: Callable[[], Any]) -> int:
    """Run something in a process of its own, and give its exit code."""
    process = multiprocessing.get_context("fork").Process(target=call)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def newest(folder: Path) -> tuple[Checkpoint, ...]:
    """The checkpoint that the ledger would name."""
    path = max(folder.glob("*.safetensors"))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    units = int(path.stem.rpartition("-")[2])
    return (Checkpoint(path=str(path), units=units, size_bytes=path.stat().st_size, sha256=sha256),)


def suspended_and_killed(
    options: Callable[..., dict[str, Any]], folder: Path, hook: str, calls: int, checkpoint: str
) -> None:
    """A run in four processes, of which the second is killed."""
    session = FakeSession({3: "resident", 6: "disk"}, checkpoint_dir=folder)
    with pytest.raises(Suspended):
        train(Trace(), session, **options())
    killed = Killed(hook, calls, folder, checkpoint)
    assert in_child(lambda: train(Trace(), session.again(), **options(killed))) == -signal.SIGKILL
    yields: dict[int, TierName] = {2: "host", 6: "disk"}
    session = FakeSession(yields, checkpoint_dir=folder, checkpoints=newest(folder))
    with pytest.raises(Suspended):
        train(Trace(), session, **options())
    train(Trace(), session.again(), **options())


KILLS = pytest.mark.parametrize(
    ("hook", "calls", "checkpoint"),
    [
        ("on_train_batch_end", 9, "*-unit-1.safetensors"),  # five batches after a checkpoint
        ("on_train_epoch_start", 1, "*-unit-0.safetensors"),  # after a validation, with new columns
    ],
)


@KILLS
@pytest.mark.parametrize(("version", "every_n_steps"), [(None, 50), (7, 4), ("mine", 1)])
def test_csv(
    version: int | str | None,
    every_n_steps: int,
    hook: str,
    calls: int,
    checkpoint: str,
    tmp_path: Path,
) -> None:
    """One metrics.csv, byte for byte that of the run never suspended, whatever was killed when."""

    def options(folder: Path, *callbacks: Callback) -> dict[str, Any]:
        logger = CSVLogger(folder, "study", version)
        counts = [Counts()] if every_n_steps == 4 else []
        return {
            "logger": logger,
            "callbacks": [*counts, *callbacks],
            "log_every_n_steps": every_n_steps,
            "before": log_more if counts else lambda trainer: None,
        }

    whole(lambda: options(tmp_path / "whole"))
    parts = tmp_path / "parts"
    suspended_and_killed(
        lambda *callbacks: options(parts, *callbacks), tmp_path / "run", hook, calls, checkpoint
    )
    files = [".metrics.csv", "hparams.yaml", "metrics.csv"]  # the first is a link to the last
    assert [file.name for file in sorted(parts.rglob("*")) if file.is_file()] == files
    folder = version if isinstance(version, str) else f"version_{version or 0}"
    name = f"study/{folder}/metrics.csv"
    assert (parts / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


class Fails(Callback):
    """Raises an error in the second epoch, as a device may."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx == BATCHES + 4:
            raise RuntimeError("CUDA error: of the device")


@pytest.mark.parametrize("callbacks", [[Fails()], []])
def test_csv_after_an_error(callbacks: list[Callback], tmp_path: Path) -> None:
    """Rows stay where a trial goes on after an error, of its device or in a test after the fit."""

    def options(folder: Path) -> dict[str, Any]:
        return {"logger": CSVLogger(folder, "study", 7)}

    whole(lambda: options(tmp_path / "whole"))
    session, parts = FakeSession(checkpoint_dir=tmp_path / "run"), tmp_path / "parts"
    with pytest.raises(RuntimeError, match="of the device") if callbacks else nullcontext():
        train(Trace(), session, callbacks=callbacks, **options(parts))
    assert session.checkpoints
    train(Trace(), session.again(), **options(parts))
    name = "study/version_7/metrics.csv"
    assert (parts / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def events(folder: Path) -> list[Any]:
    """All that TensorBoard finds in a folder and below."""
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    return sorted(
        (str(file.parent.relative_to(folder)), value.tag, event.step, str(value))
        for file in folder.rglob("*tfevents*")
        for event in loader.EventFileLoader(str(file)).Load()
        for value in event.summary.value
    )


@KILLS
@pytest.mark.parametrize("version", [None, "fixed"])
def test_tensorboard(
    version: str | None, hook: str, calls: int, checkpoint: str, tmp_path: Path
) -> None:
    """One folder, with every value in it once."""
    pytest.importorskip("tensorboard")

    def options(folder: Path, *callbacks: Callback) -> dict[str, Any]:
        logger = TensorBoardLogger(folder, "study", version)
        return {"logger": logger, "callbacks": [Pairs(), *callbacks], "before": log_more}

    whole(lambda: options(tmp_path / "whole"))
    parts = tmp_path / "parts"
    suspended_and_killed(
        lambda *callbacks: options(parts, *callbacks), tmp_path / "run", hook, calls, checkpoint
    )
    expected = events(tmp_path / "whole")
    assert len(expected) > 3 * EPOCHS * BATCHES
    assert events(parts) == expected
    assert max(file.name.count(".after.") for file in parts.rglob("*tfevents*")) == 1
    assert [folder.name for folder in (parts / "study").iterdir()] == [version or "version_0"]


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_loggers_of_trials_that_begin_at_once_have_folders_of_their_own(
    kind: Any, tmp_path: Path
) -> None:
    """Each takes its version before any of them has logged."""
    pytest.importorskip("tensorboard")
    HermesCallback(None, "loss")
    loggers = [kind(tmp_path, "study") for _ in range(3)]
    assert [logger.version for logger in loggers] == [0, 1, 2]
    assert len({logger.log_dir for logger in loggers}) == 3
    assert kind(tmp_path, "study", version=0).version == 0


def test_tensorboard_killed_in_the_first_process(tmp_path: Path) -> None:
    """Files that were begun after the first checkpoint are not there twice either."""
    pytest.importorskip("tensorboard")
    folder = tmp_path / "run"

    def options(folder: Path, *callbacks: Callback) -> dict[str, Any]:
        return {"logger": TensorBoardLogger(folder), "callbacks": [Pairs(), *callbacks]}

    whole(lambda: options(tmp_path / "whole"))
    killed = Killed("on_train_batch_end", 15, folder, "*-unit-1.safetensors")
    session = FakeSession(checkpoint_dir=folder)
    parts = tmp_path / "parts"
    assert in_child(lambda: train(Trace(), session, **options(parts, killed))) == -signal.SIGKILL
    session = FakeSession(checkpoint_dir=folder, checkpoints=newest(folder))
    train(Trace(), session, **options(parts))
    assert events(parts) == events(tmp_path / "whole")


def test_lost_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rows that somebody has removed are missed, and the run goes on."""
    session = FakeSession({5: "disk"}, checkpoint_dir=tmp_path / "run")
    with pytest.raises(Suspended):
        train(Trace(), session, logger=CSVLogger(tmp_path))
    file = next(tmp_path.rglob("metrics.csv"))
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[:3]) + "\n")
    train(Trace(), session.again(), logger=CSVLogger(tmp_path))
    assert f"Of the metrics in {file} the last ones are missing." in caplog.text
    steps = [line.rpartition(",")[0].split(",")[1] for line in file.read_text().splitlines()]
    assert steps[1:4] == ["0", "1", "5"]


class Silent(Logger):
    """Logs nothing, and passes on how the training has ended."""

    name = "silent"
    version = 0

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def finalize(self, status: str) -> None:
        self._tell(status)


def test_other_loggers(tmp_path: Path) -> None:
    """Loggers that cannot be put back, in whatever order, are left alone; no suspension fails."""
    ends: list[str] = []

    def options(folder: Path) -> dict[str, Any]:
        return {"logger": [Silent(ends.append), CSVLogger(folder)]}

    whole(lambda: options(tmp_path / "whole"))
    suspended(lambda: options(tmp_path / "parts"), tmp_path / "run")
    assert ends == ["success", "success"]
    name = "lightning_logs/version_0/metrics.csv"
    expected = (tmp_path / "whole" / name).read_bytes()
    assert (tmp_path / "parts" / name).read_bytes() == expected


@pytest.mark.parametrize("name", ["flush", "end", "finish"])
def test_what_a_logger_sends_in_the_background_is_sent_before_its_process_ends(
    name: str, tmp_path: Path
) -> None:
    """As W&B does, whose runs go on by their id; a training that ends leaves that to its script.

    That it cannot be sent is no error of the trial.
    """
    sent: list[str] = []

    def send() -> None:
        sent.append(name)
        raise ConnectionError

    def options(folder: Path) -> dict[str, Any]:
        logger = Silent(sent.append)
        vars(logger)["_experiment"] = SimpleNamespace(**{name: send})
        return {"logger": logger}

    suspended(lambda: options(tmp_path), tmp_path / "run")
    assert sent[:-1]
    assert set(sent[:-1]) == {name}
    assert sent[-1] == "success"


def test_rows_are_written_before_others_send(tmp_path: Path) -> None:
    """The next process may begin meanwhile: rows that come after it has cut the file stay in it."""
    written: list[bytes] = []
    other, logger = Silent(lambda status: None), CSVLogger(tmp_path, "study")
    file = Path(logger.log_dir, "metrics.csv")
    vars(other)["_experiment"] = SimpleNamespace(end=lambda: written.append(file.read_bytes()))
    options = {"logger": [other, logger], "log_every_n_steps": 50}
    session = FakeSession({3: "disk"}, checkpoint_dir=tmp_path / "run")
    with pytest.raises(Suspended):
        train(Trace(), session, callbacks=[Counts()], **options)
    assert written == [file.read_bytes()]
    assert written[0].splitlines()[1:] == [b"1,0", b"2,1", b"3,2"]


def test_logs_left_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run that comes to a host without its logs begins new ones, and says so."""
    session = FakeSession({5: "disk"}, checkpoint_dir=tmp_path / "run")
    with pytest.raises(Suspended):
        train(Trace(), session, logger=CSVLogger(tmp_path / "here"))
    shutil.rmtree(tmp_path / "here")
    train(Trace(), session.again(), logger=CSVLogger(tmp_path / "there"))
    assert "begin anew in " in caplog.text
    assert list(tmp_path.rglob("metrics.csv")) == [
        tmp_path / "there/lightning_logs/version_0/metrics.csv"
    ]


# -- folders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("appended", [False, True])
def test_own_root(appended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that Lightning writes itself are in the run's folder, and no stray file is loaded.

    So they are where the run's callback was appended to a Trainer; no suspension is a failure.
    """
    working = tmp_path / "working"
    working.mkdir()
    (working / "hpc_ckpt_1.ckpt").write_text("of another trial")
    monkeypatch.chdir(working)

    def before(trainer: pl.Trainer) -> None:
        log_more(trainer)
        if appended:
            callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
            callbacks.append(callbacks.pop(0))
            assert isinstance(callbacks[-1], HermesCallback)

    def options(root: Path | None = None) -> dict[str, Any]:
        return {
            "default_root_dir": root,
            "logger": True,
            "callbacks": [ModelCheckpoint(save_on_exception=True)],
            "enable_checkpointing": True,
            "profiler": SimpleProfiler(filename="profile"),
            "before": before,
        }

    whole(lambda: options(tmp_path / "whole"))
    _, trainer = suspended(options, tmp_path / "run")
    assert {path.name for path in working.iterdir()} == {"hpc_ckpt_1.ckpt", "lightning_logs"}
    # Other trials may be about to log in there.
    assert list((working / "lightning_logs").iterdir()) == []
    assert trainer.default_root_dir != str(working)
    root = Path(trainer.default_root_dir)
    assert root.is_relative_to(tmp_path / "run")
    logs = root / "lightning_logs"
    assert [folder.name for folder in logs.iterdir()] == ["version_0"]
    assert [file.parent for file in root.rglob("*.ckpt")] == [logs / "version_0/checkpoints"]
    assert {file.parent for file in root.rglob("*profile*")} == {logs / "version_0"}
    assert events(logs) == events(tmp_path / "whole/lightning_logs")


def test_own_root_of_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values logged before the training are not left behind."""
    monkeypatch.chdir(tmp_path)
    session = FakeSession(checkpoint_dir=tmp_path / "run")
    logger = CSVLogger(tmp_path)
    train(Trace(), session, logger=logger, before=log_more, enable_autolog_hparams=False)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "lightning_logs"}
    assert list((tmp_path / "lightning_logs").iterdir()) == []
    assert Path(logger.log_dir).is_relative_to(tmp_path / "run")
    assert Path(logger.log_dir, "hparams.yaml").read_text() == "more: 1\n"
    assert "early" in Path(logger.log_dir, "metrics.csv").read_text()


def test_chosen_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A root directory and a logger that the objective chose stay."""
    monkeypatch.chdir(tmp_path)
    session = FakeSession(checkpoint_dir=tmp_path / "run")
    trainer = train(Trace(), session, default_root_dir=tmp_path / "mine", enable_checkpointing=True)
    assert trainer.default_root_dir == str(tmp_path / "mine")
    assert len(list((tmp_path / "mine").rglob("*.ckpt"))) == 1
    train(Trace(), FakeSession(checkpoint_dir=tmp_path / "run"), logger=CSVLogger("logs"))
    assert (tmp_path / "logs/lightning_logs/version_0/metrics.csv").exists()


@pytest.mark.parametrize(
    ("chosen", "folder"),
    [
        ({"name": "mine", "version": "trial-3"}, "mine/trial-3"),
        ({"name": "mine"}, "mine/version_0"),
        ({"version": "trial-3"}, "lightning_logs/trial-3"),
        ({"version": 3}, "lightning_logs/version_3"),
    ],
)
def test_logger_of_the_script_s_in_the_working_directory(
    chosen: dict[str, Any], folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays there, unlike Lightning's own: its name or version is for people to find it by."""
    monkeypatch.chdir(tmp_path)
    session = FakeSession({5: "disk"}, checkpoint_dir=tmp_path / "run")
    with pytest.raises(Suspended):
        train(Trace(), session, logger=CSVLogger(tmp_path, **chosen))
    train(Trace(), session.again(), logger=CSVLogger(tmp_path, **chosen))
    assert list(tmp_path.rglob("metrics.csv")) == [tmp_path / folder / "metrics.csv"]


def test_own_root_with_the_version_of_a_slurm_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning gives it to the logger that it makes, which is in the trial's folder there too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    session = FakeSession(checkpoint_dir=tmp_path / "run")
    trainer = train(Trace(), session, logger=True)
    assert Path(str(trainer.log_dir)).is_relative_to(tmp_path / "run")


# -- the end --------------------------------------------------------------------------------------


class Waits(FakeSession):
    """Waits as a real session does: until its process is told to end."""

    def __init__(self, pipe: Any) -> None:
        super().__init__({3: "resident"})
        self._pipe = pipe

    def park(self, state: CleanPoint) -> None:
        self._pipe.send("parked")
        while not state.ended():
            time.sleep(0.01)
        raise SystemExit(128 + signal.SIGTERM)


def test_sigterm(tmp_path: Path) -> None:
    """A parked run that is told to end ends cleanly: its trainer tidies up, nothing is printed."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    class Tidies(Callback):
        def on_exception(self, *args: Any) -> None:
            theirs.send("tidied")

    def run() -> None:
        with (tmp_path / "printed").open("w") as printed:
            os.dup2(printed.fileno(), sys.stderr.fileno())
        train(Trace(), Waits(theirs), callbacks=[Tidies()], logger=Silent(theirs.send))

    process = context.Process(target=run)
    process.start()
    assert ours.poll(30)
    assert ours.recv() == "parked"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    process.join(30)
    assert process.exitcode == 128 + signal.SIGTERM
    assert ours.recv() == "tidied"
    assert not ours.poll()  # the logger knows of no failure: the trial goes on
    assert "Traceback" not in (tmp_path / "printed").read_text()


# -- random numbers in loader workers -------------------------------------------------------------


class Drawing(Dataset[torch.Tensor]):
    """Draws nothing, or by one of three generators."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._own = np.random.default_rng(1)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        draws: dict[str, Callable[[], Any]] = {
            "quiet": lambda: 0.0,
            "torch": lambda: torch.rand(1).item(),
            "numpy": np.random.rand,
            "python": random.random,
            "own": self._own.random,
        }
        return torch.tensor(draws[self._kind]())


def batches_of(kind: str, *, watched: bool, **options: Any) -> tuple[list[torch.Tensor], bool]:
    """Return a loader's batches, and True if it was found to draw."""
    options = {"num_workers": 2, "multiprocessing_context": "fork", **options}
    loader = options.pop("loader", DataLoader)(Drawing(kind), batch_size=4, **options)
    collate = loader.collate_fn
    watch = RandomWatch(loader) if watched else None
    torch.manual_seed(2)
    batches = list(loader)
    drew = watch is not None and watch.drew()
    if watch is not None:
        watch.unwrap()
    assert loader.collate_fn is collate
    assert loader.worker_init_fn is options.get("worker_init_fn")
    return batches, drew


def seeded(worker: int) -> None:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(worker)


@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("kind", ["quiet", "torch", "numpy", "python", "own"])
def test_random_workers(kind: str, loader: Any) -> None:
    """It is found out who draws random numbers in a worker, and what is drawn stays the same."""
    for options in ({}, {"worker_init_fn": seeded, "persistent_workers": True}):
        expected, _ = batches_of(kind, watched=False, loader=loader, **options)
        batches, drew = batches_of(kind, watched=True, loader=loader, **options)
        assert drew == (kind != "quiet")
        for batch, known in zip(batches, expected, strict=True):
            assert torch.equal(batch, known)


def test_spawned_workers() -> None:
    """Workers that are started anew are watched too, also where a batch is made at random."""
    data: Any = [torch.zeros(2)]
    options = {"num_workers": 1, "multiprocessing_context": "spawn"}
    loader = DataLoader(data, batch_size=None, collate_fn=torch.rand_like, **options)
    watch = RandomWatch(loader)
    assert len(list(loader)) == 1
    assert watch.drew()


def test_random_workers_of_a_trial(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run that cannot tell what is drawn in workers says so, once, and leaves its loader so."""
    session = FakeSession({2: "resident", 5: "resident"}, checkpoint_dir=tmp_path)
    workers = {"num_workers": 1, "multiprocessing_context": "fork", "persistent_workers": True}
    trainer = train(Trace(), session, workers=workers, loader=StatefulDataLoader)
    assert caplog.text.count("Points draws random numbers in loader workers") == 1
    assert trainer.train_dataloader.collate_fn is default_collate


def test_a_loader_with_a_state_that_is_made_for_each_epoch_goes_with_it(tmp_path: Path) -> None:
    """Its workers end with it, also where some of its batches are left."""
    options = {"num_workers": 1, "multiprocessing_context": "fork"}
    assert left_of(lambda: StatefulDataLoader(Points(16), 4, **options), tmp_path) == [1] * EPOCHS


def test_a_loader_in_two_places_that_is_made_for_each_epoch_goes_with_it(tmp_path: Path) -> None:
    """So does the copy that stands in the second place."""
    assert left_of(lambda: DataLoader(Points(16), 4), tmp_path, places=2) == [1] * EPOCHS


def left_of(make: Callable[[], Any], folder: Path, places: int = 1) -> list[int]:
    """How many loaders are there in each epoch of a training that makes one for each."""
    made: list[weakref.ref[Any]] = []
    left: list[int] = []

    class Remaking(Net):
        def train_dataloader(self) -> Any:
            each = make()
            made.append(weakref.ref(each))
            return each if places == 1 else CombinedLoader([each] * places)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch if places == 1 else batch[0], batch_idx)

        def on_train_epoch_start(self) -> None:
            gc.collect()
            left.append(sum(each() is not None for each in made))

    trial = optuna.create_study().ask()
    hermes = HermesCallback(trial, "train_loss", _session=FakeSession(checkpoint_dir=folder))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options = {"limit_train_batches": 2, "reload_dataloaders_every_n_epochs": 1, **quiet}
    pl.Trainer(max_epochs=EPOCHS, callbacks=[hermes], **options).fit(Remaking())
    return left


def test_random_warning() -> None:
    """The warning names the data set, not its subset, and what to do."""
    data = torch.utils.data.Subset(Drawing("torch"), [0, 1])
    watch = RandomWatch(DataLoader(data, num_workers=2))
    assert watch.warning().startswith("Drawing draws random numbers in loader workers (num_wor")
    assert not has_workers(DataLoader(data))


class WithTest(Net):
    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)


def test_weights_of_an_earlier_epoch_leave_value_and_units(tmp_path: Path) -> None:
    """A test with the best weights, as most scripts end, and a fit that begins with them."""
    session = FakeSession(checkpoint_dir=tmp_path / "study" / "trial")
    hermes = HermesCallback(optuna.create_study().ask(), "val_loss", _session=session)
    every = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False}
    trainer = pl.Trainer(max_epochs=EPOCHS, callbacks=[hermes, every], **options)
    model, data = WithTest(), DataLoader(Points(40), 4)
    trainer.fit(model, data, data)
    last, first = hermes.value, tmp_path / "epoch=0.ckpt"
    session.beats.clear()
    hermes._loop._next_beat = 0.0  # a second after the last one
    trainer.test(model, data, ckpt_path=first)
    trainer.validate(model, data, ckpt_path=first)
    assert hermes.value == last
    assert session.beats, "a test shows that the trial is alive"
    again = pl.Trainer(max_epochs=EPOCHS, callbacks=[hermes], enable_checkpointing=False, **options)
    again.fit(model, data, data, ckpt_path=first)
    assert [unit for unit, _, _ in session.reports] == [*range(1, 2 * EPOCHS)]
