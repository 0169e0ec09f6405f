"""A run that comes back from disk draws the same random numbers as one without this package.

Each case is one training, told by its options. It is trained without ``optuna_hermes`` first, then
suspended to disk twice, with other random numbers in each process that goes on.

As a script, this file is the last process of some runs: ``test_exact_loaders.py FOLDER``.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import optuna
import pytest
import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from optuna_hermes import _heap
from optuna_hermes.errors import CheckpointError, Suspended
from optuna_hermes.lightning import HermesCallback
from optuna_hermes.model import Checkpoint
from optuna_hermes.pytorch import PyTorchLoop
from optuna_hermes.suspend._loaders._order import order_of
from optuna_hermes.suspend._loop_code import _code
from optuna_hermes.testing import FakeSession

EPOCHS = 4
SAMPLES, SIZE = 28, 4
BATCHES = SAMPLES // SIZE
Bits = dict[Any, bytes]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


# -- data ---------------------------------------------------------------------------------------


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples with noise of each of some generators."""

    def __init__(self, draws: str = "", length: int = SAMPLES) -> None:
        self._x = torch.randn(length, 4, generator=torch.Generator().manual_seed(7))
        self._draws = draws
        self.rng = np.random.default_rng(11)
        self.old_rng = np.random.RandomState(12)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, noise = self._x[index], 0.0
        if "torch" in self._draws:
            noise += float(torch.rand(()))
        if "numpy" in self._draws:
            noise += np.random.rand()
        if "python" in self._draws:
            noise += random.gauss(0, 1)
        if "own" in self._draws:
            noise += self.rng.normal() + self.old_rng.rand()
        info = get_worker_info()
        if "worker" in self._draws and info is not None:
            noise += info.id + (info.seed % 1000) / 1000
        return x + 0.1 * noise, x.sum()


class Eager(Sampler[int]):
    """Draws its order when it is asked for an iterator, from a state of its own."""

    def __init__(self) -> None:
        self._random = np.random.RandomState(5)

    def __iter__(self) -> Iterator[int]:
        return iter(self._random.permutation(SAMPLES).tolist())

    def __len__(self) -> int:
        return SAMPLES


class Counting(Sampler[int]):
    """Draws its order from a seed and the number of its epochs, which it counts itself."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(np.random.default_rng(self.epoch).permutation(SAMPLES).tolist())

    def __len__(self) -> int:
        return SAMPLES


class Shuffling(Sampler[int]):
    """Shuffles one list again and again."""

    def __init__(self) -> None:
        self.order = list(range(SAMPLES))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        return iter(self.order)

    def __len__(self) -> int:
        return SAMPLES


class NumpyShuffling(Shuffling):
    """The same with a list of NumPy's numbers."""

    def __init__(self) -> None:
        self.order = list(np.arange(SAMPLES))


class Buckets(Sampler[list[int]]):
    """Shuffles one list of batches again and again."""

    def __init__(self) -> None:
        self.batches = [list(range(at, at + SIZE)) for at in range(0, SAMPLES, SIZE)]

    def __iter__(self) -> Iterator[list[int]]:
        random.shuffle(self.batches)
        return iter(self.batches)

    def __len__(self) -> int:
        return BATCHES


class Balanced(Sampler[list[int]]):
    """Takes two of each class, and shuffles a class that is used up, in whatever epoch."""

    def __init__(self) -> None:
        labels = np.arange(SAMPLES) % 7 < 3
        self.of_class = {each: np.flatnonzero(labels == each) for each in np.unique(labels)}
        self.used = dict.fromkeys(self.of_class, 0)

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(BATCHES):
            batch: list[int] = []
            for label, indices in self.of_class.items():
                if self.used[label] == len(indices):
                    np.random.shuffle(indices)
                    self.used[label] = 0
                batch += indices[self.used[label] : self.used[label] + 2].tolist()
                self.used[label] += 2
            yield batch

    def __len__(self) -> int:
        return BATCHES


class Batches(Sampler[list[int]]):
    """Draws each batch when it is asked for it, from NumPy's global generator."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(BATCHES):
            yield np.random.choice(SAMPLES, SIZE, replace=False).tolist()

    def __len__(self) -> int:
        return BATCHES


class EagerBatches(Sampler[list[int]]):
    """Draws all batches at once, from the global generator of torch."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([part.tolist() for part in torch.randperm(SAMPLES).reshape(-1, SIZE)])

    def __len__(self) -> int:
        return BATCHES


class Halving:
    """Batches of another iterator, whose samples are halved."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __iter__(self) -> Halving:
        return self

    def __next__(self) -> Any:
        x, y = next(self._batches)
        return x / 2, y

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._batches._reset(loader, first_iter)


class HalvingLoader(DataLoader[Any]):
    """A loader with iterators of its own around torch's, as PyTorch Geometric's are."""

    def _get_iterator(self) -> Any:
        return Halving(super()._get_iterator())


class LateLoader(DataLoader[Any]):
    """A loader that begins with the first batch of an epoch."""

    def __iter__(self) -> Any:
        for x, y in super().__iter__():
            yield x / 2, y


def seed_numpy(worker: int) -> None:
    np.random.seed(torch.initial_seed() % 2**32)
    random.seed(worker)


def loader(draws: str = "", **options: Any) -> DataLoader[Any]:
    """A loader of the user's, by its options; ``make`` gives some that are made anew each time."""
    made, kind = options.pop("make", dict)(), options.pop("kind", DataLoader)
    options = {"batch_size": SIZE, "shuffle": True, **options, **made}
    if {"sampler", "batch_sampler"} & set(options):
        options.pop("shuffle")
    if "batch_sampler" in options:
        options.pop("batch_size")
    if options.get("num_workers"):
        options.setdefault("multiprocessing_context", "fork")
    return kind(Points(draws), **options)  # type: ignore[no-any-return]


