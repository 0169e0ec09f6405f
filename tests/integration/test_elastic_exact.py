"""A run whose batch size changes is, suspended or not, bit for bit the same run."""

from __future__ import annotations

import copy
import itertools
import math
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import chain
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
    GradientAccumulationScheduler,
    ProgressBar,
    RichProgressBar,
    TQDMProgressBar,
)
from torch import nn
from torch.optim.lr_scheduler import (
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from optuna_hermes._lightning._schedules import unscalable
from optuna_hermes.errors import CheckpointError, InvalidInputError, Suspended
from optuna_hermes.lightning import HermesCallback
from optuna_hermes.model import TierName
from optuna_hermes.testing import FakeSession

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

SAMPLES = 90
FIRST = 8
EPOCHS = 3
STEPS = math.ceil(SAMPLES / FIRST) * EPOCHS
SIZES = {5: 16, 9: 5, 20: 32, 23: 8}
"""In each epoch, and at the beginning of one."""


class Points(Dataset[tuple[torch.Tensor, int, int]]):
    """Data that every generator of random numbers has a hand in, each sample with its number."""

    noisy = True

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self._x = torch.randn(length, 8, generator=generator)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        noise = torch.randn(8) + np.random.normal() + random.gauss(0, 1) if self.noisy else 0.0
        return self._x[index] + 0.1 * noise, int(self._x[index, 0] > 0), index


class Quiet(Points):
    """Data without random numbers."""

    noisy = False


class Net(pl.LightningModule):
    """A network with random numbers, running statistics and a schedule over steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 2)
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, STEPS)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Plain(Net):
    """Without a schedule, and without anything that sees which samples come together."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class MakesLoaders(Net):
    """Has a new loader for each epoch."""

    def train_dataloader(self) -> Any:
        return DataLoader(Points(SAMPLES), batch_size=FIRST, shuffle=True)


class Watch(Callback):
    """Record of a run: numbers of its samples, losses, rates, and its weights at the end."""

    def __init__(self, seen: dict[Any, Any], session: FakeSession | None) -> None:
        self._seen = seen
        self._session = session

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, at: int
    ) -> None:
        key = (trainer.current_epoch, at)
        assert key not in self._seen, "trained again"
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        self._seen[key] = (batch[2].tolist(), outputs["loss"].item(), lr)
        if self._session is not None:
            self._session.tick()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        weights = {name: value.tolist() for name, value in pl_module.state_dict().items()}
        self._seen["end"] = (weights, trainer.global_step, trainer.fit_loop.total_batch_idx)
        self._seen["value"] = float(trainer.callback_metrics["val_loss"])


def train(
    session: FakeSession | None,
    seen: dict[Any, Any] | None = None,
    *,
    net: type[Net] = Net,
    scaling: Any = "linear",
    elastic: tuple[int, int] | None = (4, 32),
    loader: dict[str, Any] | None = None,
    batches: Callable[[], Any] | None = None,
    params: dict[str, Any] | None = None,
    **options: Any,
) -> dict[Any, Any]:
    """One process of a run, with random numbers of its own if it is not the first."""
    seen = {} if seen is None else seen
    pl.seed_everything(1, verbose=False)
    model = net()
    kinds = {"data": Points(SAMPLES), "batch_size": FIRST, "shuffle": True, **(loader or {})}
    loaders = DataLoader(kinds.pop("data"), **kinds) if batches is None else batches()
    if session is not None and session.checkpoints:
        pl.seed_everything(5, verbose=False)
    study = optuna.create_study()
    study.enqueue_trial(params or {})
    trial = study.ask()
    for name, value in (params or {}).items():
        trial.suggest_int(name, 1, 2 * value)
    hermes = HermesCallback(
        trial, "val_loss", elastic_batch=elastic, batch_scaling=scaling, _session=session
    )
    given: dict[str, Any] = {
        "max_epochs": EPOCHS,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **options,
    }
    callbacks = [hermes, Watch(seen, session), *given.pop("callbacks", ())]
    pl.Trainer(callbacks=callbacks, **given).fit(
        model, loaders, DataLoader(Points(16), batch_size=8)
    )
    return seen


