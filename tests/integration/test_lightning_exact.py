"""A suspended Lightning run is, bit for bit, the run that was never suspended.

As a script, this file is the next process of a run: ``test_lightning_exact.py FOLDER SEED LOADER``.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import optuna
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from optuna_hermes.errors import Suspended
from optuna_hermes.lightning import HermesCallback
from optuna_hermes.model import Checkpoint, TierName
from optuna_hermes.testing import FakeSession

pytestmark = pytest.mark.filterwarnings(
    "ignore:'set_vital' is deprecated",  # torchdata
    "ignore:ReduceLROnPlateau conditioned",  # before the first validation
)

TIERS: tuple[TierName, ...] = ("resident", "host", "disk")
LOADERS = {"plain": DataLoader, "stateful": StatefulDataLoader}
EPOCHS = 5
BATCHES = 20
Bits = dict[Any, bytes]


class Points(Dataset[tuple[torch.Tensor, int]]):
    """Data that every generator of random numbers has a hand in."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self._x = torch.randn(length, 8, generator=generator)
        self._y = (self._x[:, 0] > 0).long() + (self._x[:, 1] > 0).long()

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.randn(8) + np.random.normal() + random.gauss(0, 1)
        return self._x[index] + 0.1 * noise, int(self._y[index])


class Net(pl.LightningModule):
    """Everything that has a state of its own in one small network."""

    def __init__(self, total_steps: int) -> None:
        super().__init__()
        self.total_steps = total_steps
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 3)
        )
        self.accuracy = MulticlassAccuracy(3)
        self.mean_loss = MeanMetric()
        self.smoothed = 0.0  # kept in a plain attribute, as people do

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        out = self.net(x)
        loss = nn.functional.cross_entropy(out, y) + 0.001 * self.smoothed
        self.smoothed = 0.9 * self.smoothed + 0.1 * float(loss.detach())
        self.accuracy(out, y)
        self.mean_loss(loss)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("last", batch_idx, on_step=False, on_epoch=True, reduce_fx=max)
        self.log("first", batch_idx, on_step=False, on_epoch=True, reduce_fx=min)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("mean_loss", self.mean_loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log(
            "val_loss", nn.functional.cross_entropy(self.net(x), y), on_step=True, on_epoch=True
        )

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, self.total_steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class ByHand(Net):
    """Optimizes by hand, and steps on every second batch only."""

    def __init__(self, total_steps: int) -> None:
        super().__init__(total_steps)
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()
            self.lr_schedulers().step()
        return loss


class TwoOptimizers(Net):
    """Optimizes two halves by hand, each with a scheduler of its own, one every third batch."""

    def __init__(self, total_steps: int) -> None:
        super().__init__(total_steps)
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        body, head = self.optimizers()
        self.manual_backward(loss)
        body.step()
        body.zero_grad()
        if batch_idx % 3 == 0:  # else its gradients add up
            head.step()
            head.zero_grad()
        for scheduler in self.lr_schedulers():
            scheduler.step()
        return loss

    def configure_optimizers(self) -> Any:
        body = torch.optim.AdamW(self.net[:4].parameters(), lr=0.01)
        head = torch.optim.SGD(self.net[4:].parameters(), lr=0.05, momentum=0.9)
        return [body, head], [
            torch.optim.lr_scheduler.OneCycleLR(body, 0.05, self.total_steps),
            torch.optim.lr_scheduler.StepLR(head, 30, 0.5),
        ]


class Plateau(Net):
    """Asks after every batch whether training and the last validation were any better."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        configs = [
            {
                "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
                "interval": "step",
                "monitor": monitor,
                "strict": monitor == "train_loss",  # there is no validation in the beginning
            }
            for monitor in ("train_loss", "val_loss")
        ]
        return [optimizer], configs


class Frozen(Net):
    """Freezes a part of the network in the course of the training."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[1].eval()


class Stops(Callback):
    """Wants to stop much sooner than it may."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.fit_loop.total_batch_idx == 2:
            trainer.should_stop = True


class Trace(Logger):
    """Record of a run, to the bit: losses by batch, rows by step, weights at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.folder: str | None = None
        self.batch = -1  # validation counts its steps anew when its loader is loaded anew
        self.losses: Bits = {}
        self.rows: Bits = {}
        self.end: Bits = {}

    @property
    def name(self) -> str:
        return "trace"

    @property
    def version(self) -> int:
        return 0

    @property
    def save_dir(self) -> str | None:
        return self.folder

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.note(self.rows, (step, self.batch, *sorted(metrics)), list(metrics.values()))

    def note(self, where: Bits, key: Any, value: Any) -> None:
        bits = torch.as_tensor(value, dtype=torch.float64).numpy().tobytes()
        assert where.setdefault(key, bits) == bits, f"trained again, {key} is another one"

    def seen(self) -> tuple[Bits, Bits, Bits]:
        return self.losses, self.rows, self.end


class Watch(Callback):
    """Fills a trace, tells the session of every batch, and may end the process of a run."""

    def __init__(self, trace: Trace, session: FakeSession, killed_after: int | None) -> None:
        self._trace = trace
        self._session = session
        self._killed_after = killed_after
        self._batches = 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any
    ) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else pl_module.smoothed
        self._trace.batch = trainer.fit_loop.total_batch_idx
        self._trace.note(self._trace.losses, self._trace.batch, loss)
        self._session.tick()
        self._batches += 1
        if self._batches == self._killed_after:
            raise SystemExit(9)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for name, value in pl_module.state_dict().items():
            self._trace.note(self._trace.end, name, value)
        self._trace.note(self._trace.end, "steps", trainer.global_step)
        progress = {**trainer.fit_loop.state_dict(), "state_dict": None}
        self._trace.end["progress"] = repr(progress).encode()
        for name, value in trainer.callback_metrics.items():
            self._trace.note(self._trace.end, f"metric {name}", value)