def shared_generator() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    data = range(SAMPLES)
    return {"sampler": RandomSampler(data, generator=generator), "generator": generator}


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffled": dict,
    "generator": lambda: {"generator": torch.Generator().manual_seed(3)},
    "random-sampler": lambda: {
        "sampler": RandomSampler(range(SAMPLES), generator=torch.Generator().manual_seed(3))
    },
    "shared-generator": shared_generator,
    "replacement": lambda: {"sampler": RandomSampler(range(SAMPLES), replacement=True)},
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0, 2.0] * (SAMPLES // 2), SAMPLES)},
    "weighted-generator": lambda: {
        "sampler": WeightedRandomSampler(
            [1.0, 2.0] * (SAMPLES // 2), SAMPLES, generator=torch.Generator().manual_seed(3)
        )
    },
    "subset": lambda: {"sampler": SubsetRandomSampler(range(SAMPLES))},
    "eager": lambda: {"sampler": Eager()},
    "counting": lambda: {"sampler": Counting()},
    "shuffling": lambda: {"sampler": Shuffling()},
    "numpy-shuffling": lambda: {"sampler": NumpyShuffling()},
    "buckets": lambda: {"batch_sampler": Buckets()},
    "balanced": lambda: {"batch_sampler": Balanced()},
    "batches": lambda: {"batch_sampler": Batches()},
    "eager-batches": lambda: {"batch_sampler": EagerBatches()},
    "batch-sampler": lambda: {"batch_sampler": BatchSampler(Eager(), SIZE, drop_last=True)},
}


def noisy_collate() -> dict[str, Any]:
    """A function that draws from a generator that it closes over."""
    own = np.random.default_rng(13)

    def collate(samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        return x + own.normal(), y

    return {"collate_fn": collate}


class Inner:
    """Collates by another function, with noise of its own, and counts its batches."""

    def __init__(self) -> None:
        self.inner = default_collate
        self.step = 0
        self.rng = random.Random(14)

    def __call__(self, samples: list[Any]) -> Any:
        x, y = self.inner(samples)
        self.step += 1
        return x * 0.9**self.step + self.rng.random(), y


ALL = "torch numpy python own worker"
WORKERS = {
    f"{number}-workers-ahead-{ahead}{'-persistent' if persistent else ''}": {
        "num_workers": number,
        "prefetch_factor": ahead,
        "persistent_workers": persistent,
    }
    for number, ahead, persistent in itertools.product((1, 3), (1, 4), (False, True))
}
WORKERS["0-workers"] = {}


def some(names: Iterable[Any], *fast: Any) -> list[Any]:
    """All names; those that are not among ``fast`` are for the slow suite."""
    assert set(fast) <= set(names)
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


FAST_SAMPLERS = some(
    SAMPLERS,
    "shared-generator",
    "counting",
    "eager-batches",
    "numpy-shuffling",
    "buckets",
    "balanced",
)


# -- what a run did -------------------------------------------------------------------------------


class Trace:
    """Losses by batch, values by epoch, and weights at the end, to the bit."""

    def __init__(self) -> None:
        self.seen: Bits = {}

    def note(self, key: Any, value: Any) -> None:
        bits = torch.as_tensor(value, dtype=torch.float64).detach().numpy().tobytes()
        assert self.seen.setdefault(key, bits) == bits, f"trained again, {key} is another one"


def new_trial() -> optuna.Trial:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study().ask()


Train = Callable[[FakeSession | None, Trace], None]


def check(train: Train, tmp_path: Path, *, stops: tuple[int, ...] = (BATCHES + 3, 2)) -> None:
    """Train without a session, then suspended to disk after these numbers of batches.

    Args:
        train: one process of the run, from the seed to the end.
        tmp_path: for checkpoints.
        stops: batches that each process but the last trains.
    """
    plain, trace = Trace(), Trace()
    train(None, plain)
    session = FakeSession(checkpoint_dir=tmp_path)
    for stop in stops:
        session = session.again({stop: "disk"})
        with pytest.raises(Suspended):
            train(session, trace)
    train(session.again(), trace)
    assert sorted(map(str, trace.seen)) == sorted(map(str, plain.seen))
    differing = [key for key in plain.seen if trace.seen[key] != plain.seen[key]]
    assert not differing


# -- Lightning ------------------------------------------------------------------------------------


class Net(pl.LightningModule):
    """A small network with dropout."""

    def __init__(self, lr: float = 0.05, total: int = 0) -> None:
        super().__init__()
        self.lr, self.total = lr, total
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))

    def loss(self, batch: Any) -> torch.Tensor:
        if isinstance(batch, dict):
            return torch.stack([self.loss(each) for each in batch.values()]).sum()
        x, y = batch
        return nn.functional.mse_loss(self.net(x).squeeze(-1), y)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        name = "val_loss" if dataloader_idx == 0 else "other"
        self.log(name, self.loss(batch) + torch.rand(()), add_dataloader_idx=False)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Watch(Callback):
    def __init__(self, trace: Trace, session: FakeSession | None) -> None:
        self._trace = trace
        self._session = session

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any
    ) -> None:
        self._trace.note(trainer.fit_loop.total_batch_idx, outputs["loss"])
        rates = [group["lr"] for each in trainer.optimizers for group in each.param_groups]
        self._trace.note(("rate", trainer.fit_loop.total_batch_idx), rates)
        if self._session is not None:
            self._session.tick()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for name, value in pl_module.state_dict().items():
            self._trace.note(name, value)
        self._trace.note("next", [torch.rand(()), np.random.rand(), random.random()])


def fit(
    session: FakeSession | None,
    trace: Trace,
    *,
    net: Callable[[], pl.LightningModule] = Net,
    train: Callable[[], Any] | None = loader,
    val: Callable[[], Any] | None = loader,
    callbacks: Callable[[], list[Callback]] = list,
    data: Callable[[], pl.LightningDataModule] | None = None,
    tune: Callable[..., Any] | None = None,
    **options: Any,
) -> None:
    """One process of a run with Lightning."""
    seed_all(1)
    module = net()
    loaders = [each for each in (train and train(), val and val()) if each is not None]
    if session is not None and session.checkpoints:
        seed_all(session.checkpoints[0].units + 17)
    trial = new_trial()
    hermes = [] if session is None else [HermesCallback(trial, "val_loss", _session=session)]
    settings: dict[str, Any] = {
        "max_epochs": EPOCHS,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [*hermes, *callbacks(), Watch(trace, session)],
    }
    datamodule = None if data is None else data()
    trainer = pl.Trainer(**{**settings, **options})
    if tune is not None:
        trace.note("found", tune(Tuner(trainer), module, *loaders))
    trainer.fit(module, *loaders, datamodule=datamodule)