def scramble() -> None:
    """Others train in this process meanwhile."""
    pl.seed_everything(99, verbose=False)


def expected(sizes: dict[int, int] = SIZES, **options: Any) -> dict[Any, Any]:
    """Return the record of a run that is never suspended, and changes at the same points."""
    return train(FakeSession(batch_sizes=sizes), **options)


def stored(folder: Path, sizes: dict[int, int] = SIZES, **options: Any) -> dict[Any, Any]:
    """The same run, in another process from each change on."""
    seen: dict[Any, Any] = {}
    session = FakeSession({min(sizes): "disk"}, checkpoint_dir=folder)
    ends = [*list(sizes)[1:], None]
    for size, end in zip(sizes.values(), ends, strict=True):
        with pytest.raises(Suspended):
            train(session, seen, **options)
        yields: dict[int, TierName] = {} if end is None else {end - len(seen): "disk"}
        session = session.again(yields, {0: size})
    train(session, seen, **options)
    return seen


def samples(seen: dict[Any, Any], epoch: int) -> list[list[int]]:
    """The batches of an epoch."""
    return [value[0] for key, value in seen.items() if key[0] == epoch]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


CASES: dict[str, dict[str, Any]] = {
    "linear": {},
    "sqrt": {"scaling": "sqrt"},
    "accumulate": {"scaling": "accumulate"},
    "accumulate-more": {"scaling": "accumulate", "accumulate_grad_batches": 4},
    "linear-accumulated": {"accumulate_grad_batches": 2},
    "drop-last": {"loader": {"drop_last": True}},
    "in-order": {"loader": {"shuffle": False}},
    "own-generator": {"loader": {"generator": torch.Generator()}},
    "workers": {
        "loader": {"num_workers": 2, "multiprocessing_context": "fork", "data": Quiet(SAMPLES)}
    },
    "persistent": {
        "loader": {
            "num_workers": 1,
            "multiprocessing_context": "fork",
            "persistent_workers": True,
            "data": Quiet(SAMPLES),
        }
    },
    "limited": {"limit_train_batches": 10},
    "reloaded": {"reload_dataloaders_every_n_epochs": 1},
    "made-anew": {
        "reload_dataloaders_every_n_epochs": 1,
        "net": MakesLoaders,
        "batches": lambda: None,
    },
}


def generator_of(name: str) -> torch.Generator:
    """The one that a loader has of its own, if it has one."""
    found = CASES[name].get("loader", {}).get("generator", torch.Generator())
    assert isinstance(found, torch.Generator)
    return found


SIZES_OF = {"accumulate-more": {4: 16, 10: 5, 22: 32}}
"""Sizes of a case with four batches a step, whose second change has to wait for an epoch."""


def some(*usual: str) -> list[Any]:
    """Names of all cases, of which these are always tested and the others by hand."""
    slow = pytest.mark.slow
    return [pytest.param(name, marks=() if name in usual else slow) for name in CASES]


@pytest.mark.parametrize("name", some("linear", "accumulate", "drop-last", "own-generator"))
def test_disk(name: str, tmp_path: Path) -> None:
    """Another process after each change, and the losses, rates and weights are the same."""
    generator, sizes = generator_of(name), SIZES_OF.get(name, SIZES)
    generator.manual_seed(3)
    whole = expected(sizes, **CASES[name])
    generator.manual_seed(3)
    assert stored(tmp_path, sizes, **CASES[name]) == whole


@pytest.mark.parametrize("tier", ["resident", "host"])
@pytest.mark.parametrize("name", some("linear"))
def test_in_memory(name: str, tier: TierName, tmp_path: Path) -> None:
    """A run that waits in its process, and comes back with another size, goes on as it was."""
    generator, sizes = generator_of(name), SIZES_OF.get(name, SIZES)
    session = FakeSession(
        dict.fromkeys(sizes, tier),
        checkpoint_dir=tmp_path,
        while_parked=scramble,
        batch_sizes=sizes,
    )
    generator.manual_seed(3)
    seen = train(session, **CASES[name])
    generator.manual_seed(3)
    assert seen == expected(sizes, **CASES[name])
    assert session.parks == [tier] * len(sizes)