def new_trial(direction: str = "minimize") -> optuna.Trial:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(direction=direction).ask()


def train(
    session: FakeSession,
    trace: Trace,
    *,
    seed: int = 1,
    loader: Any = DataLoader,
    net: type[Net] = Net,
    data: Dataset[Any] | None = None,
    trial: optuna.Trial | None = None,
    killed_after: int | None = None,
    patience: int = 4,
    callbacks: tuple[Callback, ...] = (),
    loader_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> HermesCallback:
    """One process of a run; a new one starts with other random numbers."""
    pl.seed_everything(1, verbose=False)
    model = net(total_steps=EPOCHS * BATCHES)
    data = Points(BATCHES * 8) if data is None else data
    batches = loader(data, batch_size=8, **{"shuffle": True, **(loader_options or {})})
    if session.checkpoints:
        pl.seed_everything(seed, verbose=False)
    hermes = HermesCallback(trial or new_trial(), "val_loss", _session=session)
    watch = Watch(trace, session, killed_after)
    stop = EarlyStopping("val_loss", patience=patience)
    settings: dict[str, Any] = {
        "max_epochs": EPOCHS,
        "accelerator": "cpu",
        "logger": trace,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "callbacks": [hermes, stop, watch, *callbacks],
    }
    pl.Trainer(**{**settings, **options}).fit(model, batches, DataLoader(Points(24), batch_size=8))
    trace.note(trace.end, "value", hermes.value)
    trace.note(trace.end, "early stopping", [stop.wait_count, float(stop.best_score)])
    return hermes


def suspended(session: FakeSession, trace: Trace, **options: Any) -> FakeSession:
    """Train until the run is put on disk, and give the session of its next process."""
    with pytest.raises(Suspended):
        train(session, trace, **options)
    return session.again()


def scramble() -> None:
    """Others train in this process meanwhile."""
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)