@pytest.mark.parametrize("name", some(WORKERS, "0-workers", "3-workers-ahead-4-persistent"))
def test_lightning_workers(name: str, tmp_path: Path) -> None:
    """Loaders with any workers, whose data sets draw random numbers of all kinds."""
    make = functools.partial(loader, ALL, **WORKERS[name])
    check(functools.partial(fit, train=make, val=make), tmp_path)


@pytest.mark.parametrize("name", some(["0-workers", "3-workers-ahead-4-persistent"], "0-workers"))
@pytest.mark.parametrize("sampler", FAST_SAMPLERS)
def test_lightning_samplers(sampler: str, name: str, tmp_path: Path) -> None:
    """Samplers and generators of the user's own, for training and validation."""
    make = functools.partial(loader, "torch", make=SAMPLERS[sampler], **WORKERS[name])
    check(functools.partial(fit, train=make, val=make), tmp_path)


class AsksForSteps(Net):
    """Makes its schedule as Lightning's documentation does."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class OwnLoaders(AsksForSteps):
    """Makes its loaders itself, and draws which samples validate."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = SIZE

    def train_dataloader(self) -> Any:
        data = torch.utils.data.random_split(Points("torch"), [SAMPLES - 4, 4])[0]
        return DataLoader(data, self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(torch.utils.data.random_split(Points("torch"), [8, SAMPLES - 8])[0], 4)


class OwnRates(OwnLoaders):
    """Makes its loaders itself, and has no schedule."""

    def configure_optimizers(self) -> Any:
        return Net.configure_optimizers(self)


class ByEpoch(OwnRates):
    """Chooses its data by the epoch in which it makes its loader, which is not each one."""

    def train_dataloader(self) -> Any:
        torch.manual_seed(self.current_epoch)
        return super().train_dataloader()


class Growing(OwnRates):
    """Takes larger batches from one epoch to the next."""

    def on_train_epoch_end(self) -> None:
        self.batch_size += 1


class Counted(Net):
    """Counts its batches, and makes its loader and its schedule by the count."""

    def __init__(self) -> None:
        super().__init__()
        self.level = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.level += 1
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> Any:
        return DataLoader(Points("torch", SAMPLES + self.level % 5), SIZE, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Points(), SIZE)

    def configure_optimizers(self) -> Any:
        optimizer, warm = torch.optim.Adam(self.parameters(), lr=0.05), self.level + 3
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step % warm + 1)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Curriculum(pl.LightningDataModule):
    """Counts its batches and its loaders, and makes its loaders by both."""

    def __init__(self) -> None:
        super().__init__()
        self.level = self.made = 0

    def train_dataloader(self) -> Any:
        self.made += 1
        length = SAMPLES + (self.level + self.made) % 5
        return DataLoader(Points("torch", length), SIZE, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Points(), SIZE)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.level += 1
        return batch


class OwnCurriculum(Curriculum):
    """Stores what it counts by itself."""

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level, "made": self.made}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.level, self.made = state_dict["level"], state_dict["made"]


@pytest.mark.parametrize("reload", [0, 1])
@pytest.mark.parametrize(
    "data", [None, Curriculum, OwnCurriculum], ids=["module", "data-module", "own-state"]
)
def test_lightning_attributes_that_loaders_are_made_of(
    data: Any, reload: int, tmp_path: Path
) -> None:
    """Loaders are made of what a module or data module had counted when they were made first."""
    net = Counted if data is None else Net
    options: dict[str, Any] = {"net": net, "train": None, "val": None, "data": data}
    train = functools.partial(fit, reload_dataloaders_every_n_epochs=reload, **options)
    check(train, tmp_path)


class Mining(Net):
    """Draws most often what it does worst."""

    def scores(self) -> torch.Tensor:
        with torch.no_grad():
            x, y = map(torch.stack, zip(*map(Points().__getitem__, range(SAMPLES)), strict=True))
            return (self.net(x).squeeze(-1) - y).square()

    def train_dataloader(self) -> Any:
        drawn = WeightedRandomSampler(self.scores().double(), SAMPLES)
        return DataLoader(Points("torch"), SIZE, sampler=drawn)

    def val_dataloader(self) -> Any:
        return DataLoader(Points(), SIZE)


class Choosing(Mining):
    """Trains on the samples that it does worst, however many these are, and validates on others."""

    def hard(self, sign: int) -> list[int]:
        return [i for i, each in enumerate(sign * self.scores().log()) if each > -1]

    def train_dataloader(self) -> Any:
        parts = [Subset(Points("torch"), self.hard(sign)) for sign in (1, -1)]
        return {"both": DataLoader(ConcatDataset(parts), SIZE, shuffle=True)}

    def val_dataloader(self) -> Any:
        return DataLoader(Points(), SIZE, sampler=SubsetRandomSampler(self.hard(-1)))


