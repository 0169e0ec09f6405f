"""A Lightning run goes on with another number of devices, and trains every sample once."""

from __future__ import annotations

import functools
import json
import random
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import optuna
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from optuna_hermes.errors import InvalidInputError, MonitorError, Suspended
from optuna_hermes.lightning import HermesCallback
from optuna_hermes.testing import FakeSession
from support.sessions import RankedSession

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

SAMPLES = 40
BATCH = 8
EPOCHS = 3
INSTANT = timedelta(microseconds=1)


class Points(Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """Samples that know their numbers."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self._x = torch.randn(SAMPLES, 6, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return index, self._x[index], self._x[index].sum().sign()


class Net(pl.LightningModule):
    """Without dropout it trains the same whatever the number of devices; it counts samples."""

    def __init__(self, dropout: float, sync_dist: bool) -> None:
        super().__init__()
        self.sync_dist = sync_dist
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 1))
        self.mean_index = MeanMetric()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        numbers, x, y = batch
        loss = nn.functional.mse_loss(self.net(x)[:, 0], y)
        self.mean_index.update(numbers.double())
        self.log("mean_index", self.mean_index, on_step=False, on_epoch=True)
        self.log("train_index", numbers.double().mean(), on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        _, x, y = batch
        loss = nn.functional.mse_loss(self.net(x)[:, 0], y)
        self.log("val_loss", loss, sync_dist=self.sync_dist)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        steps = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, total_steps=EPOCHS * SAMPLES // BATCH
        )
        return [optimizer], [{"scheduler": steps, "interval": "step"}]


class Watch(Callback):
    """Writes down which samples each process trained, and what became of them."""

    def __init__(self, folder: Path, session: RankedSession, seed: int) -> None:
        self._folder = folder
        self._session = session
        self._seed = seed

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        random.seed(self._seed + trainer.global_rank)
        torch.manual_seed(self._seed + trainer.global_rank)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        loss = float(outputs["loss"]).hex()
        line = [trainer.current_epoch, trainer.global_step, loss, batch[0].tolist()]
        with (self._folder / f"rank-{trainer.global_rank}.txt").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if trainer.is_global_zero:
            self._session.trained(wait=len(self._session.devices) > 1)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            means = [float(trainer.callback_metrics[key]) for key in ("train_index_epoch",)]
            with (self._folder / "means.txt").open("a") as file:
                file.write(json.dumps([trainer.current_epoch, *means]) + "\n")

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            weights = {k: v.tolist() for k, v in pl_module.state_dict().items() if "net" in k}
            (self._folder / "weights.json").write_text(json.dumps(weights))


def train(
    session: RankedSession,
    folder: Path,
    *,
    seed: int,
    dropout: float = 0.0,
    sync_dist: bool = True,
    **options: Any,
) -> HermesCallback:
    """One process of a trial; a new one starts with other random numbers."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = Net(dropout, sync_dist)
    torch.manual_seed(seed)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    trial = optuna.create_study().ask()
    hermes = HermesCallback(trial, "val_loss", max_devices=2, _session=session)
    folder.mkdir(parents=True, exist_ok=True)
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[hermes, Watch(folder, session, seed)],
        **{**hermes.trainer_options, **options},
    )
    batches = DataLoader(Points(), batch_size=BATCH, shuffle=True)
    trainer.fit(model, batches, DataLoader(Points(), batch_size=BATCH))
    return hermes