class Quiet(Points):
    """Data without random numbers."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._x[index], int(self._y[index])


def options_of(name: str) -> dict[str, Any]:
    """Return the special options of a run, by name; made anew each time: callbacks have a state."""
    drawn = WeightedRandomSampler([1.0, 2.0] * (BATCHES * 4), BATCHES * 8)
    generator = torch.Generator().manual_seed(3)
    workers = {"num_workers": 2, "multiprocessing_context": "fork"}
    whole: dict[str, dict[str, Any]] = {
        "shuffled": {},
        "stateful": {"loader": StatefulDataLoader},
        "stateful-workers": {
            "loader": StatefulDataLoader,
            "loader_options": workers,
            "data": Quiet(BATCHES * 8),
        },
        "accumulated": {"accumulate_grad_batches": 4},
        "twice-an-epoch": {"val_check_interval": 0.5, "patience": 10},
        "two-optimizers": {"net": TwoOptimizers},
    }
    shorter: dict[str, dict[str, Any]] = {
        "own-generator": {"loader_options": {"generator": generator}},
        "own-sampler": {"loader_options": {"sampler": drawn, "shuffle": False}},
        "workers": {"loader_options": workers, "data": Quiet(BATCHES * 8)},
        "accumulated-later": {"callbacks": (GradientAccumulationScheduler({1: 4}),)},
        "every-batch": {"val_check_interval": 1, "limit_train_batches": 5, "max_epochs": 8},
        "one-batch-epochs": {"limit_train_batches": 1, "max_epochs": 35, "patience": 35},
        "steps": {"max_steps": 50, "max_epochs": -1},
        "across-epochs": {"val_check_interval": 7, "check_val_every_n_epoch": None},
        "plateau": {"net": Plateau, "val_check_interval": 7, "check_val_every_n_epoch": None},
        "by-hand": {"net": ByHand},
        "reloaded": {"reload_dataloaders_every_n_epochs": 1},
        "frozen-later": {"net": Frozen},
        "stopped-early": {"patience": 0, "val_check_interval": 0.25},
        "stopped-later": {"min_epochs": 2, "callbacks": (Stops(),)},
    }
    if name in whole:
        return {"max_epochs": EPOCHS, **whole[name]}
    return {"max_epochs": 3, **shorter[name]}


WHOLE = [
    "shuffled",
    "stateful",
    "stateful-workers",
    "accumulated",
    "twice-an-epoch",
    "two-optimizers",
]
SHORTER = [
    "own-generator",
    "own-sampler",
    "workers",
    "accumulated-later",
    "every-batch",
    "one-batch-epochs",
    "steps",
    "across-epochs",
    "plateau",
    "by-hand",
    "reloaded",
    "frozen-later",
    "stopped-early",
    "stopped-later",
]


@functools.cache
def expected(name: str) -> Trace:
    """The trace of the run that is never suspended."""
    trace = Trace()
    train(FakeSession(), trace, **options_of(name))
    assert name not in WHOLE or len(trace.losses) == EPOCHS * BATCHES == 100
    return trace


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    "name",
    [
        # Its loader is stored in test_pytorch, too.
        pytest.param(name, marks=pytest.mark.slow) if name == "stateful-workers" else name
        for name in (*WHOLE, *SHORTER)
    ],
)
def test_disk(name: str, tmp_path: Path) -> None:
    """Three suspensions to disk, each resumed with other random numbers, leave no trace."""
    trace = Trace()
    session = FakeSession({7: "disk"}, checkpoint_dir=tmp_path)
    for seed, after in ((2, 3), (3, 10)):
        session = suspended(session, trace, seed=seed, **options_of(name)).again({after: "disk"})
    session = suspended(session, trace, seed=4, **options_of(name))
    train(session, trace, seed=5, **options_of(name))
    assert trace.seen() == expected(name).seen()
    assert len(list(tmp_path.iterdir())) <= 3, "the newest, and the two the ledger knew then"


@pytest.mark.parametrize("name", ["shuffled", "workers"])
def test_disk_before_anything_is_trained(name: str, tmp_path: Path) -> None:
    """A run that comes back and must leave at once is where it was."""
    trace = Trace()
    session = FakeSession({27: "disk"}, checkpoint_dir=tmp_path)
    session = suspended(session, trace, **options_of(name))
    session.must_yield, session.requested_tier = True, "disk"
    session = suspended(session, trace, seed=2, **options_of(name))
    train(session, trace, seed=3, **options_of(name))
    assert trace.seen() == expected(name).seen()


@pytest.mark.parametrize(
    "name",
    [
        # One that is not exact in memory is not so on disk.
        name if name in ("shuffled", "stateful") else pytest.param(name, marks=pytest.mark.slow)
        for name in WHOLE
    ],
)
@pytest.mark.parametrize("tier", ["resident", "host"])
def test_in_memory(tier: TierName, name: str, tmp_path: Path) -> None:
    """A run that waits in its process while others use the random numbers goes on as it was."""
    trace = Trace()
    yields = dict.fromkeys((1, 6, 20, 23, 51), tier)
    session = FakeSession(yields, checkpoint_dir=tmp_path, while_parked=scramble)
    train(session, trace, **options_of(name))
    assert session.parks == [tier] * 5
    assert trace.seen() == expected(name).seen()


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that should go to a full disk goes on in memory, and is stored once there is room."""
    trace, fsync = Trace(), os.fsync

    def refuse(descriptor: int) -> None:
        if len(session.parks) < 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    yields = dict.fromkeys((7, 20, 45), "disk")
    session = FakeSession(yields, checkpoint_dir=tmp_path, while_parked=scramble)
    again = suspended(session, trace, **options_of("shuffled"))
    assert session.parks == ["resident", "resident", "disk"]
    train(again, trace, seed=2, **options_of("shuffled"))
    assert trace.seen() == expected("shuffled").seen()


@pytest.mark.parametrize("first", ["resident", "host"])
def test_evicted(first: TierName, tmp_path: Path) -> None:
    """A run that waits in memory can be moved and put on disk later, with others' numbers drawn."""
    trace = Trace()
    session = FakeSession(
        {33: first}, checkpoint_dir=tmp_path, while_parked=scramble, evicts=("host", "disk")
    )
    session = suspended(session, trace, seed=2)
    train(session, trace, seed=3)
    assert trace.seen() == expected("shuffled").seen()