Step = tuple[int, TierName | None, int]
"""After how many batches the run is suspended, if it is, and which size it shall have then."""


def through(steps: list[Step], folder: Path, **options: Any) -> dict[Any, Any]:
    """A run that changes so, suspended or not, in as many processes as it takes."""
    seen: dict[Any, Any] = {}
    override, checkpoints = None, ()
    while True:
        later = {at - len(seen): (tier, size) for at, tier, size in steps if at > len(seen)}
        sizes = {at: size for at, (_, size) in later.items()}
        session = FakeSession(
            {at: tier for at, (tier, _) in later.items() if tier is not None},
            checkpoint_dir=folder,
            checkpoints=checkpoints,
            while_parked=scramble,
            batch_sizes=sizes if override is None else {0: override, **sizes},
        )
        try:
            return train(session, seen, **options)
        except Suspended:
            checkpoints = session.checkpoints
            override = max((at, size) for at, _, size in steps if at <= len(seen))[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "accumulate-more", "linear-accumulated", "drop-last"])
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    steps=st.lists(
        st.tuples(
            st.integers(1, 30),
            st.sampled_from([None, "resident", "host", "disk"]),
            st.integers(1, 40),
        ),
        min_size=3,
        max_size=12,
        unique_by=lambda step: step[0],
    ).map(sorted)
)
def test_any_changes(name: str, steps: list[Step]) -> None:
    """Whatever sizes it gets, wherever and in whatever tier it waits, it is the same run."""
    whole = expected({at: size for at, _, size in steps}, **CASES[name])
    with tempfile.TemporaryDirectory() as folder:
        assert through(steps, Path(folder), **CASES[name]) == whole


@pytest.mark.parametrize("name", some("linear"))
def test_nothing_changes_while_the_size_does_not(name: str) -> None:
    """A run that could have another size, and gets none, is the run without the option."""
    generator = generator_of(name)
    generator.manual_seed(3)
    elastic = train(FakeSession(), **CASES[name])
    generator.manual_seed(3)
    assert elastic == train(FakeSession(), **{**CASES[name], "elastic": None})


@pytest.mark.parametrize("name", ["linear", "limited", "made-anew"])
def test_no_sample_twice_and_none_lost(name: str) -> None:
    """Each epoch has its samples once, in the order of the sampler, whatever their batches."""
    seen, fixed = expected(**CASES[name]), train(FakeSession(), **CASES[name])
    for epoch in range(EPOCHS):
        batches = samples(seen, epoch)
        numbers = list(chain(*batches))
        assert numbers == list(chain(*samples(fixed, epoch)))
        assert len(set(numbers)) == len(numbers)
    sizes = [[len(batch) for batch in samples(seen, epoch)] for epoch in range(EPOCHS)]
    if name != "limited":
        assert sizes == [[8] * 5 + [16] * 3 + [2], [5] * 11 + [32, 3], [32] + [8] * 7 + [2]]


def test_the_last_samples_are_dropped_in_the_size_of_the_time() -> None:
    """With drop_last nothing but whole batches is trained; too few for one end no epoch early."""
    seen = expected({3: 20, 7: 32}, loader={"drop_last": True, "shuffle": False})
    sizes = [[len(batch) for batch in samples(seen, epoch)] for epoch in range(EPOCHS)]
    assert sizes == [[8] * 3 + [20] * 3, [20] + [32] * 2, [32] * 2]
    late = expected({10: 32}, loader={"drop_last": True, "shuffle": False})
    assert [len(batch) for batch in samples(late, 0)] == [8] * 11
    assert [len(batch) for batch in samples(late, 1)] == [32] * 2