class CountsByHand(Mining):
    """Makes loaders to count its batches, as many do for a schedule, and to look at one."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        steps = len(self.trainer.fit_loop._data_source.dataloader())
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, epochs=EPOCHS, steps_per_epoch=steps
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_train_epoch_start(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(3)  # its scores have dropout
            drawn = self.trainer.fit_loop._data_source.dataloader().sampler.weights
            torch.manual_seed(3)
            assert torch.equal(drawn, self.scores().double())  # by the present weights


class OfFile(Mining):
    """Has its scores in a file, too, from which its sampler maps them."""

    def train_dataloader(self) -> Any:
        loader = super().train_dataloader()
        with tempfile.NamedTemporaryFile(suffix=".npy") as file:
            np.save(file.name, loader.sampler.weights.numpy())
            loader.sampler.lengths = np.load(file.name, mmap_mode="r")
        return loader


@pytest.mark.parametrize("reload", [0, 1])
@pytest.mark.parametrize("net", [Mining, Choosing, CountsByHand, OfFile])
def test_lightning_loaders_that_are_made_of_weights(
    net: type[Net], reload: int, tmp_path: Path
) -> None:
    """Made again, they have the weights and indices of the first time, and their length."""
    options: dict[str, Any] = {"net": net, "train": None, "val": None}
    train = functools.partial(fit, reload_dataloaders_every_n_epochs=reload, **options)
    check(train, tmp_path, stops=(3, 5, 3))


def test_samples_are_no_order() -> None:
    """A tensor, or data set without torch's class, is not copied with the order of its loader."""

    class Held:
        def __init__(self) -> None:
            self.x = torch.zeros(SAMPLES, 4)

        def __len__(self) -> int:
            return len(self.x)

        def __getitem__(self, index: int) -> torch.Tensor:
            return self.x[index]

    held: Any = Held()
    loaders = [DataLoader(held), DataLoader(Subset(held, [2, 1]), shuffle=True), DataLoader(held.x)]
    order = order_of(loaders)
    assert order["1.dataset"]["indices"].tolist() == [2, 1]
    assert not [each for own in order.values() for each in own.values() if torch.is_tensor(each)]


class RatesLater(LearningRateFinder):
    """Looks for a learning rate in the course of the training too."""

    def on_fit_start(self, *args: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch in (0, 2):
            self.lr_find(trainer, pl_module)


class RatesOnceClipped(RatesLater):
    """Clips gradients from the second epoch on, and looks for a rate once that is so."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            trainer.gradient_clip_val = 0.05
            self.lr_find(trainer, pl_module)


class ByRate(Net):
    """Weighs its losses by the learning rate that was found."""

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) * (1 + self.lr)


def rates(tuner: Tuner, *args: Any) -> list[float]:
    """Find a rate in each of two ranges, of which the module takes the second."""
    options: dict[str, Any] = {"num_training": 20, "early_stop_threshold": None}
    found = [tuner.lr_find(*args, min_lr=least, **options) for least in (1e-6, 1e-4)]
    return [each.suggestion() for each in found]  # type: ignore[union-attr,misc]


def sizes(tuner: Tuner, *args: Any) -> int | None:
    return tuner.scale_batch_size(*args, max_trials=2, steps_per_trial=1)


def sizes_and_rates(tuner: Tuner, *args: Any) -> list[Any]:
    return [sizes(tuner, *args), *rates(tuner, *args)]


class PrunedFromTheStart(Net):
    """Has its masks when it is made."""

    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.net[0], "weight", 0.3)  # type: ignore[no-untyped-call]


def workers(**options: Any) -> Callable[[], Any]:
    return functools.partial(
        loader, ALL, num_workers=2, persistent_workers=True, prefetch_factor=1, **options
    )


def several(number: int, **options: Any) -> Callable[[], Any]:
    return lambda: [workers(**options)() for _ in range(number)]


def one_twice(**options: Any) -> Callable[[], Any]:
    return lambda: dict.fromkeys("ab", loader("torch", **options))


def unequal() -> Any:
    short = DataLoader(Points("torch", 12), SIZE, shuffle=True)
    return {"long": loader("torch"), "short": short}


def combined(mode: Any) -> Callable[[], Any]:
    return lambda: pl.utilities.CombinedLoader(unequal(), mode)


LIGHTNING: dict[str, dict[str, Any]] = {
    "steps": {"net": AsksForSteps},
    "steps-persistent": {"net": AsksForSteps, "train": workers(), "val": workers()},
    "steps-own-loaders": {"net": OwnLoaders, "train": None, "val": None},
    "steps-accumulated": {"net": AsksForSteps, "accumulate_grad_batches": 2},
    "rates": {"callbacks": lambda: [LearningRateFinder(num_training_steps=20)]},
    "rates-persistent": {
        "callbacks": lambda: [LearningRateFinder(num_training_steps=20)],
        "train": workers(),
        "val": workers(),
    },
    "rates-steps": {
        "net": AsksForSteps,
        "callbacks": lambda: [LearningRateFinder(num_training_steps=20)],
    },
    "rates-later": {"callbacks": lambda: [RatesLater(num_training_steps=15)]},
    "rates-once-clipped": {"callbacks": lambda: [RatesOnceClipped(num_training_steps=15)]},
    "sizes": {
        "net": OwnRates,
        "train": None,
        "val": None,
        "callbacks": lambda: [BatchSizeFinder(max_trials=2, steps_per_trial=1)],
    },
    "sizes-rates": {
        "net": OwnRates,
        "train": None,
        "val": None,
        "callbacks": lambda: [
            BatchSizeFinder(mode="binsearch", max_trials=2, steps_per_trial=1),
            LearningRateFinder(num_training_steps=15),
        ],
    },
    "tuned-rates": {"net": ByRate, "tune": rates},
    "tuned-sizes-and-rates": {
        "net": OwnRates,
        "train": None,
        "val": None,
        "tune": sizes_and_rates,
    },
    "growing": {"net": Growing, "train": None, "val": None, "reload_dataloaders_every_n_epochs": 1},
    "by-epoch": {
        "net": ByEpoch,
        "train": None,
        "val": None,
        "reload_dataloaders_every_n_epochs": 2,
    },
    "pruned": {"callbacks": lambda: [ModelPruning("l1_unstructured", amount=0.2)]},
    "pruned-at-random": {
        "callbacks": lambda: [ModelPruning("random_unstructured", amount=0.1)],
        "gradient_clip_val": 0.1,
    },
    "pruned-lottery": {
        "callbacks": lambda: [
            ModelPruning("l1_unstructured", amount=0.2, make_pruning_permanent=False)
        ]
    },
    "pruned-from-the-start": {"net": PrunedFromTheStart},
    "averaged": {"callbacks": lambda: [StochasticWeightAveraging(0.01, swa_epoch_start=2)]},
    "several-val": {"val": several(2), "train": workers()},
    "val-generator": {"val": several(2, generator=torch.Generator()), "train": workers()},
    "no-sanity-check": {"val": workers(), "train": workers(), "num_sanity_val_steps": 0},
    "limited": {"train": workers(), "val": workers(), "limit_train_batches": 4, "max_epochs": 8},
    "limited-val": {"train": workers(), "val": workers(), "limit_val_batches": 3},
    "overfit": {"overfit_batches": 3, "max_epochs": 9},
    "overfit-persistent": {
        "train": workers(),
        "val": workers(),
        "overfit_batches": 3,
        "max_epochs": 9,
    },
    "reloaded": {
        "train": workers(),
        "val": workers(),
        "reload_dataloaders_every_n_epochs": 2,
    },
    "every-3-batches": {"train": workers(), "val": workers(), "val_check_interval": 3},
    "every-2-epochs": {"train": workers(), "val": workers(), "check_val_every_n_epoch": 2},
    # When it comes back, Lightning would make the loader at once, and not by this epoch's numbers.
    "val-made-late": {
        "net": OwnRates,
        "train": None,
        "val": None,
        "check_val_every_n_epoch": 2,
        "num_sanity_val_steps": 0,
    },
    "val-made-again-late": {
        "net": OwnRates,
        "train": None,
        "val": None,
        "check_val_every_n_epoch": 3,
        "reload_dataloaders_every_n_epochs": 4,
        "max_epochs": 7,
    },
    "one-val-loader-twice": {"val": lambda: [workers()()] * 2},
    "one-train-loader-twice": {"train": one_twice()},
    "one-train-loader-twice-generator": {"train": one_twice(make=SAMPLERS["generator"])},
    "one-train-loader-twice-workers": {"train": one_twice(num_workers=2)},
    "one-train-loader-twice-reloaded": {
        "train": one_twice(),
        "reload_dataloaders_every_n_epochs": 1,
    },
    "two-train-loaders": {"train": lambda: {"a": loader("torch"), "b": loader("numpy")}},
    "unequal-train-loaders": {"train": unequal},
    "shortest-train-loader": {"train": combined("min_size"), "max_epochs": 8},
    "longest-train-loader": {"train": combined("max_size_cycle")},
    "two-persistent-train-loaders": {"train": lambda: {"a": workers()(), "b": workers()()}},
    "pinned": {
        "train": functools.partial(loader, "torch", pin_memory=True),
        "val": workers(pin_memory=True),
    },
    "init": {
        "train": workers(worker_init_fn=seed_numpy),
        "val": workers(worker_init_fn=seed_numpy),
    },
    "quiet": {"train": functools.partial(loader, "", num_workers=2, persistent_workers=True)},
    "own-iterators": {
        "train": functools.partial(loader, ALL, num_workers=3, kind=HalvingLoader),
        "val": workers(kind=HalvingLoader),
    },
    "late": {"train": functools.partial(loader, ALL, kind=LateLoader)},
    "late-persistent": {"train": workers(kind=LateLoader), "val": workers(kind=LateLoader)},
    "late-reloaded": {
        "train": functools.partial(loader, ALL, kind=LateLoader),
        "reload_dataloaders_every_n_epochs": 2,
    },
    "collate-function": {
        "train": functools.partial(loader, make=noisy_collate),
        "val": functools.partial(loader, make=noisy_collate),
    },
    "collate-object": {
        "train": functools.partial(loader, make=lambda: {"collate_fn": Inner()}),
        "val": workers(make=noisy_collate),
    },
}


class Looks(Net):
    """Looks at a first batch before the first one."""

    def on_train_start(self) -> None:
        next(iter(self.trainer.train_dataloader))


class Centred(Net):
    """Keeps what it begins with in a buffer, and changes its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(8))

    def on_fit_start(self) -> None:
        nn.init.constant_(self.net[3].bias, 0.5)  # type: ignore[arg-type]

    def on_train_start(self) -> None:
        with torch.no_grad():
            self.center.copy_(self.net[0](torch.ones(1, 4))[0])  # type: ignore[operator]


