"""State of a user's objects is restored with a trial, or named: no wrong values in silence."""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib
import io
import itertools
import math
import multiprocessing
import queue
import random
import re
import subprocess
import sys
import weakref
from array import array
from collections import Counter, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import optuna
import pytest
import torch
import tqdm
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
from torchmetrics import (
    MaxMetric,
    MeanMetric,
    Metric,
    MetricCollection,
    MetricTracker,
    RunningMean,
    SumMetric,
)

from optuna_hermes.errors import Suspended
from optuna_hermes.lightning import HermesCallback
from optuna_hermes.pytorch import PyTorchLoop
from optuna_hermes.suspend._loop_code._code import classes_of
from optuna_hermes.suspend._loop_code._locals import variables
from optuna_hermes.testing import FakeSession
from support import loops

EPOCHS = 4
BATCHES = 5

Step = namedtuple("Step", ["state", "reward"])


class Phase(Enum):
    WARM = 1
    HOT = 2


@dataclass
class Seen:
    """One thing that was seen."""

    loss: float
    tags: dict[str, int]


class Memory:
    """A replay buffer, as users write them."""

    def __init__(self) -> None:
        self.steps: deque[Step] = deque(maxlen=7)
        self.ring = np.zeros((6, 2), np.float32)
        self.at = 0
        self.drawn = np.random.default_rng(5)

    def push(self, x: torch.Tensor, loss: float) -> None:
        self.steps.append(Step(x.numpy().copy(), loss))
        self.ring[self.at % 6] = [loss, self.drawn.normal()]
        self.at += 1

    def value(self) -> float:
        chosen = self.drawn.integers(len(self.steps)) if self.steps else 0
        reward = self.steps[chosen].reward if self.steps else 0.0
        return float(self.ring.mean()) + 0.1 * reward


class World:
    """An environment: what it says depends on what was done to it."""

    def __init__(self) -> None:
        self.rng = random.Random(3)
        self.state = torch.zeros(2)
        self.parts = [Seen(0.0, {}), Seen(1.0, {})]

    def step(self, action: float) -> float:
        self.state = 0.9 * self.state + action + self.rng.random()
        self.parts[0].loss += action
        self.parts.append(Seen(action, {"n": len(self.parts)}))
        return float(self.state.sum()) + self.parts[0].loss


class Net(pl.LightningModule):
    """Its losses depend on all that its objects remember."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)
        self.memory = Memory()
        self.world = World()
        self.recent: deque[float] = deque(maxlen=3)
        self.hidden = np.zeros(2)
        self.counts: Counter[str] = Counter()
        self.by_name: defaultdict[str, list[float]] = defaultdict(list)
        self.phase = Phase.WARM
        self.target = [nn.Linear(3, 1).requires_grad_(False)]
        self.losses: dict[int, float] = {}
        self.bias = 0.0

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        seen = self.memory.value() + float(np.mean(self.recent or [0])) + self.hidden[0]
        seen += sum(self.counts.values()) + sum(map(sum, self.by_name.values())) + self.phase.value
        loss = (self.net(batch[0]) - 0.01 * seen - self.bias).square().mean()
        value = loss.item()
        self.memory.push(batch[0][0], value)
        self.recent.append(value)
        self.hidden = 0.5 * self.hidden + self.world.step(0.1 * value)
        self.counts[str(index % 2)] += 1
        self.by_name[str(index % 3)].append(0.01)
        if len(self.losses) > 3:
            self.phase = Phase.HOT
        self.losses[self.global_step] = value
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Curriculum(pl.Callback):
    """A counter without ``state_dict``, on which training depends."""

    def __init__(self) -> None:
        self.batches = 0
        self.history: list[float] = []
        self.best = np.full(2, np.inf)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.batches += 1
        self.history.append(float(outputs["loss"]))
        self.best = np.minimum(self.best, self.history[-1])
        pl_module.bias = 0.01 * self.batches + 0.1 * float(self.best[0])


class Counting(EarlyStopping):
    """A callback of Lightning's with something of the user's own."""

    def __init__(self) -> None:
        super().__init__("loss", patience=100, check_on_train_epoch_end=True)
        self.calls: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.calls.append(trainer.global_step)
        pl_module.bias += 0.001 * len(self.calls)


class Data(pl.LightningDataModule):
    """Data that grow harder by a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.level = 0

    def train_dataloader(self) -> Any:
        x = torch.randn(BATCHES * 4, 3, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x), batch_size=4, shuffle=True)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.level += 1
        return [batch[0] * (1 + 0.01 * self.level)]


def fit(
    session: FakeSession | None,
    net: Any,
    callbacks: list[Any],
    seed: int = 1,
    data: Callable[[], Data | None] = Data,
    settings: Callable[[], dict[str, Any]] = dict,
) -> Any:
    """One process of a run."""
    torch.manual_seed(1)
    model = net()
    torch.manual_seed(seed)

    class Tick(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            if session is not None:
                session.tick()

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    hermes = HermesCallback(optuna.create_study().ask(), monitor="loss", _session=session)
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        callbacks=[hermes, Tick(), *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        **settings(),
    )
    trainer.fit(model, datamodule=data())
    return model


def by_way_of_disk(
    folder: Path,
    net: Any,
    callbacks: Any,
    *after: int,
    data: Callable[[], Data | None] = Data,
    settings: Callable[[], dict[str, Any]] = dict,
) -> Any:
    """Suspended after so many batches, each time in a new process."""
    session = FakeSession(checkpoint_dir=folder / "study" / "trial")
    for seed, batches in enumerate(after):
        session = session.again({batches: "disk"})
        with pytest.raises(Suspended):
            fit(session, net, callbacks(), seed=seed + 1, data=data, settings=settings)
    return fit(session.again(), net, callbacks(), seed=99, data=data, settings=settings)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "no checkpoint holds" in r.getMessage()]