@pytest.mark.parametrize("scaling", ["linear", "sqrt"])
def test_rates_follow(scaling: str) -> None:
    """The schedule of the rates is the same over the samples, times the quotient of the sizes."""
    seen, fixed = expected({6: 16, 14: 4}, scaling=scaling), train(FakeSession())
    rates = {key: value[2] for key, value in fixed.items() if isinstance(key, tuple)}
    by_samples = {(epoch, FIRST * (at + 1)): rate for (epoch, at), rate in rates.items()}
    compared = 0
    for epoch in range(EPOCHS):
        trained = 0
        for at, batch in enumerate(samples(seen, epoch)[:-1]):
            trained += len(batch)
            if (epoch, trained) in by_samples:
                quotient = len(batch) / FIRST
                factor = quotient if scaling == "linear" else math.sqrt(quotient)
                rate = by_samples[epoch, trained] * factor
                assert seen[epoch, at][2] == pytest.approx(rate, rel=1e-9)
                compared += 1
    assert compared > 20
    steps = seen["end"][1]
    assert steps == sum(len(samples(seen, epoch)) for epoch in range(EPOCHS)) > STEPS


def test_accumulation_keeps_the_step() -> None:
    """However small its batches are, a step takes the samples that it took, at the same rate."""
    options: dict[str, Any] = {"net": Plain, "loader": {"data": Quiet(64)}}
    fixed = train(FakeSession(), **options)
    seen = expected({1: 4, 8: 6, 11: 8, 14: 4}, scaling="accumulate", **options)
    assert {len(batch) for batch in samples(seen, 0)} == {8, 4}
    assert seen["end"][1] == fixed["end"][1] == 8 * EPOCHS
    for name, weights in seen["end"][0].items():
        torch.testing.assert_close(torch.tensor(weights), torch.tensor(fixed["end"][0][name]))


def test_limits() -> None:
    """An override beyond the limits gives the nearest size; what is told says which there are."""
    session = FakeSession(batch_sizes={2: 1, 5: 1000})
    seen = train(session, elastic=(4, 24))
    assert [len(batch) for batch in samples(seen, 0)][:6] == [8, 8, 4, 4, 4, 24]
    told = [(sizes.now, sizes.least, sizes.most) for sizes in session.stretched]
    assert [each for i, each in enumerate(told) if each not in told[:i]] == [
        (8, 4, 24),
        (4, 4, 24),
        (24, 4, 24),
    ]


def test_no_batch_of_one_sample() -> None:
    """A change waits, or takes the nearest size, where batch normalisation would raise."""
    seen = expected({3: 13, 16: 89}, elastic=(4, 90))
    sizes = [[len(batch) for batch in samples(seen, epoch)] for epoch in range(EPOCHS)]
    assert sizes == [[8] * 4 + [13] * 4 + [6], [13] * 6 + [12], [88, 2]]
    tried = expected({1: 64}, elastic=(4, 90), loader={"batch_size": 89}, net=Plain)
    assert [len(batch) for batch in samples(tried, 0)] == [89, 1]
    assert [len(batch) for batch in samples(tried, 1)] == [64, 26]