@pytest.mark.parametrize("net", [Looks, Centred])
def test_hooks_before_the_first_batch(net: type[Net], tmp_path: Path) -> None:
    """Their effects in the process that goes on are undone, and take no batch of the training."""
    check(functools.partial(fit, net=net), tmp_path)


class Leveled(Points):
    """Has settings that hooks change."""

    def __init__(self) -> None:
        super().__init__()
        self.level = self.epoch = 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = super().__getitem__(index)
        return x + self.level + 0.1 * self.epoch, y


class Raises(Net):
    """Makes the data harder after each validation, and tells them the epoch."""

    def on_train_epoch_start(self) -> None:
        self.trainer.train_dataloader.dataset.epoch = self.current_epoch

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.trainer.train_dataloader.dataset.level += 1


@pytest.mark.parametrize("workers", [0, 2])
def test_what_hooks_set_in_a_data_set(workers: int, tmp_path: Path) -> None:
    """It is there again, within an epoch and in later ones."""

    def make() -> DataLoader[Any]:
        return DataLoader(Leveled(), SIZE, shuffle=True, num_workers=workers)

    check(functools.partial(fit, net=Raises, train=make), tmp_path)


class Evaluates(Net):
    """Goes through its training data after each epoch, and looks at them within it."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            next(iter(self.trainer.train_dataloader))

    def on_train_epoch_end(self) -> None:
        for batch in self.trainer.train_dataloader:
            self.loss(batch)


@pytest.mark.parametrize("workers", [0, 2])
def test_lightning_passes_beside_the_trained_one(workers: int, tmp_path: Path) -> None:
    """Hooks may go through the training loader, also between two of its batches."""
    make = functools.partial(loader, ALL, num_workers=workers)
    check(functools.partial(fit, net=Evaluates, train=make), tmp_path)


@pytest.mark.parametrize(
    "case",
    some(
        LIGHTNING,
        "steps-own-loaders",
        "rates-later",
        "rates-once-clipped",
        "tuned-rates",
        "tuned-sizes-and-rates",
        "growing",
        "pruned-at-random",
        "val-generator",
        "unequal-train-loaders",
        "overfit-persistent",
        "val-made-late",
        "val-made-again-late",
        "one-val-loader-twice",
        "one-train-loader-twice-generator",
        "one-train-loader-twice-workers",
        "one-train-loader-twice-reloaded",
        "late",
        "late-persistent",
        "collate-function",
        "collate-object",
    ),
)
def test_lightning(case: str, tmp_path: Path) -> None:
    """Code that asks, validates or trains beside the loop, and other loaders, change nothing."""
    stops = (5, 1) if "train-loader" in case else (BATCHES + 3, 2)
    folder = tmp_path / "root"
    check(functools.partial(fit, default_root_dir=folder, **LIGHTNING[case]), tmp_path, stops=stops)


# -- a loop of one's own ----------------------------------------------------------------------


def loop(
    session: FakeSession | None,
    trace: Trace,
    *,
    train: Callable[[], Any],
    val: Callable[[], Any],
    anew: bool = False,
) -> None:
    """One process of a run with ``suspendable``."""
    seed_all(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    batches, validation = train(), val()
    if session is not None and session.checkpoints:
        seed_all(session.checkpoints[0].units + 17)
    run = PyTorchLoop(new_trial(), {"model": model, "optimizer": optimizer}, session)
    for epoch in run.epochs(EPOCHS):
        model.train()
        for x, y in run.batches(train() if anew else batches):
            loss = nn.functional.mse_loss(model(x).squeeze(-1), y)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            trace.note((epoch, run.batch), loss)
            if session is not None:
                session.tick()
        model.eval()
        total = torch.zeros(())
        with torch.no_grad():
            for each in validation if isinstance(validation, list) else [validation]:
                for x, y in each:
                    total += nn.functional.mse_loss(model(x).squeeze(-1), y) + torch.rand(())
        trace.note(("value", epoch), total)
        run.report(float(total))
    for name, value in model.state_dict().items():
        trace.note(name, value)
    trace.note("next", [torch.rand(()), np.random.rand(), random.random()])


@pytest.mark.parametrize("name", some(WORKERS, "0-workers", "3-workers-ahead-4-persistent"))
def test_loop_workers(name: str, tmp_path: Path) -> None:
    """Loaders with any workers, whose data sets draw random numbers of all kinds."""
    make = functools.partial(loader, ALL, **WORKERS[name])
    check(functools.partial(loop, train=make, val=make), tmp_path)


@pytest.mark.parametrize("name", some(["0-workers", "3-workers-ahead-4-persistent"], "0-workers"))
@pytest.mark.parametrize("sampler", FAST_SAMPLERS)
def test_loop_samplers(sampler: str, name: str, tmp_path: Path) -> None:
    """Samplers and generators of the user's own, for training and validation."""
    make = functools.partial(loader, "torch", make=SAMPLERS[sampler], **WORKERS[name])
    check(functools.partial(loop, train=make, val=make), tmp_path)


