"""A Lightning run in two processes is suspended as one, and comes back bit for bit.

As a script, this file is the next process of a run: ``test_lightning_ddp.py FOLDER SEED``.
"""

from __future__ import annotations

import copy
import functools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import optuna
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from optuna_hermes import HermesPruner, HermesSampler, optimize
from optuna_hermes._lightning._fit_loaders import FitLoaders
from optuna_hermes.errors import (
    CheckpointError,
    InvalidInputError,
    MonitorError,
    Suspended,
    SuspendError,
)
from optuna_hermes.lightning import HermesCallback
from optuna_hermes.model import Checkpoint, TierName
from optuna_hermes.suspend._tiers._saver import is_first
from optuna_hermes.testing import FakeSession
from support.sessions import RankedSession

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

RANKS = 2
BATCHES = 12
EPOCHS = 3
MANY_EPOCHS = 9
Lines = dict[str, str]


class Points(Dataset[tuple[torch.Tensor, int]]):
    """Data that every generator of random numbers has a hand in."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self._x = torch.randn(length, 6, generator=generator)
        self._y = (self._x[:, 0] > 0).long()

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.randn(6) + np.random.normal() + random.gauss(0, 1)
        return self._x[index] + 0.1 * noise, int(self._y[index])


class Net(pl.LightningModule):
    """Network whose parts differ by rank: running statistics, dropout, metrics, an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 2)
        )
        self.mean_loss = MeanMetric()
        self.smoothed = 0.0

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y) + 0.001 * self.smoothed
        self.smoothed = 0.9 * self.smoothed + 0.1 * float(loss.detach())
        self.mean_loss(loss.detach())
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("mean_loss", self.mean_loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(x), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        steps = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, MANY_EPOCHS * BATCHES)
        return [optimizer], [{"scheduler": steps, "interval": "step"}]


class Watch(Callback):
    """Writes down, to the bit, what each rank does, and may hurt it."""

    def __init__(
        self, folder: Path, session: FakeSession, seed: int, hurt: Callable[[int, int], None]
    ) -> None:
        self._folder = folder
        self._session = session
        self._seed = seed
        self._hurt = hurt

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        seed = 10 * self._seed + trainer.global_rank
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any
    ) -> None:
        batch = trainer.fit_loop.total_batch_idx
        assert isinstance(pl_module, Net)
        self._note(trainer, f"loss {batch}", pl_module.smoothed)
        if trainer.is_global_zero and isinstance(self._session, RankedSession):
            self._session.trained()
        self._hurt(trainer.global_rank, batch)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._note_all(trainer, f"{trainer.global_step}", dict(trainer.callback_metrics))

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._note_all(trainer, "end", pl_module.state_dict())
        self._note_all(trainer, "end", dict(trainer.callback_metrics))
        self._note(trainer, "end drawn", torch.rand(1) + np.random.normal() + random.random())

    def _note_all(self, trainer: pl.Trainer, at: str, values: dict[str, Any]) -> None:
        for name, value in values.items():
            self._note(trainer, f"{at} {name}", value)

    def _note(self, trainer: pl.Trainer, key: str, value: Any) -> None:
        bits = torch.as_tensor(value, dtype=torch.float64).numpy().tobytes().hex()
        with (self._folder / f"rank-{trainer.global_rank}.txt").open("a") as file:
            file.write(json.dumps([key, bits]) + "\n")


def seen(folder: Path) -> list[Lines]:
    """Return the record of each rank; a batch that was trained again must be the same."""
    found: list[Lines] = []
    for rank in range(RANKS):
        lines: Lines = {}
        for line in (folder / f"rank-{rank}.txt").read_text().splitlines():
            key, bits = json.loads(line)
            assert lines.setdefault(key, bits) == bits, f"trained again, {key} is another one"
        found.append(lines)
    assert found[0]["loss 3"] != found[1]["loss 3"], "ranks must differ"
    return found


def new_trial(**options: Any) -> optuna.Trial:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(**options).ask()