def story(
    folder: Path, parts: list[tuple[int, int | None]], first_seed: int = 1, **options: Any
) -> list[list[list[Any]]]:
    """A run in several processes, each with its number of devices and of batches.

    Returns:
        What each rank did: epoch, step, loss and samples of each batch.
    """
    session = None
    for index, (count, batches) in enumerate(parts):
        known = () if session is None else session.checkpoints
        session = RankedSession(
            None if batches is None else {batches: "disk"},
            checkpoint_dir=folder / "run",
            checkpoints=known,
            devices=tuple(f"cpu:{place}" for place in range(count)),
        )
        seed = first_seed if index == 0 else 100 * index + first_seed
        if batches is None:
            train(session, folder / "seen", seed=seed, **options)
        else:
            with pytest.raises(Suspended):
                train(session, folder / "seen", seed=seed, **options)
    files = sorted((folder / "seen").glob("rank-*.txt"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


@pytest.fixture(autouse=True)
def _no_child_left() -> Any:
    before = set(psutil.Process().children(recursive=True))  # of other tests
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


CHANGES: list[tuple[int, int | None]] = [(1, 3), (2, 5), (1, None)]
"""One device until the middle of epoch 0, two for six batches, then one again.

Two processes stop one batch after they were asked to.
"""


@functools.cache
def changed(folder: Path) -> list[list[list[Any]]]:
    return story(folder, CHANGES, dropout=0.3)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("changed")


def test_every_sample_once(shared: Path) -> None:
    """Whatever the number of devices, the samples of an epoch are trained once each."""
    ranks = changed(shared)
    assert {epoch for epoch, _, _, _ in ranks[1]} == {0, 1}, "two devices in both epochs"
    for epoch in range(EPOCHS):
        seen = Counter(n for lines in ranks for e, _, _, its in lines if e == epoch for n in its)
        assert seen == Counter(range(SAMPLES))
    assert [step for _, step, _, _ in ranks[0]] == list(range(1, EPOCHS * SAMPLES // BATCH + 1))


def test_the_same_changes_give_the_same_losses(shared: Path, tmp_path: Path) -> None:
    """Suspensions between the changes leave no trace, also with dropout in each process."""
    parts: list[tuple[int, int | None]] = [(1, 1), (1, 2), (2, 2), (2, 2), (1, 2), (1, None)]
    assert story(tmp_path, parts, dropout=0.3) == changed(shared)


def test_what_is_trained_hardly_depends_on_the_number(tmp_path: Path) -> None:
    """Without random numbers in the model only the order of additions differs."""
    weights = []
    for name, parts in {"one": [(1, None)], "changed": CHANGES}.items():
        folder = tmp_path / name
        story(folder, parts)
        weights.append(json.loads((folder / "seen" / "weights.json").read_text()))
        means = [json.loads(x)[1] for x in (folder / "seen" / "means.txt").read_text().splitlines()]
        assert means == pytest.approx([(SAMPLES - 1) / 2] * EPOCHS), "of all samples of an epoch"
    for name, values in weights[0].items():
        assert torch.allclose(torch.tensor(values), torch.tensor(weights[1][name]), atol=1e-4)


def test_a_trainer_with_other_devices_is_refused(tmp_path: Path) -> None:
    """Whoever forgets the options is told, with one device and with two."""
    session = RankedSession(devices=("cpu:0", "cpu:1"), checkpoint_dir=tmp_path)
    with pytest.raises(InvalidInputError, match="lease has 2, and the Trainer was given 1"):
        train(session, tmp_path / "seen", seed=1, devices=1, strategy="auto")


def test_each_process_with_a_value_of_its_own_is_refused(tmp_path: Path) -> None:
    """A trial says what it may have; its value must not be that of a part of the data."""
    session = RankedSession(devices=("cpu:0", "cpu:1"), checkpoint_dir=tmp_path / "run")
    with pytest.raises(MonitorError, match="sync_dist=True"):
        train(session, tmp_path / "seen", seed=1, sync_dist=False)
    said = session.stretched[-1]
    assert (said.now, said.most_devices, said.unit_samples) == (BATCH, 2, SAMPLES)
    assert session.reports == []


@pytest.mark.parametrize(
    ("options", "samples"),
    [
        ({"limit_train_batches": 0.5}, 2 * BATCH),
        ({"val_check_interval": 0.4}, SAMPLES // 2),
        ({"val_check_interval": 2, "check_val_every_n_epoch": 2}, SAMPLES),
        ({"val_check_interval": 2, "check_val_every_n_epoch": None}, 2 * BATCH),
        ({"val_check_interval": INSTANT, "check_val_every_n_epoch": None}, None),
    ],
)
def test_a_unit_is_so_many_samples(
    options: dict[str, Any], samples: int | None, tmp_path: Path
) -> None:
    """Of an epoch, or between two validations, however many there are in one."""
    session = RankedSession({5: "resident", 12: "resident"}, devices=("cpu:0",))
    train(session, tmp_path, seed=1, **options)
    assert session.reports
    assert session.stretched[-1].unit_samples == samples


def test_options_that_exclude_each_other() -> None:
    """Batches or devices change, not both; and there is a device at least."""
    trial = optuna.create_study().ask()
    with pytest.raises(InvalidInputError, match="choose one"):
        HermesCallback(trial, "loss", elastic_batch=(1, 8), max_devices=2)
    for most in (0, 1.5, True):
        with pytest.raises(InvalidInputError, match="whole number of 1 or more"):
            HermesCallback(trial, "loss", max_devices=most)  # type: ignore[arg-type]


def test_options_of_the_trainer() -> None:
    """Without a broker those of any trainer; GPUs are named as such."""
    trial = optuna.create_study().ask()
    alone = HermesCallback(trial, "loss", max_devices=4)
    assert alone.trainer_options == {"accelerator": "auto", "devices": 1, "strategy": "auto"}
    session = FakeSession(devices=("GPU-a", "GPU-b"))
    both = HermesCallback(trial, "loss", max_devices=4, _session=session)
    assert both.devices == 2
    assert both.trainer_options == {"accelerator": "gpu", "devices": 2, "strategy": "ddp_fork"}