LOOPS: dict[str, dict[str, Any]] = {
    "several-val": {"train": workers(), "val": several(2)},
    "made-anew": {"train": workers(), "val": workers(), "anew": True},
    "pinned": {"train": workers(pin_memory=True), "val": workers(pin_memory=True)},
    "init": {
        "train": workers(worker_init_fn=seed_numpy),
        "val": workers(worker_init_fn=seed_numpy),
    },
    "one-persists": {"train": functools.partial(loader, ALL), "val": workers()},
    "single-samples": {"train": workers(batch_size=1), "val": workers(batch_size=7)},
    "own-iterators": {
        "train": functools.partial(loader, ALL, num_workers=3, kind=HalvingLoader),
        "val": workers(kind=HalvingLoader),
    },
    "own-iterators-persistent": {"train": workers(kind=HalvingLoader), "val": loader},
    "late": {"train": functools.partial(loader, ALL, kind=LateLoader), "val": loader},
    "late-workers": {
        "train": functools.partial(loader, ALL, num_workers=2, kind=LateLoader),
        "val": loader,
    },
    "collate-function": {
        "train": functools.partial(loader, make=noisy_collate),
        "val": workers(make=noisy_collate),
    },
    "collate-function-workers": {
        "train": functools.partial(loader, make=noisy_collate, num_workers=2),
        "val": functools.partial(loader, make=lambda: {"collate_fn": Inner()}),
    },
}


@pytest.mark.parametrize(
    "case", some(LOOPS, "several-val", "made-anew", "own-iterators", "collate-function")
)
def test_loop(case: str, tmp_path: Path) -> None:
    """Several loaders, and loaders made anew in each epoch."""
    check(functools.partial(loop, **LOOPS[case]), tmp_path)


def by_fabric(make: Callable[[], Any]) -> Any:
    return Fabric(accelerator="cpu", devices=1).setup_dataloaders(make())


def by_accelerate(make: Callable[[], Any]) -> Any:
    return Accelerator(cpu=True).prepare(make())