def test_recalled(tmp_path: Path) -> None:
    """A run can be moved to host memory and back while it waits."""
    trace = Trace()
    session = FakeSession(
        {33: "resident"}, checkpoint_dir=tmp_path, evicts=("host", "resident", "host", "resident")
    )
    train(session, trace)
    assert session.parks == ["resident", "host", "resident", "host", "resident"]
    assert trace.seen() == expected("shuffled").seen()


@settings(max_examples=3, deadline=None, derandomize=True)
@given(
    steps=st.lists(
        st.tuples(st.integers(1, EPOCHS * BATCHES - 1), st.sampled_from(TIERS)),
        min_size=20,
        max_size=20,
        unique_by=lambda step: step[0],
    )
)
def test_any_suspensions(steps: list[tuple[int, TierName]]) -> None:
    """Twenty suspensions wherever they fall, over any tiers, leave no trace."""
    trace = Trace()
    left = dict(sorted(steps))
    with tempfile.TemporaryDirectory() as folder:
        session = FakeSession(left, checkpoint_dir=Path(folder), while_parked=scramble)
        seed = 2
        while "disk" in left.values():
            step = next(step for step, tier in left.items() if tier == "disk")
            session = suspended(session, trace, seed=seed)
            left = {later - step: tier for later, tier in left.items() if later > step}
            session, seed = session.again(left), seed + 1
        train(session, trace, seed=seed)
    assert trace.seen() == expected("shuffled").seen()


@pytest.mark.parametrize("loader", ["plain", "stateful"])
def test_new_process(loader: str, tmp_path: Path) -> None:
    """A run goes on in another process, with another seed, as in its first one."""
    trace = Trace()
    session = FakeSession({47: "disk"}, checkpoint_dir=tmp_path)
    session = suspended(session, trace, loader=LOADERS[loader])
    state = asdict(session.checkpoints[0])
    (tmp_path / "state.json").write_text(json.dumps(state))
    command = [sys.executable, __file__, str(tmp_path), "99", loader]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    losses, rows, end = torch.load(tmp_path / "trace.pt", weights_only=True)
    known = expected("shuffled" if loader == "plain" else "stateful")
    assert ({**trace.losses, **losses}, {**trace.rows, **rows}, end) == known.seen()


@pytest.mark.parametrize(
    "killed_after", [19, *[pytest.param(each, marks=pytest.mark.slow) for each in (20, 21, 59)]]
)
def test_killed(killed_after: int, tmp_path: Path) -> None:
    """SIGKILL costs at most a unit: what is trained again is the same, and reported once."""
    trace, trial = Trace(), new_trial()
    session = FakeSession(checkpoint_dir=tmp_path)
    with pytest.raises(SystemExit):
        train(session, trace, trial=trial, killed_after=killed_after)
    units = len(session.reports)
    assert [state.units for state in session.states] == list(range(1, units + (killed_after != 20)))
    train(session.again(), trace, trial=trial, seed=6)  # a second report would be a warning
    assert trace.seen() == expected("shuffled").seen()
    assert sorted(trial.study.trials[0].intermediate_values) == [1, 2, 3, 4, 5]


def test_best_models(tmp_path: Path) -> None:
    """ModelCheckpoint goes on with the best models of the earlier processes, in their folder."""

    def run(session: FakeSession, folder: str) -> ModelCheckpoint:
        best = ModelCheckpoint(monitor="val_loss", save_top_k=2)
        trace = Trace()
        trace.folder = str(tmp_path / folder)
        options: dict[str, Any] = {"callbacks": (best,), "enable_checkpointing": True}
        if any(tick == "disk" for tick in session.script.values()):
            suspended(session, trace, **options)
        else:
            train(session, trace, **options)
        return best

    whole = run(FakeSession(), "whole")
    session = FakeSession({65: "disk"}, checkpoint_dir=tmp_path / "run")
    run(session, "first")
    best = run(session.again(), "second")
    assert best.best_model_score == whole.best_model_score
    assert Path(best.best_model_path).name == Path(whole.best_model_path).name
    assert best.dirpath is not None
    assert best.dirpath.startswith(str(tmp_path / "first"))


def main(folder: Path, seed: int, loader: str) -> None:
    """Go on from the checkpoint described in ``folder``, and write down the rest of the run."""
    torch.set_num_threads(1)
    state = json.loads((folder / "state.json").read_text())
    stored = Checkpoint(**state)
    trace = Trace()
    session = FakeSession(checkpoint_dir=folder, checkpoints=(stored,))
    train(session, trace, seed=seed, loader=LOADERS[loader])
    torch.save(trace.seen(), folder / "trace.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