@pytest.mark.parametrize("after", [(7,), (3, 4, 5)])
def test_what_a_module_and_its_callbacks_remember(
    after: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A replay buffer, an environment, counters: bit for bit as if never suspended."""

    def callbacks() -> list[Any]:
        return [Curriculum(), Counting()]

    expected = fit(FakeSession(), Net, callbacks())
    model = by_way_of_disk(tmp_path, Net, callbacks, *after)
    assert model.losses == expected.losses
    assert torch.equal(model.net.weight, expected.net.weight)
    assert [s.reward for s in model.memory.steps] == [s.reward for s in expected.memory.steps]
    assert model.world.parts == expected.world.parts
    assert model.phase is expected.phase is Phase.HOT
    assert said(caplog) == []


class Smooths(pl.Callback):
    """Keeps what it needs on the trainer."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        trainer.seen = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        trainer.smooth = 0.9 * getattr(trainer, "smooth", 1.0) + 0.1 * outputs["loss"].detach()
        trainer.seen.append(trainer.smooth.item())
        pl_module.bias = 0.1 * sum(trainer.seen[-3:]) + 0.01 * len(trainer.seen)


@pytest.mark.parametrize("after", [(7,), (3, 4, 5)])
def test_values_that_hooks_add_to_the_trainer_come_back(
    after: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Other attributes of it are Lightning's own."""
    expected = fit(FakeSession(), Net, [Smooths()])
    model = by_way_of_disk(tmp_path, Net, lambda: [Smooths()], *after)
    assert model.losses == expected.losses
    assert said(caplog) == []


class Decaying(Precision):
    """A precision plugin that counts steps."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        self.steps += 1
        optimizer.param_groups[0]["lr"] = 0.05 * 0.9**self.steps
        return super().optimizer_step(optimizer, model, closure, **kwargs)


class Annealed(SingleDeviceStrategy):
    """A strategy that weighs each loss by the losses before it."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.seen: list[float] = []

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss: Any = super().training_step(*args, **kwargs)
        self.seen.append(loss.item())
        return loss * (1 + 0.1 * sum(self.seen))


@pytest.mark.parametrize(
    "settings", [lambda: {"plugins": [Decaying()]}, lambda: {"strategy": Annealed()}]
)
def test_what_plugins_of_a_user_keep_comes_back(
    settings: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As attributes of callbacks do."""
    expected = fit(FakeSession(), Net, [], settings=settings)
    model = by_way_of_disk(tmp_path, Net, list, 7, 5, settings=settings)
    assert model.losses == expected.losses
    assert torch.equal(model.net.weight, expected.net.weight)
    assert said(caplog) == []


class Softening(Net):
    """Drops less from one epoch to the next, by a setting of torch's own module."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1))

    def on_train_epoch_end(self) -> None:
        self.net[0].p *= 0.5


def test_settings_of_modules_of_torch_come_back(tmp_path: Path) -> None:
    """As attributes of the user's own modules do."""
    expected = fit(FakeSession(), Softening, [])
    model = by_way_of_disk(tmp_path, Softening, list, 7, 5)
    assert model.losses == expected.losses
    assert model.net[0].p == expected.net[0].p < 0.5


class Warming(Net):
    """Changes its hyper-parameters, as Lightning allows."""

    def __init__(self, beta: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.hparams["phases"] = [Phase.WARM]

    def on_train_epoch_end(self) -> None:
        self.hparams.beta += 0.1
        self.hparams.phases.append(Phase.HOT)
        self.bias = self.hparams.beta * len(self.hparams.phases)


class WarmingData(Data):
    """Makes its batches by a hyper-parameter that it changes."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.hparams.scale *= 1.01
        return [batch[0] * self.hparams.scale]


def test_hyper_parameters_that_the_training_changes_come_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of a module and of a data module."""
    expected = fit(FakeSession(), Warming, [], data=WarmingData)
    model = by_way_of_disk(tmp_path, Warming, list, 7, 5, data=WarmingData)
    assert model.losses == expected.losses
    assert model.hparams == expected.hparams
    assert said(caplog) == []


class Ending(pl.Callback):
    """Takes its bonus away in the second epoch."""

    def __init__(self) -> None:
        self.bonus: Any = [Seen(0.5, {})]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == BATCHES + 1:
            self.bonus = None
        pl_module.bias = 0.0 if self.bonus is None else self.bonus[0].loss


class OwnData(Net):
    def train_dataloader(self) -> Any:
        return Data().train_dataloader()


def test_what_becomes_none_stays_so(tmp_path: Path) -> None:
    """Also in a fit without a data module, which is None, too."""

    def none() -> Any:
        return None

    expected = fit(FakeSession(), OwnData, [Ending()], data=none)
    model = by_way_of_disk(tmp_path, OwnData, lambda: [Ending()], 7, data=none)
    assert model.losses == expected.losses


class Beginning(pl.Callback):
    """Counts, and keeps weights, in hooks that come before the first batch."""

    def __init__(self, seen: list[Any]) -> None:
        self.epochs = self.validations = 0
        self.first: torch.Tensor | None = None
        self.fixed: Any = None
        self._seen = seen

    def on_validation_end(self, *args: Any) -> None:
        self.validations += 1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.first = pl_module.net.weight.detach().clone()
        self.fixed = Slotted(1)

    def on_train_epoch_start(self, *args: Any) -> None:
        self.epochs += 1

    def on_train_end(self, *args: Any) -> None:
        assert self.first is not None
        self._seen[:] = [self.epochs, self.validations, self.first.tolist()]


class Validated(Net):
    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("val_loss", 1.0)


class ValidationData(Data):
    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.zeros(4, 3)), batch_size=2)


@pytest.mark.parametrize("after", [(3,), (BATCHES + 2,), (3, 4, 5)])
def test_what_a_callback_noted_before_the_first_batch(
    after: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The hooks of a sanity check and of an epoch's beginning are called once, and have effect."""
    expected: list[Any] = []
    fit(FakeSession(), Validated, [Beginning(expected)], data=ValidationData)
    seen: list[Any] = []
    by_way_of_disk(tmp_path, Validated, lambda: [Beginning(seen)], *after, data=ValidationData)
    assert seen == expected
    assert expected[:2] == [EPOCHS, EPOCHS + 1]
    assert said(caplog) == []


class Opaque(Net):
    """Keeps what nobody can look into, which changes, and what does not."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = itertools.count()
        self.lock = __import__("threading").Lock()
        self.constant = Slotted(1)
        self.slotted = Slotted(1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        next(self.noise)
        self.slotted.value += 1
        return super().training_step(batch, index)


class Slotted:
    """Keeps its attributes where they are not looked for."""

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value


def test_what_cannot_be_saved_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A line for all trials of a study says what changes, and what to do."""
    for trial in ("a", "b"):
        session = FakeSession({8: "disk"}, checkpoint_dir=tmp_path / "study" / trial)
        with pytest.raises(Suspended):
            fit(session, Opaque, [Curriculum()])
    (line,) = said(caplog)
    assert line.startswith("Trial 0 changes Opaque.noise, Opaque.slotted while it trains, and no ")
    assert "Give what holds it state_dict() and load_state_dict()" in line


class Ledger(Net):
    """Counts in numbers of the standard library, and waits in a queue of it."""

    def __init__(self) -> None:
        super().__init__()
        self.paid = Decimal(1)
        self.share = Fraction(1)
        self.ages = array("d")
        self.waiting: queue.Queue[float] = queue.Queue()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        self.paid += 1
        self.share /= 2
        self.ages.append(1.0)
        self.waiting.put(0.5)
        self.bias = float(self.paid + self.waiting.qsize()) + float(self.share) + sum(self.ages)
        return super().training_step(batch, index)


class Clock(pl.Callback):
    """Takes the time of each epoch."""

    def __init__(self) -> None:
        self.took = timedelta()

    def on_train_epoch_start(self, *args: Any) -> None:
        self.began = datetime.now()

    def on_train_epoch_end(self, *args: Any) -> None:
        self.took += datetime.now() - self.began


def test_values_of_the_standard_library_come_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also those that no process makes before it trains."""
    expected = fit(FakeSession(), Ledger, [])
    model = by_way_of_disk(tmp_path, Ledger, lambda: [Clock()], 7, 5)
    assert model.losses == expected.losses
    assert said(caplog) == []


class Mixed(Net):
    """Computes in another dtype, by an object of torch's that it makes in each epoch."""

    def on_train_epoch_start(self) -> None:
        self.mixed = torch.autocast("cpu", dtype=torch.bfloat16)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        with self.mixed:
            return super().training_step(batch, index)


def test_an_object_of_torch_that_is_made_in_training_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The module's code can name its class."""
    expected = fit(FakeSession(), Mixed, [])
    assert by_way_of_disk(tmp_path, Mixed, list, 7, 5).losses == expected.losses
    assert said(caplog) == []


class Bar(pl.Callback):
    """A progress bar of one's own, one per epoch."""

    def on_train_epoch_start(self, *args: Any) -> None:
        self.bar = tqdm.tqdm(total=BATCHES, file=io.StringIO())

    def on_train_batch_end(self, *args: Any) -> None:
        self.bar.update()

    def on_train_epoch_end(self, *args: Any) -> None:
        self.bar.close()


class Bars(Bar):
    """Has others from the second epoch on, beside the first."""

    def on_train_start(self, *args: Any) -> None:
        self.bars = [tqdm.tqdm(total=BATCHES, file=io.StringIO())]
        self.bar = self.bars[0]

    def on_train_epoch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.current_epoch == 1:
            super().on_train_epoch_start()
            self.bars.append(self.bar)


class Fitted(pl.Callback):
    """Fits an estimator whose class its code cannot name."""

    scaler: Any = None

    def on_train_epoch_start(self, *args: Any) -> None:
        self.scaler = importlib.import_module("sklearn.preprocessing").StandardScaler()


class Iterates(pl.Callback):
    def on_train_epoch_start(self, *args: Any) -> None:
        self.others = iter([1])


@pytest.mark.parametrize(
    ("callback", "name", "after"),
    [
        (Bar, "Bar.bar", 7),
        (Bars, "Bars.bars", 7),
        (Fitted, "Fitted.scaler", 3),
        (Iterates, "Iterates.others", 3),
    ],
)
def test_what_the_next_process_would_lack_keeps_a_trial_in_memory(
    callback: Any, name: str, after: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An object that no checkpoint holds comes back neither as None nor not at all."""
    session = FakeSession({after: "disk"}, checkpoint_dir=tmp_path / "study" / "trial")
    fit(session, Net, [callback()])
    assert session.parks == ["resident"]
    lines = [r.getMessage() for r in caplog.records if "only wait in memory" in r.getMessage()]
    what = f"its training has put into {name} what no checkpoint can hold"
    assert [what in each for each in lines] == [True, True]  # on the console, and in its log


def test_what_each_process_makes_keeps_no_trial_in_memory(tmp_path: Path) -> None:
    """A bar that is made before the first epoch, where the next process makes one, too."""
    session = FakeSession({3: "disk"}, checkpoint_dir=tmp_path / "study" / "trial")
    with pytest.raises(Suspended):
        fit(session, Net, [Bars()])
    fit(session.again(), Net, [Bars()])


class Grows(nn.Module):
    """Uses another of its layers from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
        self.path = [self.layers[0]]


def growing(session: FakeSession, others: list[nn.Module]) -> list[nn.Module]:
    """A loop whose model's list grows by its own layer, and by ``others``."""
    model = Grows()
    run = PyTorchLoop(optuna.create_study().ask(), {"model": model}, session)
    for epoch in run.epochs(3):
        if epoch == 1:
            model.path += [model.layers[1], *others]
        for _ in run.batches([1.0, 2.0, 3.0]):
            session.tick()
        run.report(0.0)
    assert model.path[:2] == list(model.layers)
    return model.path


def test_a_list_of_parts_that_grows_keeps_a_trial_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a loop of one's own, too: the list would come back with None in it."""
    session = FakeSession({7: "disk"}, checkpoint_dir=tmp_path / "s" / "t")
    growing(session, [nn.Linear(1, 1)])
    assert session.parks == ["resident"]
    assert "its training has put into model.path what no checkpoint can hold" in caplog.text


def test_a_list_of_named_parts_that_grows_comes_back(tmp_path: Path) -> None:
    """These are found by their names."""
    session = FakeSession({8: "disk"}, checkpoint_dir=tmp_path / "s" / "t")
    with pytest.raises(Suspended):
        growing(session, [])
    assert len(growing(session.again(), [])) == 2


class Switches(Net):
    """Steps with another of its optimizers from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        made = [torch.optim.SGD(self.net.parameters(), lr=0.1) for _ in range(2)]
        self.present, self.other = made
        return made

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        self.manual_backward(loss)
        self.present.param_groups[0]["lr"] *= 0.9
        self.present.step()
        return loss

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.present = self.other


class Exchanges(Net):
    """Uses another of its layers from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.grows = Grows()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.grows.path[:] = [self.grows.layers[1]]


class Harder(Data):
    """Gets another data set from its second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = TensorDataset(torch.zeros(4, 3))

    def on_after_batch_transfer(self, batch: Any, index: int) -> Any:
        if self.trainer.current_epoch == 1:  # type: ignore[union-attr]
            self.samples = TensorDataset(torch.ones(4, 3))
        return batch


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (Switches, lambda model: model.present is model.other),
        (Exchanges, lambda model: model.grows.path[0] is model.grows.layers[1]),
    ],
)
def test_another_object_of_the_training_in_an_attribute_comes_back(
    module: Any, found: Callable[[Any], bool], tmp_path: Path
) -> None:
    """One that is saved elsewhere is found by its name."""
    expected = fit(FakeSession(), module, [])
    model = by_way_of_disk(tmp_path, module, list, 3, 4)
    assert model.losses == expected.losses
    assert found(model)


def test_another_data_set_in_an_attribute_keeps_a_trial_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The attribute would hold the first one again."""
    for after in (3, 7):
        session = FakeSession({after: "disk"}, checkpoint_dir=tmp_path / str(after) / "trial")
        with pytest.raises(Suspended) if after == 3 else contextlib.nullcontext():
            fit(session, Net, [], data=Harder)
    assert session.parks == ["resident"]
    assert "its training has put into Harder.samples what no checkpoint can hold" in caplog.text


class Refers(Net):
    """Makes buffers, references and objects of torch as it trains, and deletes what is done with.

    All but the objects of torch, which are those of the last batch, are made once.
    """

    bank: torch.Tensor
    optimizer: Any = None
    drawn: Any = None
    seen: Any = None
    adjacent: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.first = True
        self.register_buffer("unused", torch.ones(1), persistent=False)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        if self.optimizer is None:
            self.optimizer, self.seen = self.optimizers(), defaultdict(list)
            self.register_buffer("bank", torch.zeros(3), persistent=False)
        else:
            self.bias = self.drawn.mean.item() + self.adjacent.to_dense().sum().item()
        if self.global_step == 2:
            del self.first, self.unused
        self.bank = 0.9 * self.bank + batch[0].mean(0)
        self.bias += self.bank.sum().item() + hasattr(self, "first") + hasattr(self, "unused")
        self.seen["bias"].append(self.bias)
        self.optimizer.param_groups[0]["lr"] *= 0.99
        self.drawn = torch.distributions.Normal(self.net(batch[0]).mean(), 1.0)
        self.adjacent = (batch[0][:3] / 100).to_sparse()
        loss = super().training_step(batch, index)
        return loss * (1 + 0.01 * sum(self.seen["bias"]))


class Holds(pl.Callback):
    """Takes the module in the first epoch, and has a flag for the first batch."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 0:
            self.module, self.trainer, self.begins = pl_module, trainer, True

    def on_train_batch_end(self, *args: Any) -> None:
        self.module.bias += 0.1 * self.trainer.current_epoch + hasattr(self, "begins")
        if hasattr(self, "begins"):
            del self.begins


@pytest.mark.parametrize("after", [(7,), (1, 2, 8)])
def test_what_is_made_and_deleted_in_training(
    after: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Buffers, references to what is saved elsewhere, and objects of classes that can be named."""
    expected = fit(FakeSession(), Refers, [Holds()])
    model = by_way_of_disk(tmp_path, Refers, lambda: [Holds()], *after)
    assert model.losses == expected.losses
    assert model.optimizer is model.optimizers()
    assert said(caplog) == []


class Remembers(Curriculum):
    """Looks after itself."""

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]
        self.opened = iter([])


def test_whoever_has_a_state_dict_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """State that a user's own ``state_dict`` leaves out is left out on purpose."""
    kept: list[Remembers] = []

    def callbacks() -> list[Any]:
        kept.append(Remembers())
        return [kept[-1]]

    by_way_of_disk(tmp_path, Net, callbacks, 8)
    assert kept[-1].batches == EPOCHS * BATCHES
    assert len(kept[-1].history) == EPOCHS * BATCHES - 8
    assert said(caplog) == []


class Trained(Net):
    """Trains tensors that are no parameters of a module, as soft actor-critic does."""

    def __init__(self) -> None:
        super().__init__()
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.scales = [torch.ones(3, requires_grad=True), torch.ones(1, requires_grad=True)]
        self.agent = Agent()
        self.last = self.bias_of_net = self.net.bias.detach()

    def trained(self) -> list[torch.Tensor]:
        return [self.log_alpha, *self.scales, self.agent.log_beta]

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        first, second = self.scales
        out = self.net(batch[0] * first) * second - self.log_alpha.exp() * self.agent.log_beta
        loss = (out - self.last).square().mean()
        self.last = loss.detach().reshape(1).tanh()
        self.log("loss", loss, on_epoch=True)
        self.losses[self.global_step] = loss.item()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([*self.parameters(), *self.trained()], lr=0.05)


class Agent:
    """Something with a tensor that is trained."""

    def __init__(self) -> None:
        self.log_beta = torch.ones(1, requires_grad=True)


def test_trained_tensors_stay_those_of_the_optimizer(tmp_path: Path) -> None:
    """They go on to be trained; a tensor that was replaced leaves the first one as it is."""
    expected = fit(FakeSession(), Trained, [])
    model = by_way_of_disk(tmp_path, Trained, list, 7, 4)
    assert model.losses == expected.losses
    for one, other in zip(model.trained(), expected.trained(), strict=True):
        assert torch.equal(one, other)
        assert any(one is each for each in model.optimizers().param_groups[0]["params"])
    assert torch.equal(model.net.bias, expected.net.bias)
    assert model.bias_of_net.data_ptr() == model.net.bias.data_ptr()


class Mining(Net):
    """Draws samples by weights that it changes, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.ones(BATCHES * 4, dtype=torch.double)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        self.weights[batch[1]] += loss.item()
        return loss


class Reweighting(Mining):
    """Gives the sampler others, made of those that it keeps."""

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = Net.training_step(self, batch, index)
        sampler: Any = self.trainer.train_dataloader.sampler
        sampler.weights = self.weights * (1 + loss.item() * torch.arange(len(self.weights)))
        return loss


class Mined(Data):
    def train_dataloader(self) -> Any:
        x = torch.randn(BATCHES * 4, 3, generator=torch.Generator().manual_seed(1))
        module: Any = self.trainer.lightning_module
        drawn = WeightedRandomSampler(module.weights, len(x))
        return DataLoader(TensorDataset(x, torch.arange(len(x))), batch_size=4, sampler=drawn)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


@pytest.mark.parametrize("net", [Mining, Reweighting])
def test_weights_that_module_and_sampler_share(net: type[Mining], tmp_path: Path) -> None:
    """They stay one tensor if they were, and two once the sampler had another one."""
    expected = fit(FakeSession(), net, [], data=Mined)
    model = by_way_of_disk(tmp_path, net, list, 7, 4, data=Mined)
    assert model.losses == expected.losses
    assert torch.equal(model.weights, expected.weights)
    sampler = model.trainer.train_dataloader.sampler
    assert (sampler.weights is model.weights) == (net is Mining)


class Best(Metric):
    """A metric of a user's, with something of its own beside its states."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("last", torch.zeros(()), dist_reduce_fx="sum")
        self.best = 9.0

    def update(self, value: torch.Tensor) -> None:
        self.last = value

    def compute(self) -> float:
        self.best = min(self.best, self.last.item())
        return self.best


class Scores(nn.Module):
    """Metrics that keep more than their states."""

    def __init__(self) -> None:
        super().__init__()
        self.best = Best()
        self.running = RunningMean(window=3)
        self.tracker = MetricTracker(MeanMetric(), maximize=False)

    def forward(self, loss: torch.Tensor, *, begins: bool) -> float:
        if begins:
            self.tracker.increment()
        for each in (self.best, self.running, self.tracker):
            each.update(loss.detach())
        tracked = self.tracker.compute_all()
        return float(self.best.compute() + self.running.compute() + tracked.sum())


class Scored(Net):
    """Its losses depend on what its metrics say."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = Scores()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        self.bias = 0.1 * self.scores(loss, begins=index == 0)
        return loss


def test_what_metrics_keep_beside_their_states(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also what libraries' metrics do, and the metrics that a tracker has added."""
    expected = fit(FakeSession(), Scored, [])
    model = by_way_of_disk(tmp_path, Scored, list, BATCHES + 2, 4)
    assert model.losses == expected.losses
    assert said(caplog) == []


class Metered(pl.Callback):
    """Metrics of its own, on which training depends."""

    def __init__(self) -> None:
        self.mean, self.best = MeanMetric(), Best()
        self.tracker = MetricTracker(MeanMetric(), maximize=False)
        self.all = MetricCollection({"mean": MeanMetric(), "most": MaxMetric(), "sum": SumMetric()})
        self.options = SimpleNamespace(scale=1.0)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        loss = outputs["loss"].detach()
        if trainer.is_last_batch:
            self.tracker.increment()
        elif self.tracker.n_steps:
            self.tracker.update(loss)
        for each in (self.mean, self.best, self.all):
            each.update(loss)
        self.options.scale *= 0.99
        seen = [self.mean.compute(), self.best.compute(), *self.all.compute().values()]
        pl_module.bias = 0.1 * self.options.scale * (float(sum(seen)) + self.tracker.n_steps)


class Listed(Net):
    """Metrics that are no parts of it."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = {"mean": MeanMetric(), "all": MetricCollection([Best(), SumMetric()])}

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        for each in self.metrics.values():
            each.update(loss.detach())
        self.bias = 0.01 * float(self.metrics["mean"].compute())
        self.bias += 0.01 * float(sum(self.metrics["all"].compute().values()))
        return loss


@pytest.mark.parametrize("after", [(7,), (3, 4, 5)])
@pytest.mark.parametrize(("net", "kinds"), [(Net, [Metered]), (Listed, [])])
def test_metrics_that_are_no_parts_of_a_module(
    net: type[Net],
    kinds: list[type[Metered]],
    after: tuple[int, ...],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Those of a callback, and those in a module's dictionary, come back with all they keep."""

    def callbacks() -> list[Any]:
        return [kind() for kind in kinds]

    expected = fit(FakeSession(), net, callbacks())
    assert by_way_of_disk(tmp_path, net, callbacks, *after).losses == expected.losses
    assert said(caplog) == []


_mixing = random.Random(21)


class Mixes(Net):
    """Draws from a generator of this module."""

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return super().training_step([batch[0] * mixing()], index)


def mixing() -> float:
    return _mixing.random()


def test_a_generator_of_a_modules_code(tmp_path: Path) -> None:
    """It goes on, although no data set draws from it."""

    def make() -> Mixes:
        _mixing.seed(21)  # as in a new process
        return Mixes()

    expected = fit(FakeSession(), make, [])
    assert by_way_of_disk(tmp_path, make, list, 7, 4).losses == expected.losses


# -- loops of one's own ------------------------------------------------------------------------


class Counted(nn.Module):
    """A module with something of its own beside its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LSTM(3, 4)
        self.calls = 0
        self.recent: deque[float] = deque(maxlen=2)

    def forward(self, x: torch.Tensor, hidden: Any) -> Any:
        self.calls += 1
        out, hidden = self.net(x, hidden)
        self.recent.append(out.mean().item())
        return out * (1 + 0.01 * self.calls + 0.1 * sum(self.recent)), hidden


def apart(objective: Callable[..., Any], *args: Any) -> None:
    """Call it where nobody has variables but itself, as in a worker."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(objective, *args).result()


LOSSES: dict[tuple[int, int], float] = {}


def loop(session: FakeSession, carries: str) -> None:
    """A word model, as users write it; ``carries`` says what of it is in ``run.kept``."""
    torch.manual_seed(1)
    model = Counted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(BATCHES * 2, 2, 3, generator=torch.Generator().manual_seed(2))
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    run = PyTorchLoop(
        optuna.create_study().ask(), {"model": model, "optimizer": optimizer}, session
    )
    hidden = None
    for epoch in run.epochs(EPOCHS):
        scale = 1.0 + epoch
        order = torch.randperm(len(x))
        for chosen in run.batches(list(order.split(2))):
            before = run.kept.get("hidden") if carries == "kept" else hidden
            out, after = model(x[chosen], before)
            after = tuple(each.detach() for each in after)
            if carries == "kept":
                run.kept["hidden"] = list(after)
            elif carries == "local":
                hidden = after
            loss = (scale * out - x[chosen].sum()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            LOSSES[epoch, run.batch] = loss.item()
            session.tick()
        run.report(loss.item())


@pytest.mark.parametrize("carries", ["nothing", "kept"])
def test_a_loop_that_keeps_all_is_exact_and_quiet(
    carries: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Counts of a named module come back; values that each epoch or batch sets anew are no loss."""
    LOSSES.clear()
    apart(loop, FakeSession(), carries)
    expected = dict(LOSSES)
    LOSSES.clear()
    session = FakeSession(checkpoint_dir=tmp_path / "study" / "trial")
    for after in (8, 4):
        session = session.again({after: "disk"})
        with pytest.raises(Suspended):
            apart(loop, session, carries)
    apart(loop, session.again(), carries)
    assert expected == LOSSES
    assert said(caplog) == []


def phased(session: FakeSession) -> list[float]:
    """A loop that changes its model before the batches of some epochs, and within the first."""
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1))
    model.scale, model.first = 1.0, True
    model.register_buffer("old", torch.ones(1), persistent=False)
    run = PyTorchLoop(optuna.create_study().ask(), {"model": model}, session)
    losses: list[float] = run.kept.setdefault("losses", [])
    for epoch in run.epochs(EPOCHS):
        if epoch in (0, 2):
            model[0].p = 0.2 + 0.1 * epoch
            model.scale *= 0.5
        for x in run.batches([0.5, 1.0, 1.5]):
            if not hasattr(model, "bank"):
                model.register_buffer("bank", torch.zeros(1), persistent=False)
            model.bank = 0.5 * model.bank + x
            scale = model.scale * (1 + hasattr(model, "first") + 2 * hasattr(model, "old"))
            losses.append((model(torch.full((2, 3), x)) * scale - model.bank).mean().item())
            if len(losses) == 4:
                del model.first, model.old
            session.tick()
        run.report(losses[-1])
    return losses


@pytest.mark.parametrize("after", [(2, 3), (5, 3)])
def test_what_a_loop_changes_before_batches_or_deletes(
    after: tuple[int, ...], tmp_path: Path
) -> None:
    """The next process does not run the code before the first epoch's batches."""
    expected = phased(FakeSession())
    session = FakeSession(checkpoint_dir=tmp_path / "study" / "trial")
    for batches in after:
        session = session.again({batches: "disk"})
        with pytest.raises(Suspended):
            phased(session)
    assert phased(session.again()) == expected


def mining(session: FakeSession) -> list[Any]:
    """A loop that draws samples by weights that it keeps and changes."""
    x = torch.arange(BATCHES * 4.0)
    torch.manual_seed(1 + len(session.checkpoints))
    run = PyTorchLoop(optuna.create_study().ask(), {}, session)
    weights = run.kept.setdefault("weights", torch.ones(len(x), dtype=torch.double))
    seen = run.kept.setdefault("seen", [])
    loader = DataLoader(x, batch_size=4, sampler=WeightedRandomSampler(weights, len(x)))
    for _ in run.epochs(EPOCHS):
        for batch in run.batches(loader):
            seen.append(batch.tolist())
            weights[batch.long()] *= 0.5
            session.tick()
        run.report(0.0)
    assert loader.sampler.weights is weights
    return seen


def test_a_loop_shares_weights_with_its_sampler(tmp_path: Path) -> None:
    """The sampler draws by those of ``run.kept``, which the loop changes."""
    expected = mining(FakeSession())
    session = FakeSession(checkpoint_dir=tmp_path / "study" / "trial")
    for after in (8, 5):
        session = session.again({after: "disk"})
        with pytest.raises(Suspended):
            mining(session)
    assert mining(session.again()) == expected


class Weighted(nn.Module):
    """A layer with trained tensors that are no parameters of it, and with metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.by_hand = torch.ones(3, requires_grad=True)
        self.scores = Scores()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x * self.by_hand) * self.log_alpha.exp()


def weighted(session: FakeSession) -> tuple[list[float], list[torch.Tensor]]:
    """A loop that trains these, and a parameter of its own, over two batches each."""
    torch.manual_seed(1)
    model, scale = Weighted(), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([*model.parameters(), model.log_alpha, scale], lr=0.05)
    identities = id(model.log_alpha), id(model.by_hand)
    x = torch.randn(BATCHES, 4, 3, generator=torch.Generator().manual_seed(2))
    run = PyTorchLoop(
        optuna.create_study().ask(), {"model": model, "optimizer": optimizer}, session
    )
    losses = run.kept.setdefault("losses", [])
    shift = run.kept.setdefault("shift", torch.zeros(1, requires_grad=True))
    for _ in run.epochs(EPOCHS):
        for batch in run.batches(list(x)):
            bias = run.kept.get("bias", 1.0)
            loss = (model(batch) * scale - shift - bias).square().mean()
            loss.backward()
            run.kept["bias"] = 0.1 * model.scores(loss, begins=run.batch == 0)
            losses.append(loss.item())
            if run.batch % 2:
                optimizer.step()
                optimizer.zero_grad()
            for each in (model.by_hand, shift):
                with torch.no_grad():
                    each.sub_(each.grad, alpha=0.01)
                each.grad = None
            session.tick()
        run.report(loss.item())
    assert (id(model.log_alpha), id(model.by_hand)) == identities
    return losses, [model.log_alpha, model.by_hand, scale, shift, *model.parameters()]


def test_a_loop_trains_tensors_of_no_module(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of an optimizer come back with it, others where they are kept; metrics do, too."""
    losses, tensors = weighted(FakeSession())
    session = FakeSession(checkpoint_dir=tmp_path / "study" / "trial")
    for after in (8, 5):
        session = session.again({after: "disk"})
        with pytest.raises(Suspended):
            weighted(session)
    again, restored = weighted(session.again())
    assert again == losses
    assert all(map(torch.equal, restored, tensors))
    assert said(caplog) == []


class Gradual(torch.optim.lr_scheduler.LRScheduler):
    """A schedule that leaves the rates to another one, which its ``state_dict`` holds itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.after = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]
        super().__init__(optimizer)

    def step(self, epoch: Any = None) -> None:
        self.last_epoch += 1
        if self.last_epoch > 1:
            self.after[0].step()


def test_a_schedule_within_the_state_of_another_comes_back(tmp_path: Path) -> None:
    """At the begin of an epoch, too, where the loop may read the rates."""

    def train(session: FakeSession) -> list[float]:
        model = nn.Linear(1, 1).requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = Gradual(optimizer)
        named = {"model": model, "optimizer": optimizer, "schedule": schedule}
        run = PyTorchLoop(optuna.create_study().ask(), named, session)
        rates: list[float] = run.kept.setdefault("rates", [])
        for _ in run.epochs(EPOCHS):
            schedule.step()
            rates.append(schedule.after[0].last_epoch)
            for _ in run.batches(range(BATCHES)):
                optimizer.step()
                schedule.step()
                rates.append(optimizer.param_groups[0]["lr"])
                session.tick()
            run.report(rates[-1])
        return rates

    assert loops.by_way_of_disk(train, tmp_path, 1, 6, 4) == train(FakeSession())


class Head(nn.Module):
    """Counts its calls, and remembers the last in a buffer that no ``state_dict`` has."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.drop = nn.Linear(3, 1), nn.Dropout(0.5)
        self.calls = 0
        self.register_buffer("last", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = self.net(self.drop(x)) + 0.1 * self.calls + self.last
        self.last = 0.1 * out.detach()
        return out


class MeteredHead(Head):
    """Adds the mean of its values to each."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.mean.update(out.detach())
        return out + self.mean.compute()


class Heads(nn.Module):
    """Its heads, and what trains them, are in lists."""

    def __init__(self, kind: type[Head]) -> None:
        super().__init__()
        self.heads = [kind().requires_grad_(False), kind()]
        self.steps = [torch.optim.Adagrad(each.parameters(), lr=0.1) for each in self.heads]


def headed(session: FakeSession, kind: type[Head]) -> tuple[list[float], Heads]:
    """A loop that trains these on every third batch, and changes what is trained, and how."""
    torch.manual_seed(1)
    model = Heads(kind)
    run = PyTorchLoop(optuna.create_study().ask(), {"model": model}, session)
    losses = run.kept.setdefault("losses", [])
    groups = [each.param_groups[0] for each in model.steps]
    for _ in run.epochs(EPOCHS):
        for x in run.batches([0.5, 1.0, 1.5, 2.0, 2.5]):
            count = len(losses)
            if count in (3, 7):
                model.heads[0].requires_grad_(count == 3)
                model.heads[0].drop.p = 0.1 * count
                model.heads[1].eval()
            loss = torch.cat([each(torch.full((3,), x)) for each in model.heads]).square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            if count % 3 == 2:
                for each, group in zip(model.steps, groups, strict=True):
                    group["lr"] *= 0.9
                    each.step()
                    each.zero_grad()
            losses.append(loss.item())
            session.tick()
        run.report(losses[-1])
    return losses, model


@pytest.mark.parametrize("kind", [Head, MeteredHead])
@pytest.mark.parametrize("after", [(8,), (4, 1, 6)])
def test_modules_and_optimizers_in_lists_come_back_with_all_that_is_theirs(
    kind: type[Head], after: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As named ones do: gradients, what is frozen, modes, settings, counts, and all buffers."""
    expected, whole = headed(FakeSession(), kind)
    session = FakeSession(checkpoint_dir=tmp_path / "study" / "trial")
    for batches in after:
        session = session.again({batches: "disk"})
        with pytest.raises(Suspended):
            headed(session, kind)
    losses, model = headed(session.again(), kind)
    assert losses == expected
    for one, other in zip(model.heads, whole.heads, strict=True):
        assert (one.drop.p, one.training, one.calls) == (other.drop.p, other.training, other.calls)
        assert one.net.weight.requires_grad == other.net.weight.requires_grad
    assert said(caplog) == []


class SelfTrained(nn.Module):
    """A layer that trains itself, and remembers things in attributes, also of its tensors."""

    def __init__(self, *before: nn.Module) -> None:
        super().__init__()
        self.net: Any = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(1))
        self.scale.uses = 0
        self.optimizer = torch.optim.Adagrad(self.parameters(), lr=0.1)
        self.before = before  # in a tuple, so that they are no parts
        self.chosen = [self.net.bias]
        self.trace, self.seen = torch.zeros(3), {"calls": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.before:
            x = each(x)
        self.seen["calls"] += 1
        if self.seen["calls"] == 3:
            self.chosen = [self.net.weight]
        self.scale.uses += 1
        old = getattr(self.net.weight, "old", torch.zeros(3))  # no copy of a parameter has it
        self.net.weight.old = 0.5 * old + self.scale.uses * self.trace
        target = self.chosen[0].sum() + 0.01 * self.net.weight.old
        loss = (self.net(x) + self.trace - target).square().sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.trace = 0.9 * self.trace + 0.1 * self.net(x).detach()
        return self.trace


class Layered(Net):
    """Its layers are in lists, dictionaries and objects."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [SelfTrained(SelfTrained()), SelfTrained()]
        self.others = {"last": SimpleNamespace(layer=SelfTrained(self.layers[0]))}

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        for each in (*self.layers, self.others["last"].layer):
            x = each(x)
        return x.sum() + self.layers[0].seen["calls"]

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        out = super().training_step(batch, batch_idx)
        loss = self.loss(batch[0].mean(0).detach())
        self.losses[self.global_step] += loss.item()
        return out + loss


def layered(session: FakeSession) -> list[float]:
    """A loop that trains it, layer by layer."""
    torch.manual_seed(1)
    model = Layered()
    run = PyTorchLoop(optuna.create_study().ask(), {"model": model}, session)
    losses = run.kept.setdefault("losses", [])
    for _ in run.epochs(EPOCHS):
        for x in run.batches([0.5, 1.0, 1.5, 2.0, 2.5]):
            losses.append(model.loss(torch.full((3,), x)).item())
            session.tick()
        run.report(losses[-1])
    return losses


@pytest.mark.parametrize("after", [(8,), (1, 4, 6)])
def test_attributes_of_modules_in_lists_come_back(
    after: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their optimizers, tensors with attributes, containers, and references to such modules."""
    expected = layered(FakeSession())
    assert loops.by_way_of_disk(layered, tmp_path / "loop", *after) == expected
    whole = fit(FakeSession(), Layered, [])
    model = by_way_of_disk(tmp_path / "fit", Layered, list, *after)
    assert model.losses == whole.losses
    assert said(caplog) == []


class Population(nn.Module):
    """Layers that train themselves in several lists, which share them."""

    def __init__(self) -> None:
        super().__init__()
        self.order = [SelfTrained() for _ in range(3)]
        self.all = [*self.order]
        self.elite = self.all[:2]


def selected(session: FakeSession, change: Callable[[Any], None]) -> list[float]:
    """A loop that changes which layers are in which list in its second epoch."""
    torch.manual_seed(1)
    model = Population()
    run = PyTorchLoop(optuna.create_study().ask(), {"model": model}, session)
    losses = run.kept.setdefault("losses", [])
    for epoch in run.epochs(EPOCHS):
        for x in run.batches([0.5, 1.0, 1.5, 2.0, 2.5]):
            if (epoch, x) == (1, 1.0):
                change(model)
            sums = [each(torch.full((3,), n * x)).sum() for n, each in enumerate(model.all)]
            sums += [each.trace.sum() * n for n, each in enumerate((*model.order, *model.elite))]
            sums += [each(torch.full((3,), 0.1 * x)).sum() for each in model.elite]
            losses.append(sum(sums).item())  # type: ignore[union-attr]
            session.tick()
        run.report(losses[-1])
    return losses


def elect(model: Any) -> None:
    model.elite = [model.all[2], model.all[0]]


def shuffle(model: Any) -> None:
    model.order.sort(key=lambda each: each is not model.all[1])


def shorten(model: Any) -> None:
    del model.order[0]


def renew(model: Any) -> None:
    layers = copy.deepcopy(model.all[1:])
    model.order, model.all = layers, [*layers]
    model.elite.clear()


@pytest.mark.parametrize("change", [elect, shuffle, shorten, renew])
@pytest.mark.parametrize("after", [(8,), (1, 8, 6)])
def test_modules_that_lists_share_come_back_as_one(
    after: tuple[int, ...],
    change: Callable[[Any], None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A list that holds other ones by then fills none of those that another list holds."""
    train = functools.partial(selected, change=change)
    assert loops.by_way_of_disk(train, tmp_path / "loop", *after) == train(FakeSession())
    assert said(caplog) == []


def test_a_module_whose_place_another_has_keeps_a_trial_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next process has one in both places, which cannot be both of them."""

    def change(model: Any) -> None:
        model.order[0] = copy.deepcopy(model.order[1])
        model.elite.clear()

    session = FakeSession({8: "disk"}, checkpoint_dir=tmp_path / "s" / "t")
    assert selected(session, change) == selected(FakeSession(), change)
    assert session.parks == ["resident"]
    assert "put into model.all.0, model.order.0 what no checkpoint can hold" in caplog.text


class Forgetful(nn.Module):
    """Two layers in a list; the training moves an iterator in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(1, 1), SelfTrained()]
        self.layers[1].noise = iter(range(100))  # type: ignore[assignment]


def test_lost_attributes_of_modules_in_lists_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As those of other modules are."""

    def train(session: FakeSession) -> None:
        model: Any = Forgetful()
        run = PyTorchLoop(optuna.create_study().ask(), {"model": model}, session)
        for _ in run.epochs(EPOCHS):
            for _ in run.batches(range(BATCHES)):
                next(model.layers[1].noise)
                session.tick()
            run.report(0.0)

    loops.by_way_of_disk(train, tmp_path / "loop", 4)
    assert "model.layers.1.noise" in said(caplog)[0]


def added(session: FakeSession) -> list[float]:
    """A loop that keeps what it needs in objects of torch's own classes."""
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Conv1d(2, 2, 1), nn.Linear(4, 1))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    model.losses, model.best, model[1].queue, optimizer.rates = [], None, torch.zeros(1), {}
    run = PyTorchLoop(
        optuna.create_study().ask(), {"model": model, "optimizer": optimizer}, session
    )
    losses = run.kept.setdefault("losses", [])
    for epoch in run.epochs(EPOCHS):
        for x in run.batches([0.5, 1.0, 1.5, 2.0, 2.5]):
            out = model(torch.full((2, 3), x))
            loss = (out - 0.1 * sum(model.losses[-3:]) - model[1].queue.mean()).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model.losses.append(loss.item())
            model[1].queue = torch.cat([model[1].queue, out.detach().flatten()])[-5:]
            if loss.item() <= min(model.losses):
                model.best = {n: each.clone() for n, each in model.state_dict().items()}
            optimizer.rates[len(losses)] = optimizer.param_groups[0]["lr"]
            optimizer.param_groups[0]["lr"] = 0.1 / len(optimizer.rates)
            losses.append(loss.item())
            session.tick()
        if epoch == 2:
            model.load_state_dict(model.best)
        run.report(losses[-1])
    return losses


@pytest.mark.parametrize("after", [(8,), (3, 2, 9)])
def test_what_users_add_to_objects_of_torch_s_own_classes_comes_back(
    after: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Lists, dictionaries and tensors in attributes of layers and of the optimizer."""
    expected = added(FakeSession())
    session = FakeSession(checkpoint_dir=tmp_path / "study" / "trial")
    for batches in after:
        session = session.again({batches: "disk"})
        with pytest.raises(Suspended):
            added(session)
    assert added(session.again()) == expected
    assert said(caplog) == []


class Pulled(torch.optim.Optimizer):
    """Lookahead as in many projects: it stores slow weights by the addresses of the fast ones."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base
        self.param_groups = base.param_groups

    def step(self, closure: Any = None) -> Any:
        self.base.step(closure)
        with torch.no_grad():
            for each in self.param_groups[0]["params"]:
                slow = self.state[each].setdefault("slow", each.clone())
                each.copy_(slow.lerp_(each, 0.5))
                self.state[each]["moved"] = [*self.state[each].get("moved", []), slow.sum().item()]

    def state_dict(self) -> dict[str, Any]:
        slow = {id(key) if type(key) is not int else key: each for key, each in self.state.items()}
        return {"slow": slow, **self.base.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        slow = {"state": state["slow"], "param_groups": state["param_groups"]}
        super().load_state_dict(slow)
        self.param_groups = self.base.param_groups


class PulledAtHome(Pulled):
    """It comes back where its parameters have the addresses that they had before, as forks do."""

    def load_state_dict(self, state: Any) -> None:
        addresses = map(id, self.param_groups[0]["params"])
        slow = dict(zip(addresses, state["slow"].values(), strict=False))
        super().load_state_dict({**state, "slow": slow})


def pulled(session: FakeSession, made: list[Pulled], kind: type[Pulled]) -> list[float]:
    """A loop whose weights are pulled back; the optimizers of all processes are ``made``."""
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    optimizer = kind(torch.optim.Adam(model.parameters(), lr=0.05))
    made.append(optimizer)
    run = PyTorchLoop(
        optuna.create_study().ask(), {"model": model, "optimizer": optimizer}, session
    )
    losses = run.kept.setdefault("losses", [])
    for _ in run.epochs(EPOCHS):
        for x in run.batches([0.5, 1.0, 1.5, 2.0, 2.5]):
            loops.descend(
                (model(torch.full((3,), x)) - x).square().sum(), optimizer, losses, session
            )
        run.report(losses[-1])
    return losses


@pytest.mark.parametrize("kind", [Pulled, PulledAtHome])
@pytest.mark.parametrize("after", [(8,), (3, 2, 9)])
def test_what_an_optimizer_s_own_state_dict_names_by_addresses_comes_back(
    after: tuple[int, ...], kind: type[Pulled], tmp_path: Path
) -> None:
    """It comes back by the order of parameters, and what is loaded for none does not pile up."""
    made: list[Pulled] = []  # kept alive: no address is used again
    expected = pulled(FakeSession(), made, kind)
    train = functools.partial(pulled, made=made, kind=kind)
    assert loops.by_way_of_disk(train, tmp_path, *after) == expected
    assert [len(each["moved"]) for each in made[-1].state.values()] == [EPOCHS * BATCHES] * 2


class Scaled(nn.Module):
    """A layer of the user's with a weight, and with values and a generator beside it."""

    drawn = random.Random(3)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 3))
        self._calls = 0
        self.recent: deque[float] = deque(maxlen=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        out = nn.functional.linear(x, self.weight) + 0.01 * self._calls + sum(self.recent)
        self.recent.append(0.1 * out.mean().item())
        return out * Scaled.drawn.random()


def parametrized(session: FakeSession) -> list[float]:
    """A loop over such a layer, which torch gives a class of its own."""
    torch.manual_seed(1)
    Scaled.drawn.seed(3)  # as in a new process
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(Scaled()))
    run = PyTorchLoop(optuna.create_study().ask(), {"model": model}, session)
    losses = run.kept.setdefault("losses", [])
    for _ in run.epochs(EPOCHS):
        for x in run.batches([0.5, 1.0, 1.5]):
            losses.append(model(torch.full((2, 3), x)).sum().item())
            session.tick()
        run.report(losses[-1])
    return losses


class Parametrized(Net):
    """Has such a layer in Lightning."""

    def __init__(self) -> None:
        super().__init__()
        Scaled.drawn.seed(3)
        self.scaled = nn.utils.parametrizations.spectral_norm(Scaled())

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return super().training_step(batch, index) * self.scaled(torch.ones(2, 3)).mean()


def test_what_users_layers_keep_comes_back_if_torch_has_parametrized_them(tmp_path: Path) -> None:
    """Also under private names, and with the generators of their classes."""
    layer = nn.utils.parametrizations.weight_norm(Scaled())
    assert [each.owner for each in classes_of([layer, nn.Linear(1, 1)])] == [Scaled, nn.Linear]
    expected = parametrized(FakeSession())
    assert loops.by_way_of_disk(parametrized, tmp_path / "loop", 4, 3) == expected
    losses = fit(FakeSession(), Parametrized, []).losses
    assert by_way_of_disk(tmp_path / "fit", Parametrized, list, 7, 4).losses == losses


def test_a_hidden_state_in_a_local_variable_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is carried from batch to batch, and nobody can bring it back: that is said, and how."""
    with pytest.raises(Suspended):
        apart(loop, FakeSession({8: "disk"}, checkpoint_dir=tmp_path / "s" / "t"), "local")
    (line,) = said(caplog)
    assert line.startswith("Trial 0 changes hidden (a variable of the loop) while it trains")
    assert "Keep it in run.kept" in line


class Criterion(Net):
    """Has another loss function from its second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.functional.mse_loss

    def on_train_epoch_end(self) -> None:
        self.criterion = nn.functional.l1_loss


def test_a_function_that_a_module_has_in_place_of_another_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next process has the first one again."""
    for after in (3, 7):
        assert said(caplog) == []
        session = FakeSession({after: "disk"}, checkpoint_dir=tmp_path / str(after) / "trial")
        with pytest.raises(Suspended):
            fit(session, Criterion, [])
    (line,) = said(caplog)
    assert "changes Criterion.criterion while it trains" in line


class Caches(Net):
    """Makes functions again when it needs them, as Lightning's DDP does with ``forward``."""

    @functools.cached_property
    def criterion(self) -> Callable[..., torch.Tensor]:
        return functools.partial(nn.functional.smooth_l1_loss, beta=0.5)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        self.forward = self.forward  # type: ignore[method-assign]
        loss = super().training_step(batch, index)
        return loss + self.criterion(loss, torch.zeros(()))


def test_functions_that_each_process_makes_are_not_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is lost with a cached one, nor with a method that is put over itself."""
    expected = fit(FakeSession(), Caches, [])
    assert by_way_of_disk(tmp_path, Caches, list, 3, 6).losses == expected.losses
    assert said(caplog) == []


def test_variables_that_become_none_or_another_function_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where named objects have the same None and the same empty tuple."""
    model, session = nn.Linear(1, 1), FakeSession({7: "disk"}, checkpoint_dir=tmp_path / "s" / "t")
    run = PyTorchLoop(optuna.create_study().ask(), {"model": model}, session)
    run.kept["shape"] = ()

    def objective() -> None:
        mixup: Any = Seen(0.2, {})
        steps: Any = (1, 2)
        criterion: Any = nn.functional.mse_loss
        unchanged: Any = None
        noise = functools.partial(torch.randn, 8, generator=torch.Generator())
        for epoch in run.epochs(3):
            if epoch == 1:
                mixup, steps, criterion = None, (), nn.functional.l1_loss
            for _ in run.batches([1.0, 2.0, 3.0]):
                assert [mixup, steps, criterion, unchanged, noise()]
                session.tick()
            run.report(0.0)

    with pytest.raises(Suspended):
        apart(objective)
    (line,) = said(caplog)
    assert re.findall(r"(\w+) \(a variable of the loop\)", line) == ["mixup", "steps"]
    assert "changes criterion (a variable of the loop, which run.kept cannot hold), mixup (" in line


class Calls:
    """Counts those of its method."""

    def __init__(self) -> None:
        self.count = 0

    def again(self) -> int:
        self.count += 1
        return self.count


def test_variables_that_refer_to_another_object_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Among those that are named or hold data; not those that each epoch sets anew."""
    model, session = Grows(), FakeSession({7: "disk"}, checkpoint_dir=tmp_path / "s" / "t")
    adam, sgd = torch.optim.Adam(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
    run = PyTorchLoop(
        optuna.create_study().ask(), {"model": model, "adam": adam, "sgd": sgd}, session
    )
    run.kept["best"] = {"weight": torch.zeros(1)}

    def objective() -> None:
        optimizer: Any = adam
        heads, first = {"now": model.layers[0]}, model.layers[0]
        loader = DataLoader([1.0, 2.0, 3.0], batch_size=1)  # type: ignore[arg-type]
        best, tick, draw, _count = run.kept["best"], Calls().again, random.random, 0
        for epoch in run.epochs(3):
            every = DataLoader([epoch])  # type: ignore[arg-type]
            layer = model.layers[epoch % 2]
            if epoch == 1:
                optimizer, heads["now"] = sgd, model.layers[1]
                loader = DataLoader([4.0, 5.0, 6.0], batch_size=1)  # type: ignore[arg-type]
            for _ in run.batches(loader):
                optimizer.step()
                _count += 1
                assert [tick(), heads, first, every, layer, best, draw()]
                session.tick()
            best = run.kept["best"] = {"weight": torch.ones(1)}
            run.report(0.0)

    with pytest.raises(Suspended):
        apart(objective)
    names = re.findall(r"(\w+) \(a variable of the loop", "".join(said(caplog)))
    assert sorted(names) == ["_count", "heads", "loader", "optimizer", "tick"]
    assert "optimizer (a variable of the loop: set it in each epoch, by its number)" in caplog.text


class Bound(Net):
    """Has methods of objects in its attributes, one of an object that is nowhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.alone = Calls(), Calls().again
        self.again, self.draw = self.calls.again, random.random

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        self.draw()
        return super().training_step(batch, index) * 0.9 ** self.again() * 0.9 ** self.alone()


def test_the_hidden_object_of_a_method_in_an_attribute_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that another attribute holds does."""
    expected = fit(FakeSession(), Bound, [])
    model = by_way_of_disk(tmp_path, Bound, list, 7, 5)
    assert model.losses == expected.losses
    assert model.alone.__self__.count == expected.alone.__self__.count > 0
    assert said(caplog) == []


class Tracker:
    """Keeps the losses that it is shown, and the least."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.least = math.inf

    def update(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append(Seen(float(outputs["loss"]), {}))
        self.least = min(self.least, self.seen[-1].loss)


def annealed() -> Callable[[torch.Tensor], torch.Tensor]:
    """A loss function that counts its calls."""
    calls = 0

    def criterion(loss: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return loss * 0.99**calls

    return criterion


class Softer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.criteria = [annealed(), annealed()]

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        return self.criteria[0](loss) + (self.criteria[1](loss) if index % 2 else 0)


def closing(session: FakeSession | None, seed: int = 1) -> list[Any]:
    """An objective that collects values in its variables, and has others that stay as they are."""
    history: list[float] = []
    best, worst, label = math.inf, None, "loss"
    tracker, shared = Tracker(), [0.0]
    data = DataLoader(TensorDataset(torch.arange(6.0)))
    table, steps = torch.ones(3), itertools.count
    ends = io.StringIO()
    bar = tqdm.tqdm(disable=True)

    class Records(pl.Callback):
        def __init__(self) -> None:
            self.shared = shared

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
            loss = outputs[label].item() * table[0].item()
            history.append(loss + len(data.dataset) + next(steps(0)))
            shared.append(loss)
            bar.update()
            ends.write(f"{loss}")
            pl_module.bias = 0.01 * len(history) + 0.001 * len(shared)

    def keep(trainer: Any, pl_module: Any) -> None:
        nonlocal best, worst
        best = min(best, history[-1])
        worst = history[-1] if worst is None else max(worst, history[-1])

    others = [LambdaCallback(on_train_epoch_end=keep, on_train_batch_end=tracker.update)]
    model = fit(session, Softer, [Records(), *others], seed=seed)
    seen = [tracker.seen, tracker.least, shared, ends.getvalue()]
    return [model.losses, history, best, worst, *seen]


@pytest.mark.parametrize("after", [(7,), (3, 4, 5)])
def test_variables_that_functions_and_callbacks_of_a_fit_close_over_come_back(
    after: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The objective returns a mean over its list, say; what stays as it is is not named."""
    expected = closing(FakeSession())
    session = FakeSession(checkpoint_dir=tmp_path / "study" / "trial")
    for seed, batches in enumerate(after):
        session = session.again({batches: "disk"})
        with pytest.raises(Suspended):
            closing(session, seed + 1)
    assert closing(session.again(), 99) == expected
    assert len(expected[1]) == EPOCHS * BATCHES
    assert said(caplog) == []
    assert "in memory" not in caplog.text


def test_a_variable_that_cannot_be_stored_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The trial goes to disk as before: the iterator may be of no matter."""
    items = iter(range(99))

    class Pulls(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            next(items)

    session = FakeSession({7: "disk"}, checkpoint_dir=tmp_path / "study" / "trial")
    with pytest.raises(Suspended):
        fit(session, Net, [Pulls()])
    (line,) = said(caplog)
    assert "is_named.items while it trains" in line


def clipped(session: FakeSession) -> None:
    """A loop that keeps its parameters in a list."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = PyTorchLoop(
        optuna.create_study().ask(), {"model": model, "optimizer": optimizer}, session
    )
    parameters = list(model.parameters())
    for _ in run.epochs(3):
        for x in run.batches([1.0, 2.0, 3.0]):
            optimizer.zero_grad()
            model(torch.tensor([x])).square().sum().backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            session.tick()
        run.report(0.0)


def test_a_list_of_parameters_is_no_hidden_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are the model's, which is saved."""
    with pytest.raises(Suspended):
        apart(clipped, FakeSession({8: "disk"}, checkpoint_dir=tmp_path / "s" / "t"))
    assert said(caplog) == []


def replaying(session: FakeSession, layers: int) -> list[float]:
    """A loop with a large buffer of transitions, over a model of so many layers."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = PyTorchLoop(
        optuna.create_study().ask(), {"model": model, "optimizer": optimizer}, session
    )
    memory = run.kept.setdefault("memory", [(0, 0.5, [n]) for n in range(10_000)])
    losses, last = run.kept.setdefault("losses", []), model[-1]
    for _ in run.epochs(3):
        for x in run.batches([0.5, 1.0, 1.5]):
            memory.append((len(memory), x, [losses]))
            loss = (last(model[0](torch.tensor([x]))) - memory[-2][1]).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            session.tick()
        run.report(losses[-1])
    return losses


@pytest.mark.parametrize("layers", [2, 1500])
def test_named_objects_are_known_beside_large_buffers_and_in_deep_models(
    layers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A search for what is stored ends after so many objects, but has met these first."""
    session = FakeSession({5: "disk"}, checkpoint_dir=tmp_path / "s" / "t")
    with pytest.raises(Suspended):
        apart(replaying, session, layers)
    assert said(caplog) == []


def test_odd_objects_of_an_objective_are_no_errors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor are they named: they never change, and neither does a compiled copy of the model."""
    model, session = nn.Linear(1, 1), FakeSession({5: "disk"}, checkpoint_dir=tmp_path / "s" / "t")
    run = PyTorchLoop(optuna.create_study().ask(), {"model": model}, session)

    def objective() -> None:
        gone: Any = weakref.proxy(Seen(0.2, {}))
        held = SimpleNamespace(gone=gone)
        structs = np.array([("a", 1.0)], [("name", "O"), ("size", "f8")])
        lazy, compiled = nn.LazyLinear(3), torch.compile(model, backend="eager")
        for _ in run.epochs(3):
            for x in run.batches([1.0, 2.0, 3.0]):
                compiled(torch.tensor([x]))
                session.tick()
            run.report(float(len([held, structs, lazy, gone])))

    with pytest.raises(Suspended):
        apart(objective)
    assert said(caplog) == []


def helper(run: PyTorchLoop, model: nn.Module, seen: list[int], session: FakeSession) -> float:
    """An epoch, in a function of its own."""
    total = 0.0
    for value in run.batches([1.0, 2.0, 3.0]):
        total += value
        seen.append(1)
        session.tick()
    return total


def test_what_is_carried_through_functions_and_wrappers_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Sums, bests and lists in whichever function waits for the batch; progress bars are not."""
    model, session = nn.Linear(1, 1), FakeSession({5: "disk"}, checkpoint_dir=tmp_path / "s" / "t")
    run = PyTorchLoop(optuna.create_study().ask(), {"model": model}, session)

    def objective() -> None:
        best, seen, constant = 9.0, [0], {"a": [1]}
        started = constant["a"][0]
        for epoch in tqdm.tqdm(run.epochs(3), file=io.StringIO()):
            total = helper(run, model, seen, session)
            best = min(best, total / (epoch + started))
            run.report(best)

    with pytest.raises(Suspended):
        apart(objective)
    first, second = said(caplog)
    assert re.findall(r"(\w+) \(a variable of the loop\)", first) == ["best", "seen"]
    assert "harms a training only if it reads it. Keep it in run.kept" in first
    assert "changes total (a variable of the loop) while it trains" in second
    assert second.endswith("no checkpoint holds that, either."), "what that means is said once"


class Objective:
    """An objective with attributes: some are named or settings, others change."""

    def __init__(self) -> None:
        self.model, self.settings, self.best = nn.Linear(1, 1), {"lr": 0.1}, 9.0
        self.history: list[int] = []

    def __call__(self, session: FakeSession) -> None:
        self.step = 0
        run = PyTorchLoop(optuna.create_study().ask(), {"model": self.model}, session)
        for epoch in run.epochs(3):
            self.train(run.batches([1.0, 2.0, 3.0]), session)
            self.history.append(epoch)
            if epoch == 1:
                self.best = 1.0
            run.report(self.best)

    def train(self, batches: Iterable[float], session: FakeSession) -> None:
        for x in batches:
            self.step += 1
            with torch.no_grad():
                self.model(torch.tensor([x * self.step * self.settings["lr"]]))
            session.tick()


def test_attributes_of_the_objective_that_change_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each once, as the code has them, and with advice on what they are alone."""
    session = FakeSession({8: "disk"}, checkpoint_dir=tmp_path / "s" / "t")
    with pytest.raises(Suspended):
        apart(Objective(), session)
    lines = said(caplog)
    changes = [line.partition(" while ")[0] for line in lines]
    assert changes == ["Trial 0 changes self.history, self.step", "Trial 0 changes self.best"]
    assert not any("by its number" in line for line in lines)


ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"


class Remote:
    """An environment in a process of its own, by a pipe of Python's or of the system's."""

    def __init__(self, *, by_pipe: bool) -> None:
        self.end, other = multiprocessing.Pipe() if by_pipe else (None, None)
        pipe = None if by_pipe else subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-c", ECHO], stdin=pipe, stdout=subprocess.DEVNULL
        )
        self.other = other

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.parametrize("by_pipe", [False, True])
def test_environments_in_processes_of_their_own_are_named(
    by_pipe: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of them changes here; one that has ended, or that nobody writes to, is none."""
    session = FakeSession({3: "disk"}, checkpoint_dir=tmp_path / "s" / "t")

    def objective(env: Remote, ended: Remote, logs: subprocess.Popen[bytes]) -> None:
        run = PyTorchLoop(optuna.create_study().ask(), {}, session)
        for _ in run.epochs(3):
            for _ in run.batches([1.0, 2.0]):
                assert [env, ended, logs]
                session.tick()
            run.report(0.0)

    with Remote(by_pipe=by_pipe) as env:
        with Remote(by_pipe=False) as ended:
            pass
        logs = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.DEVNULL)
        with pytest.raises(Suspended):
            apart(objective, env, ended, logs)
        logs.wait()
    (line,) = said(caplog)
    assert re.findall(r"(\w+) \(a variable of the loop", line) == ["env"]


def metered(session: FakeSession) -> None:
    """A loop with a metric that is not named, and settings that it changes."""
    run = PyTorchLoop(optuna.create_study().ask(), {"model": nn.Linear(1, 1)}, session)
    mean, args = MeanMetric(), argparse.Namespace(tau=1.0)
    for _ in run.epochs(3):
        for x in run.batches([1.0, 2.0, 3.0]):
            mean.update(x * args.tau)
            args.tau *= 0.9
            session.tick()
        run.report(float(mean.compute()))


def test_a_metric_of_a_loop_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is no less lost than other variables, and so is a namespace of arguments."""
    with pytest.raises(Suspended):
        apart(metered, FakeSession({5: "disk"}, checkpoint_dir=tmp_path / "s" / "t"))
    (line,) = said(caplog)
    assert "mean (a variable" in line
    assert "args (a variable" in line


def with_accelerate(*parts: Any) -> tuple[Any, ...]:
    prepared: tuple[Any, ...] = Accelerator(cpu=True).prepare(*parts)
    return prepared


def with_scaler(model: nn.Module, optimizer: Any, *others: Any) -> tuple[Any, ...]:
    """As with_accelerate, but for fp16, which it refuses without a GPU."""
    model, optimizer, *rest = with_accelerate(model, optimizer, *others)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    return model, AcceleratedOptimizer(optimizer.optimizer, scaler=scaler), *rest


def with_fabric(model: nn.Module, optimizer: Any, schedule: Any, loader: Any) -> tuple[Any, ...]:
    fabric = Fabric(accelerator="cpu", devices=1)
    return *fabric.setup(model, optimizer), schedule, fabric.setup_dataloaders(loader)


@pytest.mark.parametrize("prepare", [with_accelerate, with_scaler, with_fabric])
@pytest.mark.parametrize("names", [(), ("model", "optimizer"), ("model", "optimizer", "schedule")])
@pytest.mark.parametrize("inner", [False, True])
def test_a_warning_names_wrapped_optimizers_that_nobody_names(
    prepare: Callable[..., tuple[Any, ...]],
    names: tuple[str, ...],
    inner: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Schedulers, too; but none around an object that is named."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(torch.arange(3.0).reshape(3, 1))
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    model, optimizer, schedule, loader = prepare(*parts.values(), loader)
    if not inner:
        parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    session = FakeSession({5: "disk"}, checkpoint_dir=tmp_path / "s" / "t")
    named = {name: parts[name] for name in names}
    run = PyTorchLoop(optuna.create_study().ask(), named, session)

    def objective() -> None:
        for _ in run.epochs(3):
            model.train()
            for x in run.batches(loader):
                optimizer.zero_grad()
                loss, scaler = model(x).sum(), getattr(optimizer, "scaler", None)
                (loss if scaler is None else scaler.scale(loss)).backward()
                optimizer.step()
                session.tick()
            model.eval()
            schedule.step()
            run.report(0.0)

    with pytest.raises(Suspended):
        apart(objective)
    found = re.findall(r"(\w+) \(a variable of the loop", " ".join(said(caplog)))
    assert sorted(found) == sorted(parts.keys() - set(names))


STEP = 0


def test_what_calls_change_in_variables_around_them_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of nonlocal and of global; one that each epoch sets anew is carried nowhere."""
    model, session = nn.Linear(1, 1), FakeSession({5: "disk"}, checkpoint_dir=tmp_path / "s" / "t")
    run = PyTorchLoop(optuna.create_study().ask(), {"model": model}, session)

    def objective() -> None:
        global STEP
        count = anew = 0

        def tick() -> None:
            nonlocal count, anew
            count += 1
            anew += 1

        for _ in run.epochs(3):
            anew = 0
            for _ in run.batches([1.0, 2.0, 3.0]):
                tick()
                STEP += 1
                session.tick()
            run.report(float(count + anew))

    with pytest.raises(Suspended):
        apart(objective)
    names = [re.findall(r"(\w+) \(a variable of the loop\)", line) for line in said(caplog)]
    assert names == [["STEP", "count"], ["anew"]]


def test_variables_that_only_functions_read_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that are closed over; not those that are set anew before such a function is read."""
    model, session = nn.Linear(1, 1), FakeSession({7: "disk"}, checkpoint_dir=tmp_path / "s" / "t")
    run = PyTorchLoop(optuna.create_study().ask(), {"model": model}, session)

    def objective() -> None:
        state, anew, drawn = {"bad": 0}, 0.0, random.Random(1)
        temperature = weight = 1.0

        def stop(value: float) -> bool:
            state["bad"] += 1
            return state["bad"] > value

        @torch.no_grad()
        def loss_of(x: float) -> float:
            return x / temperature + anew + drawn.random()

        never = functools.partial(stop, 100.0)
        for epoch in run.epochs(3):
            anew = max(1.0, float(epoch))

            def closure() -> float:
                return loss_of(x)  # noqa: B023

            for x in run.batches([1.0, 2.0, 3.0]):
                loss = closure() + sum(weight * each for each in (1.0, x))
                session.tick()
            run.report(loss)
            temperature, weight = 1.0 / (epoch + 2), float(epoch + 2)
            if never():
                break

    with pytest.raises(Suspended):
        apart(objective)
    names = re.findall(r"(\w+) \(a variable of the loop", "".join(said(caplog)))
    assert sorted(names) == ["state", "temperature", "weight"]


def test_variables_that_blocks_set_are_not_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A ``with`` or ``try`` begins with them in each round; its handlers are for errors."""
    model, session = nn.Linear(1, 1), FakeSession({5: "disk"}, checkpoint_dir=tmp_path / "s" / "t")
    run = PyTorchLoop(optuna.create_study().ask(), {"model": model}, session)

    def objective() -> None:
        for epoch in run.epochs(3):
            with contextlib.nullcontext():
                scale = 1.0 + epoch
            for x in run.batches([1.0, 2.0, 3.0]):
                with torch.no_grad():
                    loss = scale * x
                try:
                    rounded = round(loss)
                finally:
                    rounded += 1
                session.tick()
            run.report(float(rounded))

    with pytest.raises(Suspended):
        apart(objective)
    assert said(caplog) == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="not seen there")
def test_a_variable_that_only_a_handler_reads_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A count of errors would begin anew with each suspension."""
    model, session = nn.Linear(1, 1), FakeSession({5: "disk"}, checkpoint_dir=tmp_path / "s" / "t")
    run = PyTorchLoop(optuna.create_study().ask(), {"model": model}, session)

    def objective() -> None:
        failures = 0
        for _ in run.epochs(3):
            for x in run.batches([1.0, 2.0, 3.0]):
                try:
                    loss = x
                    if x == 2.0:
                        raise FloatingPointError
                    loss += x
                except FloatingPointError:
                    failures += 1
                    if failures > 3:
                        raise RuntimeError(loss) from None
                session.tick()
            run.report(loss)

    with pytest.raises(Suspended):
        apart(objective)
    assert len(said(caplog)) == 1
    assert "changes failures (a variable of the loop)" in said(caplog)[0]


def test_a_variable_of_the_name_of_a_comprehension_s_is_named_only_if_it_is_carried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both are apart, whether or not the comprehension has a frame of its own."""
    model, session = nn.Linear(1, 1), FakeSession({7: "disk"}, checkpoint_dir=tmp_path / "s" / "t")
    run = PyTorchLoop(optuna.create_study().ask(), {"model": model}, session)

    def objective() -> None:
        last = before = key = 0.0
        for epoch in run.epochs(4):
            scales = [each + epoch for each in (1.0, 2.0)]
            rows = [[last * each for each in (1.0, epoch) if each] for last in scales]
            before = {before: key for before, key in ((epoch, 1.0), (2.0, 3.0))}[epoch]
            for x in run.batches([1.0, 2.0, 3.0]):
                for each in scales:
                    value = each * x + len(rows)
                key = last = key + last + value
                session.tick()
            run.report(last + before)

    with pytest.raises(Suspended):
        apart(objective)
    names = re.findall(r"(\w+) \(a variable of the loop", "".join(said(caplog)))
    assert sorted(names) == ["key", "last"]


def test_a_variable_that_a_function_of_another_function_reads_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop is in a function within the objective, and only calls what reads the variable."""
    model, session = nn.Linear(1, 1), FakeSession({7: "disk"}, checkpoint_dir=tmp_path / "s" / "t")
    run = PyTorchLoop(optuna.create_study().ask(), {"model": model}, session)

    def objective() -> None:
        state, other = {"bad": 0}, {"bad": 0}

        def stop() -> bool:
            state["bad"] += 1
            return state["bad"] > 100

        def train() -> None:
            for _ in run.epochs(3):
                for _ in run.batches([1.0, 2.0, 3.0]):
                    session.tick()
                run.report(0.0)
                if stop():
                    break

        train()
        assert other == {"bad": 0}

    with pytest.raises(Suspended):
        apart(objective)
    (line,) = said(caplog)
    assert re.findall(r"(\w+) \(a variable of the loop\)", line) == ["state"]


def test_what_locals_has_returned_stays_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An objective may hold its settings so, and hand them to a function that has the loop."""
    session = FakeSession({5: "disk"}, checkpoint_dir=tmp_path / "s" / "t")
    run = PyTorchLoop(optuna.create_study().ask(), {"model": nn.Linear(1, 1)}, session)

    def objective() -> None:
        lr = 0.1
        settings = locals()
        for _ in run.epochs(3):
            train(settings)
            assert lr == settings["lr"]

    def train(settings: dict[str, Any]) -> None:
        for _ in run.batches([1.0, 2.0, 3.0]):
            assert settings["lr"] == 0.1
            session.tick()
        run.report(0.0)

    with pytest.raises(Suspended):
        apart(objective)
    assert said(caplog) == []


def test_to_look_at_variables_leaves_the_body_of_a_class_as_it_is() -> None:
    """It is no copy that shows them there."""

    class Settings:
        lr = 0.1
        shown = variables(sys._getframe())

    assert (Settings.lr, Settings.shown["lr"]) == (0.1, 0.1)


def test_to_look_at_variables_keeps_none_of_them_alive() -> None:
    """A trial that waits must not hold the memory of its last batch."""
    value = Calls()
    gone = weakref.ref(value)
    assert variables(sys._getframe())["value"] is value
    del value
    assert gone() is None


@pytest.mark.parametrize("after", [2, 4, 6])
@pytest.mark.parametrize("reads", [False, True])
def test_a_variable_that_came_to_refer_to_a_kept_value_is_named_where_it_does_not(
    reads: bool, after: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By the process that begins without it; not where that takes it from what is kept."""
    model = nn.Linear(1, 1)

    def objective(session: FakeSession) -> None:
        run = PyTorchLoop(optuna.create_study().ask(), {"model": model}, session)
        best: Any = run.kept.get("best") if reads else None
        sizes, recent = {"width": 3}, run.kept.setdefault("recent", deque(maxlen=3))
        for epoch in run.epochs(4):
            for x in run.batches([1.0, 2.0, 3.0]):
                recent.append(x * sizes["width"])
                if epoch == 0 and run.batch == 0:
                    best = run.kept["best"] = copy.deepcopy(model.state_dict())
                session.tick()
            run.kept["sizes"] = sizes
            run.report(0.0)
        if best is not None:
            model.load_state_dict(best)

    session = FakeSession({after: "disk"}, checkpoint_dir=tmp_path / "s" / "t")
    with pytest.raises(Suspended):
        apart(objective, session)
    assert said(caplog) == []
    apart(objective, session.again())
    words = "best (a variable of the loop: set it to run.kept['best'] before that)"
    assert [words in line for line in said(caplog)] == ([] if reads else [True])


def test_a_variable_that_came_to_refer_to_a_kept_value_in_epochs_without_batches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named at the epoch where the trial goes on."""

    def objective(session: FakeSession) -> None:
        run = PyTorchLoop(optuna.create_study().ask(), {"model": nn.Linear(1, 1)}, session)
        best: Any = None
        for epoch in run.epochs(4):
            if epoch == 0:
                best = run.kept["best"] = [1.0]
            session.tick()
            run.report(0.0)
        assert best is None or best == [1.0]

    session = FakeSession({2: "disk"}, checkpoint_dir=tmp_path / "s" / "t")
    with pytest.raises(Suspended):
        apart(objective, session)
    apart(objective, session.again())
    assert ["set it to run.kept['best']" in line for line in said(caplog)] == [True]