@pytest.mark.parametrize("wrap", [lambda make: make(), by_fabric, by_accelerate])
def test_loaders_that_are_alike(
    wrap: Callable[[Callable[[], Any]], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are told apart by the loop's code, in whatever order the garbage collector has them."""
    listed, times = _heap.objects, itertools.count()

    def objects(*kinds: type) -> list[Any]:
        found = list(listed(*kinds))
        return found[::-1] if DataLoader in kinds and next(times) % 2 else found

    def seeded(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return wrap(functools.partial(loader, "torch", generator=generator))

    def unequal() -> list[Any]:
        first = seeded(3)
        return [first, seeded(4), first]

    monkeypatch.setattr(_heap, "objects", objects)
    monkeypatch.setattr(_code, "CREATION_ORDER", False)  # as since Python 3.14
    train = functools.partial(loop, train=loader, val=unequal)
    check(train, tmp_path, stops=(BATCHES + 3,))
    assert next(times) == 2


class Stream(IterableDataset[Any]):
    """Samples in an order that it draws, and that depends on how often it was gone through."""

    def __init__(self) -> None:
        self.points = Points()
        self.passes = 0
        self.rng = np.random.default_rng(3)

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        order = [*torch.randperm(SAMPLES).tolist(), *range(self.passes)]
        for index in order:
            x, y = self.points[index]
            yield x + 0.1 * torch.rand(()) + 0.1 * np.random.rand() + self.rng.normal(), y


class Sized(Stream):
    """A stream that says how long it is."""

    def __len__(self) -> int:
        return SAMPLES


def stream(kind: type[Stream], workers: int) -> Any:
    return DataLoader(kind(), SIZE, num_workers=workers, generator=torch.Generator())


STREAMS = {
    "in-process": (Stream, 0),
    "workers": (Stream, 2),
    "sized": (Sized, 0),
    "sized-workers": (Sized, 1),
}
IN_STREAMS = [
    *[pytest.param(each, marks=pytest.mark.slow) for each in ((1, BATCHES, 3), (BATCHES + 3, 2))],
    (BATCHES, 1, BATCHES - 1),
]


@pytest.mark.parametrize("stops", IN_STREAMS, ids=str)
@pytest.mark.parametrize("case", some(STREAMS, "workers", "sized"))
def test_streams(case: str, stops: tuple[int, ...], tmp_path: Path) -> None:
    """A run over an iterable data set comes back to any batch of it."""
    make = functools.partial(stream, *STREAMS[case])
    check(functools.partial(loop, train=make, val=loader), tmp_path, stops=stops)


@pytest.mark.parametrize("train", [loop, fit])
def test_streams_that_validate(train: Callable[..., Any], tmp_path: Path) -> None:
    """Their passes are counted on, too."""
    val = functools.partial(stream, Stream, 0)
    check(functools.partial(train, train=loader, val=val), tmp_path, stops=(BATCHES + 3, BATCHES))


@pytest.mark.parametrize("stops", IN_STREAMS, ids=str)
@pytest.mark.parametrize("case", some(STREAMS, "in-process", "sized-workers"))
def test_lightning_streams(case: str, stops: tuple[int, ...], tmp_path: Path) -> None:
    """So it does in Lightning, which fetches a batch ahead where it knows of no length."""
    make = functools.partial(stream, *STREAMS[case])
    check(functools.partial(fit, train=make, val=loader), tmp_path, stops=stops)


class Recent(IterableDataset[Any]):
    """Draws from what has been put there as it is gone through."""

    def __init__(self, recent: list[float]) -> None:
        self.recent = recent

    def __iter__(self) -> Iterator[Any]:
        for _ in range(SAMPLES):
            x = torch.full((4,), random.choice(self.recent)) + torch.rand(4)
            yield x, x.sum()


class Remembering(Net):
    """Keeps losses, from which the data are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.recent = [0.5]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.recent.append(float(loss.detach()))
        return loss

    def train_dataloader(self) -> Any:
        return DataLoader(Recent(self.recent), SIZE)

    def val_dataloader(self) -> Any:
        return loader()


class Crash(Callback):
    """Ends a process after some batches."""

    def __init__(self, batches: int) -> None:
        self._batches = batches

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self._batches:
            raise InterruptedError


@pytest.mark.parametrize("crash", some([2, BATCHES + 3, 3 * BATCHES + 2], BATCHES + 3))
def test_a_stream_that_the_training_feeds(crash: int, tmp_path: Path) -> None:
    """A run over it is stored between its epochs, since what it gave cannot be had again."""
    train = functools.partial(fit, net=Remembering, train=None, val=None)
    plain, trace = Trace(), Trace()
    train(None, plain)
    session = FakeSession(checkpoint_dir=tmp_path)
    with pytest.raises(InterruptedError):
        train(session, trace, callbacks=lambda: [Crash(crash)])
    assert session.checkpoints or crash < 2 * BATCHES
    train(session.again(), trace)
    assert [key for key in plain.seen if trace.seen[key] != plain.seen[key]] == []


class Shrinking(IterableDataset[Any]):
    """Has fewer samples whenever it is made again."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def __iter__(self) -> Iterator[Any]:
        points = Points()
        return (points[index] for index in range(SAMPLES // self.made))


def test_a_stream_that_gives_less_than_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that cannot be brought back to its batch says so, and does not end its epoch."""
    monkeypatch.setattr(Shrinking, "made", 0)
    train = functools.partial(loop, train=lambda: DataLoader(Shrinking(), SIZE), val=loader)
    session = FakeSession({BATCHES - 1: "disk"}, checkpoint_dir=tmp_path)
    with pytest.raises(Suspended):
        train(session, Trace())
    with pytest.raises(CheckpointError, match=r"6 batches of Shrinking, which ends after 4 now"):
        train(session.again(), Trace())


IN_EPOCHS = [
    *[pytest.param(each, marks=pytest.mark.slow) for each in ((3,), (BATCHES - 1, 1, 1))],
    (BATCHES, 1, BATCHES - 2),
]


@pytest.mark.parametrize("stops", IN_EPOCHS, ids=str)
@pytest.mark.parametrize("name", some(WORKERS, "3-workers-ahead-4-persistent"))
@pytest.mark.parametrize("wrap", [by_fabric, by_accelerate])
def test_wrapped_loaders(
    wrap: Callable[..., Any], name: str, stops: tuple[int, ...], tmp_path: Path
) -> None:
    """Loaders of Fabric and Accelerate, which fetch later, or earlier, than their own loaders."""
    make = functools.partial(wrap, functools.partial(loader, ALL, **WORKERS[name]))
    check(functools.partial(loop, train=make, val=make), tmp_path, stops=stops)


@pytest.mark.parametrize("sampler", some(SAMPLERS, "shared-generator", "balanced"))
@pytest.mark.parametrize("wrap", [by_fabric, by_accelerate])
def test_wrapped_samplers(wrap: Callable[..., Any], sampler: str, tmp_path: Path) -> None:
    """Samplers and generators of the user's own in such loaders."""
    make = functools.partial(wrap, functools.partial(loader, "torch", make=SAMPLERS[sampler]))
    check(functools.partial(loop, train=make, val=make), tmp_path, stops=(BATCHES + 3, 2, 2))


@pytest.mark.parametrize("wrap", [by_fabric, by_accelerate])
def test_wrapped_loaders_in_turn(wrap: Callable[..., Any], tmp_path: Path) -> None:
    """One that has not been trained on when the trial is stored has no epochs to restore."""

    def train(session: FakeSession | None, trace: Trace) -> None:
        seed_all(1)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        make = functools.partial(loader, "torch", make=SAMPLERS["generator"])
        loaders = [wrap(make), wrap(make)]
        run = PyTorchLoop(new_trial(), {"model": model, "optimizer": optimizer}, session)
        for epoch in run.epochs(EPOCHS):
            for x, y in run.batches(loaders[epoch % 2]):
                loss = nn.functional.mse_loss(model(x).squeeze(-1), y)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                trace.note((epoch, run.batch), loss)
                if session is not None:
                    session.tick()
            run.report(float(loss.detach()))

    check(train, tmp_path, stops=(3, BATCHES))


def test_accumulating_with_accelerate(tmp_path: Path) -> None:
    """An ``Accelerator`` counts the batches between two steps of the optimizer."""

    def train(session: FakeSession | None, trace: Trace) -> None:
        seed_all(1)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        made = (model, torch.optim.Adam(model.parameters(), lr=0.05), loader("torch"))
        model, optimizer, batches = accelerator.prepare(*made)
        run = PyTorchLoop(new_trial(), {"model": model, "optimizer": optimizer}, session)
        for epoch in run.epochs(EPOCHS):
            for x, y in run.batches(batches):
                with accelerator.accumulate(model):
                    loss = nn.functional.mse_loss(model(x).squeeze(-1), y)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                trace.note((epoch, run.batch), loss)
                if session is not None:
                    session.tick()
            run.report(float(loss.detach()))

    check(train, tmp_path, stops=(BATCHES + 1, 3, 1))


def scaled_by_accelerate(scaler: Any) -> tuple[Any, ...]:
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = scaler
    return accelerator.prepare, accelerator.backward


def scaled_by_fabric(scaler: Any) -> tuple[Any, ...]:
    precision = MixedPrecision("16-mixed", "cpu", scaler)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[precision])

    def prepare(model: Any, optimizer: Any, batches: Any) -> tuple[Any, ...]:
        return *fabric.setup(model, optimizer), fabric.setup_dataloaders(batches)

    return prepare, fabric.backward


@pytest.mark.parametrize("setup", [scaled_by_accelerate, scaled_by_fabric])
def test_gradient_scalers_that_nobody_names(setup: Callable[..., Any], tmp_path: Path) -> None:
    """Accelerate and Fabric hold theirs apart from what they return."""

    def train(session: FakeSession | None, trace: Trace) -> None:
        seed_all(1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
        prepare, backward = setup(scaler)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        made = (model, torch.optim.Adam(model.parameters(), lr=0.05), loader("torch"))
        model, optimizer, batches = prepare(*made)
        run = PyTorchLoop(new_trial(), {"model": model, "optimizer": optimizer}, session)
        for epoch in run.epochs(EPOCHS):
            for x, y in run.batches(batches):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x).squeeze(-1).float(), y)
                backward(loss)
                optimizer.step()
                trace.note((epoch, run.batch), loss)
                trace.note(("scale", epoch, run.batch), scaler.get_scale())
                if session is not None:
                    session.tick()
            run.report(float(loss.detach()))

    check(train, tmp_path, stops=(BATCHES + 1, 3, 1))


# -- in another process -------------------------------------------------------------------------

PERSISTENT = WORKERS["3-workers-ahead-4-persistent"]
PROCESSES: dict[str, Train] = {
    "lightning": functools.partial(
        fit,
        train=functools.partial(loader, ALL, **PERSISTENT),
        val=functools.partial(loader, ALL, **PERSISTENT),
    ),
    "steps": functools.partial(fit, **LIGHTNING["steps-persistent"]),
    "rates": functools.partial(fit, **LIGHTNING["sizes-rates"]),
    "pruned": functools.partial(fit, **LIGHTNING["pruned"]),
    "loop": functools.partial(
        loop,
        train=functools.partial(loader, ALL, **PERSISTENT),
        val=functools.partial(loader, ALL, **PERSISTENT),
    ),
}


@pytest.mark.slow
def test_new_process(tmp_path: Path) -> None:
    """A run goes on in another process as in its first one."""
    plain = {name: Trace() for name in PROCESSES}
    traces = {name: Trace() for name in PROCESSES}
    for name, train in PROCESSES.items():
        train(None, plain[name])
        folder = tmp_path / name
        session = FakeSession({BATCHES + 3: "disk"}, checkpoint_dir=folder)
        with pytest.raises(Suspended):
            train(session, traces[name])
        state = asdict(session.checkpoints[0])
        (folder / "state.json").write_text(json.dumps(state))
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name, trace in traces.items():
        rest = torch.load(tmp_path / name / "trace.pt", weights_only=True)
        assert {**trace.seen, **rest} == plain[name].seen, name


def main(folder: Path) -> None:
    """Go on from the checkpoints in ``folder``, and write down the rest of each run."""
    torch.set_num_threads(1)
    for name, train in PROCESSES.items():
        state = json.loads((folder / name / "state.json").read_text())
        stored = Checkpoint(**state)
        trace = Trace()
        train(FakeSession(checkpoint_dir=folder / name, checkpoints=(stored,)), trace)
        torch.save(trace.seen, folder / name / "trace.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