def train(
    session: FakeSession | None,
    folder: Path,
    *,
    seed: int = 1,
    trial: optuna.Trial | None = None,
    monitor: str = "val_loss",
    forward_sync_buffers: bool = True,
    hurt: Callable[[int, int], None] = lambda rank, batch: None,
    others: tuple[Callback, ...] = (),
    stopping: str = "val_loss",
    **options: Any,
) -> HermesCallback:
    """One process of a run, with its ranks; a new one starts with other random numbers."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = Net()
    if session is None or not session.checkpoints:
        seed = 1
    torch.manual_seed(seed)
    hermes = HermesCallback(trial or new_trial(), monitor, _session=session)
    folder.mkdir(exist_ok=True)
    settings: dict[str, Any] = {
        "max_epochs": EPOCHS,
        "accelerator": "cpu",
        "devices": RANKS,
        "strategy": DDPStrategy(start_method="fork", forward_sync_buffers=forward_sync_buffers),
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [
            hermes,
            EarlyStopping(stopping, patience=MANY_EPOCHS),
            Watch(folder, session or FakeSession(), seed, hurt),
            *others,
        ],
    }
    batches = DataLoader(Points(BATCHES * 4 * RANKS), batch_size=4, shuffle=True)
    validation = DataLoader(Points(16), batch_size=4)
    pl.Trainer(**{**settings, **options}).fit(model, batches, validation)
    return hermes


def suspended(session: RankedSession, folder: Path, **options: Any) -> RankedSession:
    """Train until the run is put on disk, and give the session of its next process."""
    with pytest.raises(Suspended):
        train(session, folder, **options)
    return session.next()


@pytest.fixture(autouse=True)
def _no_child_left() -> Any:
    before = set(psutil.Process().children(recursive=True))  # of other tests
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


@functools.cache
def _expected(folder: Path, options: tuple[tuple[str, Any], ...]) -> list[Lines]:
    train(FakeSession(), folder, **dict(options))
    return seen(folder)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Lines]]:
    """Function that returns the records of the ranks of a run that is never suspended."""
    root = tmp_path_factory.mktemp("expected")
    return lambda **options: _expected(root / repr(options), tuple(options.items()))


def test_resident(tmp_path: Path, expected: Any) -> None:
    """Two ranks that wait in their processes, several times, go on as if they had not."""
    yields: dict[int, TierName] = dict.fromkeys((1, 5, 9, 12, 20), "resident")
    session = RankedSession(yields, checkpoint_dir=tmp_path / "run")
    hermes = train(session, tmp_path / "seen")
    assert session.parks == ["resident"] * 5
    assert seen(tmp_path / "seen") == expected()
    assert hermes.value is not None
    assert session.reports[-1] == (EPOCHS, EPOCHS, hermes.value)
    assert [state.units for state in session.states] == [1, 2], "not after the last batch"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 4},
        {"val_check_interval": 0.5},
        {"forward_sync_buffers": False},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_disk(options: dict[str, Any], tmp_path: Path, expected: Any) -> None:
    """Three suspensions to disk, each resumed with other random numbers, leave no trace."""
    session = RankedSession({5: "disk"}, checkpoint_dir=tmp_path / "run")
    for seed, after in ((2, 4), (3, 9)):
        session = suspended(session, tmp_path / "seen", seed=seed, **options).next({after: "disk"})
    session = suspended(session, tmp_path / "seen", seed=4, **options)
    train(session, tmp_path / "seen", seed=5, **options)
    assert seen(tmp_path / "seen") == expected(**options)
    assert is_first(tmp_path, "Net.forward")  # which DDP puts over itself: no rank warns of it


def test_a_hundred_steps(tmp_path: Path, expected: Any) -> None:
    """A longer run leaves no trace either, over memory, disk, and both in turn."""
    options = {"max_epochs": MANY_EPOCHS}
    session = RankedSession({20: "resident", 41: "disk"}, checkpoint_dir=tmp_path / "run")
    session = suspended(session, tmp_path / "seen", **options).next({9: "disk"})
    session = suspended(session, tmp_path / "seen", seed=2, **options)
    session = session.next({10: "resident", 11: "resident", 33: "disk"})
    session = suspended(session, tmp_path / "seen", seed=3, **options)
    train(session, tmp_path / "seen", seed=4, **options)
    traces = seen(tmp_path / "seen")
    assert sum(name.startswith("loss ") for name in traces[1]) == MANY_EPOCHS * BATCHES == 108
    assert traces == expected(**options)


def test_evicted(tmp_path: Path, expected: Any) -> None:
    """Ranks that wait in their processes can be put on disk later."""
    session = RankedSession({7: "resident"}, checkpoint_dir=tmp_path / "run", evicts=("disk",))
    session = suspended(session, tmp_path / "seen")
    train(session, tmp_path / "seen", seed=2)
    assert seen(tmp_path / "seen") == expected()


@pytest.mark.slow  # test_lightning_exact has one of a single rank
def test_new_process(tmp_path: Path, expected: Any) -> None:
    """The ranks of another process, with another seed, go on as those of the first."""
    session = RankedSession({15: "disk"}, checkpoint_dir=tmp_path / "run")
    session = suspended(session, tmp_path / "seen")
    state = asdict(session.checkpoints[0])
    (tmp_path / "state.json").write_text(json.dumps(state))
    path = os.pathsep.join(map(str, Path(__file__).parents[1:3]))
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path), "99"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert seen(tmp_path / "seen") == expected()


def test_logs(tmp_path: Path) -> None:
    """The file of a logger is written by rank 0 alone, and goes on where it was."""

    def options(name: str) -> dict[str, Any]:
        return {"logger": CSVLogger(str(tmp_path / name)), "log_every_n_steps": 1}

    train(FakeSession(), tmp_path / "seen", **options("whole"))
    session = RankedSession({15: "disk"}, checkpoint_dir=tmp_path / "run")
    session = suspended(session, tmp_path / "seen", **options("parts"))
    train(session, tmp_path / "seen", **options("parts"))
    (whole,) = (tmp_path / "whole").rglob("metrics.csv")
    (parts,) = (tmp_path / "parts").rglob("metrics.csv")
    assert parts.read_text() == whole.read_text()


class Reads(Callback):
    """Begins to read something in each epoch, in rank 0 alone."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            self.lines = iter(["one", "two"])