def test_speeds_are_measured() -> None:
    """The session is told the time of a batch, for each size that was trained."""
    session = FakeSession({15: "resident"}, batch_sizes={5: 16})
    train(session)
    seconds = session.stretched[-1].seconds
    assert set(seconds) == {8, 16}
    assert all(0 < each < 1 for each in seconds.values())


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_the_bar_knows_how_long_an_epoch_is(kind: type[ProgressBar]) -> None:
    """A change makes its epoch longer or shorter at once, and the next ones from their start."""
    bar, totals = kind(), []

    class Look(Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            totals.append(total_of(bar))

    train(FakeSession(batch_sizes={5: 16}), callbacks=(bar, Look()), enable_progress_bar=True)
    assert totals == [12] * 5 + [9] * 4 + [6] * 12


def total_of(bar: ProgressBar) -> float | None:
    """The number of batches that a bar shows."""
    if isinstance(bar, TQDMProgressBar):
        return bar.train_progress_bar.total
    assert isinstance(bar, RichProgressBar)
    assert bar.progress is not None
    assert bar.train_progress_bar_id is not None
    return bar.progress.tasks[bar.train_progress_bar_id].total


def test_a_unit_is_so_many_samples() -> None:
    """Of an epoch, or of as many as lie between two validations."""
    session = FakeSession()
    train(session, check_val_every_n_epoch=3)
    assert {sizes.unit_samples for sizes in session.stretched} == {SAMPLES}
    session = FakeSession({33: "resident"})
    train(session, check_val_every_n_epoch=2)
    assert [sizes.unit_samples for sizes in session.stretched][-1] == 2 * SAMPLES


def test_a_searched_size_stays() -> None:
    """A batch size that is a parameter of the trial is nobody else's to choose."""
    session = FakeSession(batch_sizes=SIZES)
    seen = train(session, params={"batch_size": FIRST})
    assert {len(batch) for batch in samples(seen, 0)[:-1]} == {FIRST}
    assert session.stretched == []
    other = train(FakeSession(batch_sizes=SIZES), params={"batch_size": 17, "width": FIRST})
    assert {len(batch) for batch in samples(other, 0)} > {FIRST, 16}


def test_who_does_not_ask_for_it_has_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the option its modules are not imported, and the loader keeps its own sampler."""
    monkeypatch.setitem(sys.modules, "optuna_hermes._lightning._elastic", None)
    seen = train(FakeSession(batch_sizes=SIZES), elastic=None)
    assert {len(batch) for batch in samples(seen, 0)[:-1]} == {FIRST}
    with pytest.raises(ImportError):
        train(FakeSession())


def test_without_a_session_nothing_happens() -> None:
    """Under plain Optuna no loader is touched."""
    assert train(None) == train(None, elastic=None)


def test_a_trial_that_had_another_size_needs_the_option(tmp_path: Path) -> None:
    """A checkpoint of an elastic run is refused without it; one of a fixed run goes on with it."""
    session = FakeSession({5: "disk"}, checkpoint_dir=tmp_path / "elastic")
    with pytest.raises(Suspended):
        train(session)
    with pytest.raises(CheckpointError, match="elastic_batch must go on with it"):
        train(session.again(), elastic=None)
    seen: dict[Any, Any] = {}
    session = FakeSession({5: "disk"}, checkpoint_dir=tmp_path / "fixed")
    with pytest.raises(Suspended):
        train(session, seen, elastic=None)
    assert train(session.again(), seen) == train(FakeSession())


class Stream(IterableDataset[Any]):
    """Samples that have no place."""

    def __iter__(self) -> Any:
        return iter(Quiet(SAMPLES)[i] for i in range(SAMPLES))


class ByHand(Plain):
    """Optimizes by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Often(Net):
    """Steps its schedule after every third batch."""

    def configure_optimizers(self) -> Any:
        optimizers, (schedule,) = super().configure_optimizers()
        return optimizers, [{**schedule, "frequency": 3}]


class Noam(LRScheduler):
    """Computes its rates from nothing that an optimizer has."""

    def get_lr(self) -> list[float]:
        step = max(1, self.last_epoch)
        return [16**-0.5 * min(step**-0.5, step * 10**-1.5) for _ in self.base_lrs]


class WarmUp(LRScheduler):
    """Computes its rates from the base ones."""

    def get_lr(self) -> list[float]:
        return [rate * min(1.0, (self.last_epoch + 1) / 10) for rate in self.base_lrs]


class FromFloor(LRScheduler):
    """Begins a little above nothing."""

    def get_lr(self) -> list[float]:
        return [1e-4 + (rate - 1e-4) * min(1.0, self.last_epoch / 50) for rate in self.base_lrs]


class NoSchedule:
    """Keeps rates under names of its own, as schedulers of other packages do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.base_values = [group["lr"] for group in optimizer.param_groups]

    def step(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.base_values, strict=True):
            group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        return {"base_values": self.base_values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base_values = state["base_values"]


def net_with(schedule: Callable[[torch.optim.Optimizer], Any]) -> type[Net]:
    """A network with a schedule over steps."""

    class Scheduled(Plain):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [{"scheduler": schedule(optimizer), "interval": "step"}]

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step()

    return Scheduled


def ends_as_noam(optimizer: torch.optim.Optimizer) -> Any:
    """A schedule of torch's with another one in it."""
    return SequentialLR(optimizer, [LambdaLR(optimizer, lambda _: 1.0), Noam(optimizer)], [9])


class Own(BatchSampler):
    """Makes batches in a way of its own."""


class Endless(Sampler[int]):
    """Draws without an end, and so has no length."""

    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(SAMPLES))


def own_batches() -> DataLoader[Any]:
    data = Quiet(SAMPLES)
    return DataLoader(data, batch_sampler=Own(RandomSampler(data), FIRST, False))


@pytest.mark.parametrize(
    ("reason", "options"),
    [
        ("map-style", {"batches": lambda: DataLoader(Stream(), batch_size=8)}),
        ("map-style", {"batches": lambda: StatefulDataLoader(Quiet(90), batch_size=8)}),
        (
            "batch_size samples",
            {"batches": lambda: DataLoader(Quiet(90), batch_sampler=own_batches())},
        ),
        ("batch_size samples", {"batches": lambda: DataLoader(Quiet(90), batch_size=None)}),
        (
            "no length",
            {
                "batches": lambda: DataLoader(Quiet(90), sampler=Endless(), batch_size=8),
                "limit_train_batches": 5,
            },
        ),
        ("one train loader", {"batches": lambda: [DataLoader(Quiet(90), batch_size=8)] * 2}),
        ("max_steps", {"max_steps": 5}),
        ("ends of epochs", {"val_check_interval": 0.5}),
        ("ends of epochs", {"val_check_interval": 7, "check_val_every_n_epoch": None}),
        ("Accumulation", {"callbacks": [GradientAccumulationScheduler({1: 2})]}),
        ("by hand", {"net": ByHand, "scaling": "accumulate"}),
        ("frequency", {"net": Often}),
        ("its Noam sets rates", {"net": net_with(Noam)}),
        ("its Noam sets rates", {"net": net_with(ends_as_noam), "scaling": "sqrt"}),
        ("its NoSchedule sets rates", {"net": net_with(NoSchedule)}),
        ("overfit_batches", {"overfit_batches": 2}),
        ("several processes", {"strategy": "ddp_fork", "devices": 2}),
        ("must lie within", {"elastic": (9, 32)}),
        ("two whole numbers", {"elastic": (0, 32)}),
        ("two whole numbers", {"elastic": (32, 4)}),
        ("two whole numbers .* but is 32", {"elastic": 32}),
        ("must be one of linear", {"scaling": "cubic"}),
    ],
)
def test_what_cannot_change_is_refused(reason: str, options: dict[str, Any]) -> None:
    """One line says why, before anything is trained."""
    seen: dict[Any, Any] = {}
    with pytest.raises(InvalidInputError, match=reason) as caught:
        train(FakeSession(), seen, **options)
    assert seen == {}
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "schedule",
    [
        WarmUp,
        FromFloor,
        lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10)),
        lambda optimizer: OneCycleLR(optimizer, 0.05, 2 * STEPS),
        lambda optimizer: ReduceLROnPlateau(optimizer),
    ],
)
def test_schedules_that_scale_what_they_find_go_on(schedule: Any) -> None:
    """Those of torch, and one's own over the base rates, are at twice the rate after a change."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.1))
    before = copy.deepcopy(optimizer.param_groups[0]["lr"])
    assert unscalable([schedule(optimizer)]) is None
    assert optimizer.param_groups[0]["lr"] <= before
    if schedule is WarmUp:
        seen = expected({6: 16}, net=net_with(schedule))
        assert [value[2] for value in seen.values() if isinstance(value, tuple)][20] == 0.2