class Averages(Callback):
    """Keeps an average of the weights, in rank 0 alone."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            pl_module.averages = [copy.deepcopy(pl_module.net)]


class AddsCallback(Callback):
    """Gives the trainer another callback, in rank 0 alone."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero and trainer.current_epoch == 0:
            trainer.callbacks.append(Callback())


@pytest.mark.parametrize("other", [Reads, Averages, AddsCallback])
def test_what_one_rank_cannot_store_keeps_all_in_memory(
    other: type[Callback], tmp_path: Path, expected: Any
) -> None:
    """The others neither write a checkpoint without it nor wait for it."""
    session = RankedSession({5: "disk", 20: "disk"}, checkpoint_dir=tmp_path / "run")
    train(session, tmp_path / "seen", others=(other(),), val_check_interval=0.5)
    assert session.parks == ["resident"] * 2
    assert session.checkpoints == ()
    assert seen(tmp_path / "seen") == expected(val_check_interval=0.5)


def test_what_one_rank_can_store_later_is_stored_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its stream of data in the middle of an epoch: the unit is saved after that epoch."""

    def can_store_here(loaders: FitLoaders) -> bool:
        loop = loaders._trainer.fit_loop
        return loaders._trainer.is_global_zero or loop.total_batch_idx >= 2 * BATCHES - 1

    monkeypatch.setattr(FitLoaders, "can_store_here", can_store_here)
    session = RankedSession(checkpoint_dir=tmp_path / "run")
    train(session, tmp_path / "seen", val_check_interval=0.5)
    assert [state.units for state in session.states] == [4, 5]


def test_a_metric_of_one_rank_alone_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its value is no unit of the others, which would wait for that rank in the next batch."""

    def log(net: Net, batch: list[torch.Tensor], batch_idx: int) -> None:
        net.log("loss", 1.0, sync_dist=True)
        if net.trainer.is_global_zero:
            net.log("val_loss", 1.0, rank_zero_only=True)

    monkeypatch.setattr(Net, "validation_step", log)
    options = {"val_check_interval": 0.5, "num_sanity_val_steps": 0}
    with pytest.raises(MonitorError, match="only some have logged it"):
        train(None, tmp_path / "seen", stopping="loss", **options)


def test_a_metric_of_one_rank_alone_is_said_after_an_epoch(tmp_path: Path) -> None:
    """Also where no validation has been, which the others could still log it in."""

    class OfOne(Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            if trainer.is_global_zero:
                pl_module.log("epochs", 1.0, rank_zero_only=True)

    options = {"check_val_every_n_epoch": EPOCHS, "num_sanity_val_steps": 0}
    with pytest.raises(MonitorError, match="only some have logged it"):
        train(None, tmp_path / "seen", monitor="epochs", others=(OfOne(),), **options)


def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    """A run that two ranks have stored is not resumed by one."""
    session = RankedSession({3: "disk"}, checkpoint_dir=tmp_path / "run")
    session = suspended(session, tmp_path / "seen")
    with pytest.raises(CheckpointError, match="these were 2 and now are 1"):
        train(session, tmp_path / "seen", devices=1)


def test_without_a_session(tmp_path: Path, expected: Any) -> None:
    """Under plain Optuna the trial gets each value once, and the objective the last one."""
    trial = new_trial()
    hermes = train(None, tmp_path / "seen", trial=trial)
    assert seen(tmp_path / "seen") == expected()
    reported = trial.study.trials[0].intermediate_values
    assert sorted(reported) == [1, 2, 3]
    assert hermes.value == reported[3]


def test_pruned(tmp_path: Path) -> None:
    """A pruned trial ends all ranks, and the objective sees why."""
    trial = new_trial(pruner=optuna.pruners.ThresholdPruner(upper=-1.0, n_warmup_steps=2))
    with pytest.raises(optuna.TrialPruned, match="Pruned after unit 2"):
        train(RankedSession(checkpoint_dir=tmp_path / "run"), tmp_path / "seen", trial=trial)


def test_a_metric_that_is_not_logged_is_said(tmp_path: Path) -> None:
    """The error of the ranks is the error of ``fit``."""
    with pytest.raises(MonitorError, match="accuracy"):
        train(RankedSession(), tmp_path / "seen", monitor="accuracy")


def test_an_error_of_one_rank_ends_all(tmp_path: Path) -> None:
    """An error of the user's code in one rank reaches the objective as it was."""

    def hurt(rank: int, batch: int) -> None:
        if (rank, batch) == (1, 4):
            raise LookupError("rank 1 has had enough")

    with pytest.raises(LookupError, match="had enough"):
        train(RankedSession(checkpoint_dir=tmp_path / "run"), tmp_path / "seen", hurt=hurt)


def test_a_rank_that_is_killed_ends_those_that_wait(tmp_path: Path, wait_for: Any) -> None:
    """Nobody waits for ever, and it is not taken for an error of the user's code."""
    others = psutil.Process().children()  # servers that other tests use

    def kill() -> None:
        ranks = [child for child in psutil.Process().children() if child not in others]
        ranks[1].kill()
        wait_for(lambda: not any(rank.is_running() for rank in ranks), 20)

    session = RankedSession({3: "resident"}, checkpoint_dir=tmp_path / "run", while_parked=kill)
    with pytest.raises(SuspendError, match="SIGKILL"):
        train(session, tmp_path / "seen")


def test_ranks_end_with_the_process_that_started_them(tmp_path: Path, wait_for: Any) -> None:
    """A worker that is killed leaves nobody behind."""
    parked = multiprocessing.get_context("fork").Event()

    def park() -> None:
        parked.set()
        signal.pause()

    session = RankedSession({3: "resident"}, while_parked=lambda: park())
    worker = multiprocessing.get_context("fork").Process(
        target=train, args=(session, tmp_path / "seen")
    )
    worker.start()
    assert parked.wait(30)
    ranks = psutil.Process(worker.pid).children()
    assert len(ranks) == RANKS
    worker.kill()
    worker.join()
    wait_for(lambda: not any(rank.is_running() for rank in ranks), 10)


def test_a_strategy_that_runs_the_script_again_is_refused(tmp_path: Path) -> None:
    """Before any process is started the message says which strategy to use."""
    with pytest.raises(InvalidInputError, match="ddp_fork"):
        train(RankedSession(), tmp_path / "seen", strategy="ddp")


def objective(trial: optuna.Trial) -> float | None:
    """Trains in two ranks on one CPU slot."""
    trial.suggest_float("x", 0, 1)
    hermes = HermesCallback(trial, "val_loss")
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp_fork",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[hermes],
    )
    batches = DataLoader(Points(BATCHES * 4 * RANKS), batch_size=4, shuffle=True)
    trainer.fit(Net(), batches, DataLoader(Points(16), batch_size=4))
    return hermes.value


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_slicing_changes_no_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A study whose trials take turns, in memory and on disk, has the values of an unsliced one."""
    monkeypatch.setenv("MASTER_PORT", "29511")  # of an earlier fit in this process
    values: dict[str, list[float | None]] = {}
    for policy, budgets in {"fifo": [None], "round-robin": [1.0, None]}.items():
        study = optuna.create_study(
            storage=f"sqlite:///{tmp_path / policy}.db",
            sampler=HermesSampler(),
            pruner=HermesPruner(),
        )
        for device_seconds in budgets:
            result = optimize(
                study,
                f"{__file__}:objective",
                n_trials=3,
                device_seconds=device_seconds,
                devices="cpu:1",
                policy=policy,
                slice_seconds=0.1,
                seed=1,
                show_progress=False,
            )
            assert (result.unfinished > 0) == (device_seconds is not None)
        values[policy] = [trial.value for trial in result.trials]
    assert values["fifo"] == values["round-robin"]
    assert all(trial.state == "COMPLETE" for trial in result.trials)
    assert sum(trial.suspensions for trial in result.trials) >= 3


def main(folder: Path, seed: int) -> None:
    """Go on from the checkpoint described in ``folder``, and write down the rest of the run."""
    state = json.loads((folder / "state.json").read_text())
    stored = Checkpoint(**state)
    train(
        FakeSession(checkpoint_dir=folder / "run", checkpoints=(stored,)),
        folder / "seen",
        seed=seed,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
