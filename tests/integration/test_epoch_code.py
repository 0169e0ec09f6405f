"""Code before an epoch's batches: it runs again where a trial is resumed, and gives the same."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torchmetrics import MeanMetric, MetricTracker

from optuna_hermes.errors import Suspended
from optuna_hermes.pytorch import PyTorchLoop
from optuna_hermes.suspend._tiers import _saver
from optuna_hermes.testing import FakeSession
from support.loops import by_way_of_disk, descend

DATA = TensorDataset(torch.linspace(-1, 1, 64).reshape(16, 4))
Begin = Callable[[PyTorchLoop, torch.optim.lr_scheduler.StepLR, int], tuple[float, list[int]]]


def by_schedule(run: PyTorchLoop, schedule: torch.optim.lr_scheduler.StepLR, epoch: int) -> object:
    """A step of the schedule at the begin of each epoch but the first."""
    if epoch:
        schedule.step()
    return schedule.get_last_lr()[0], list(range(16))


def by_setting(run: PyTorchLoop, schedule: torch.optim.lr_scheduler.StepLR, epoch: int) -> object:
    """A learning rate that is halved by hand."""
    schedule.optimizer.param_groups[0]["lr"] *= 0.5
    return schedule.optimizer.param_groups[0]["lr"], list(range(16))


def by_kept_value(
    run: PyTorchLoop, schedule: torch.optim.lr_scheduler.StepLR, epoch: int
) -> object:
    """A kept number, and a kept array that is changed in place."""
    run.kept["noise"] = run.kept.get("noise", 1.0) * 0.5
    weights = run.kept.setdefault("weights", np.ones(4))
    weights *= 0.9
    return run.kept["noise"] + float(weights.sum()), list(range(16))


def by_generator(run: PyTorchLoop, schedule: torch.optim.lr_scheduler.StepLR, epoch: int) -> object:
    """A part of the data that a kept generator draws."""
    generator = run.kept.setdefault("generator", torch.Generator().manual_seed(1))
    return 1.0, torch.randperm(16, generator=generator)[:12].tolist()


def by_batch(run: PyTorchLoop, schedule: torch.optim.lr_scheduler.StepLR, epoch: int) -> object:
    """The number of the batch, which is the first one's before each epoch's batches."""
    return 1.0 + run.batch, list(range(16))


def train(session: FakeSession, begin: Begin) -> list[float]:
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    named = {"model": model, "optimizer": optimizer, "schedule": schedule}
    run = PyTorchLoop(optuna.create_study().ask(), named, session)
    losses = run.kept.setdefault("losses", [])
    for epoch in run.epochs(4):
        factor, places = begin(run, schedule, epoch)
        for (x,) in run.batches(DataLoader(Subset(DATA, places), batch_size=4, shuffle=True)):
            loss = (model(x) - factor).square().mean()
            descend(loss, optimizer, losses, session)
        run.report(losses[-1])
    return losses


@pytest.mark.parametrize("stops", [(4, 4), (6, 1, 4), (3, 6)], ids=str)
@pytest.mark.parametrize("begin", [by_schedule, by_setting, by_kept_value, by_generator, by_batch])
def test_what_it_computes_is_the_same(begin: Begin, stops: tuple[int, ...], tmp_path: Path) -> None:
    """Between two epochs and within one, also where the trial is resumed there several times."""
    losses = train(FakeSession(), begin)
    train_again = functools.partial(train, begin=begin)
    assert by_way_of_disk(train_again, tmp_path, *stops) == losses


def near_the_start(session: FakeSession, *, kept_part: bool) -> list[float]:
    """A loop that is drawn to the weights that it began with."""
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = PyTorchLoop(
        optuna.create_study().ask(), {"model": model, "optimizer": optimizer}, session
    )
    losses = run.kept.setdefault("losses", [])
    start = model.weight.detach().clone()
    for _ in run.epochs(4):
        for (x,) in run.batches(DataLoader(DATA, batch_size=4, shuffle=True)):
            loss = model(x).square().mean() + (model.weight - start).square().sum()
            descend(loss, optimizer, losses, session)
        if kept_part:
            run.kept["momentum"] = optimizer.state[model.weight]["momentum_buffer"]
            losses.append(float(run.kept["momentum"].sum()))
        run.report(losses[-1])
    return losses


def test_copies_of_the_first_weights_are_the_same(tmp_path: Path) -> None:
    """Code before the loop makes them before the checkpoint's are loaded."""
    train_again = functools.partial(near_the_start, kept_part=False)
    assert by_way_of_disk(train_again, tmp_path, 6, 3) == train_again(FakeSession())


def test_a_kept_part_of_an_optimizers_state_is_restored_with_it(tmp_path: Path) -> None:
    """With the optimizer: it is not there before. The weights come with it."""
    session = FakeSession(checkpoint_dir=tmp_path / "study" / "trial").again({6: "disk"})
    with pytest.raises(Suspended):
        near_the_start(session, kept_part=True)
    assert len(near_the_start(session.again(), kept_part=True)) == 4 * 4 + 4


def tracked(session: FakeSession) -> list[float]:
    """A tracker gets a new metric at the begin of each epoch."""
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = MetricTracker(MeanMetric(), maximize=False)
    named = {"model": model, "optimizer": optimizer, "tracker": tracker}
    run = PyTorchLoop(optuna.create_study().ask(), named, session)
    losses = run.kept.setdefault("losses", [])
    for _ in run.epochs(4):
        tracker.increment()
        for (x,) in run.batches(DataLoader(DATA, batch_size=4, shuffle=True)):
            loss = (model(x) - 1).square().mean()
            tracker.update(loss.detach())
            descend(loss, optimizer, losses, session)
        run.report(losses[-1])
    assert len(tracker.compute_all()) == 4
    return [*losses, *tracker.compute_all().tolist()]


@pytest.mark.parametrize("stops", [(1,), (3, 3), (2, 2, 2)])
def test_a_metric_that_is_added_again_counts_once(stops: tuple[int, ...], tmp_path: Path) -> None:
    """A tracker has as many as it had, whatever the epoch's code has added since."""
    assert by_way_of_disk(tracked, tmp_path, *stops) == tracked(FakeSession())


class Annealed(nn.Module):
    """A model with numbers of its own, which its loop and its calls change."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1))
        self.rate, self.calls, self.flips, self.last = 1.0, 0, False, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.flips = not self.flips
        self.last = torch.full((1,), self.calls)
        return self.net(x) * (2 if self.flips else 1)


def annealed(session: FakeSession, *, reports: bool) -> list[float]:
    """A loop that computes by these at each epoch's begin, and changes some there."""
    torch.manual_seed(1)
    model = Annealed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = PyTorchLoop(
        optuna.create_study().ask(), {"model": model, "optimizer": optimizer}, session
    )
    losses = run.kept.setdefault("losses", [])
    for _ in run.epochs(4):
        model.rate *= 0.5
        model.net[0].p *= 0.9
        warm, shift = min(1.0, model.calls / 10), model.rate + model.net[0].p + model.flips
        for (x,) in run.batches(DataLoader(DATA, batch_size=6, shuffle=True)):
            loss = (model(x) - shift - model.rate).square().mean() * warm + model(x).mean()
            model(x)
            descend(loss, optimizer, losses, session)
        if reports:
            run.report(losses[-1])
    return [*losses, model.rate, model.net[0].p, model.calls, model.last.item()]


@pytest.mark.parametrize("reports", [False, True])
@pytest.mark.parametrize("stops", [(1,), (4, 1), (5, 3, 1)], ids=str)
def test_numbers_in_attributes_of_a_model_are_those_of_the_epochs_begin(
    stops: tuple[int, ...], reports: bool, tmp_path: Path
) -> None:
    """And then those of the present batch again, also where these are as in the beginning."""
    train_again = functools.partial(annealed, reports=reports)
    assert by_way_of_disk(train_again, tmp_path, *stops) == train_again(FakeSession())


class Policy(nn.Module):
    """Its parts are called by a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 1)

    def act(self, x: torch.Tensor) -> torch.Tensor:
        noise: torch.Tensor = torch.rand(1)
        return self.head(self.body(x)) + noise


def by_method(model: Policy, x: torch.Tensor) -> torch.Tensor:
    return model.act(x)


def by_part(model: Policy, x: torch.Tensor) -> torch.Tensor:
    return model.head(model.body.eval()(x))  # type: ignore[no-any-return]


def by_compiled_part(model: Policy, x: torch.Tensor) -> torch.Tensor:
    return torch.compile(model.head, backend="eager")(x[:, :3])  # type: ignore[no-any-return]


def by_function(model: Policy, x: torch.Tensor) -> torch.Tensor:
    halved = {name: each / 2 for name, each in model.head.named_parameters()}
    return torch.func.functional_call(model.head, halved, (x[:, :3],))  # type: ignore[no-any-return]


def roll_out(
    session: FakeSession, ask: Callable[[Policy, torch.Tensor], torch.Tensor]
) -> list[float]:
    """What a policy does at an epoch's begin is trained on in all its batches, as by PPO."""
    torch.manual_seed(1)
    model = Policy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = PyTorchLoop(
        optuna.create_study().ask(), {"model": model, "optimizer": optimizer}, session
    )
    losses = run.kept.setdefault("losses", [])
    x = DATA.tensors[0]
    for _ in run.epochs(4):
        with torch.no_grad():
            done = ask(model, x)
        model.train()
        for places in run.batches([slice(0, 8), slice(8, 16), slice(0, 16)]):
            loss = (model.act(x[places]) - done[places] - 1).square().mean()
            descend(loss, optimizer, losses, session)
        run.report(losses[-1])
    return losses


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize("ask", [by_method, by_part, by_compiled_part])
@pytest.mark.parametrize("stops", [(1,), (2, 3), (5, 1, 1), (3, 2)])
def test_what_a_model_does_before_an_epochs_batches_is_the_same(
    stops: tuple[int, ...], ask: Callable[..., torch.Tensor], tmp_path: Path
) -> None:
    """It has the weights and statistics that it had at the epoch's begin."""
    train_again = functools.partial(roll_out, ask=ask)
    assert by_way_of_disk(train_again, tmp_path, *stops) == train_again(FakeSession())


def test_a_model_with_weights_that_are_not_its_own_is_not_stored_within_an_epoch(
    tmp_path: Path,
) -> None:
    """They may be those of a transformation, which have no values."""
    session = FakeSession({4: "disk", 5: "disk"}, checkpoint_dir=tmp_path / "study" / "trial")
    assert roll_out(session, by_function) == roll_out(FakeSession(), by_function)
    assert [each.units for each in session.checkpoints] == [3, 2]
    assert session.parks == ["resident", "resident"]


def averaged(target: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for old, new in zip(target.parameters(), model.parameters(), strict=True):
            old.mul_(0.5).add_(new, alpha=0.5)


def averaged_data(target: nn.Module, model: nn.Module) -> None:
    for old, new in zip(target.parameters(), model.parameters(), strict=True):
        old.data.mul_(0.5).add_(new.data, alpha=0.5)


def averaged_statistics(target: Any, model: nn.Module) -> None:
    target.scale = 0.5 * target.scale  # another tensor


def with_target(session: FakeSession, update: Callable[[nn.Module, nn.Module], None]) -> Any:
    """A loop whose target moves at each epoch's begin, and then labels the epoch's data."""
    torch.manual_seed(1)
    model: nn.Module = nn.Linear(4, 1)
    target: Any = nn.Linear(4, 1).requires_grad_(False)
    target.register_buffer("scale", torch.ones(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    named = {"model": model, "target": target, "optimizer": optimizer}
    run = PyTorchLoop(optuna.create_study().ask(), named, session)
    losses = run.kept.setdefault("losses", [])
    x = DATA.tensors[0]
    for _ in run.epochs(5):
        update(target, model)
        labels = target(x) * target.scale
        for places in run.batches([slice(0, 8), slice(8, 16), slice(0, 16)]):
            loss = (model(x[places]) - labels[places]).square().mean()
            descend(loss, optimizer, losses, session)
        run.report(losses[-1])
    return losses


UPDATES = [averaged, averaged_data, averaged_statistics]


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("stops", [(3, 3), (4, 1), (5, 2, 1, 2)], ids=str)
def test_what_a_model_does_once_an_epochs_code_has_changed_it_is_the_same(
    stops: tuple[int, ...], update: Callable[..., None], tmp_path: Path
) -> None:
    """The change is made once, whether it is stored between two epochs or within one."""
    train_again = functools.partial(with_target, update=update)
    assert by_way_of_disk(train_again, tmp_path, *stops) == train_again(FakeSession())


@pytest.mark.parametrize("update", UPDATES)
def test_the_first_epoch_whose_code_changes_a_model_before_its_call_is_not_stored(
    update: Callable[..., None], tmp_path: Path
) -> None:
    """Nobody has copied the weights of its begin; those of all later ones are copied then."""
    session = FakeSession({1: "disk"}, checkpoint_dir=tmp_path / "study" / "trial")
    assert with_target(session, update) == with_target(FakeSession(), update)
    assert session.parks == ["resident"]
    assert [each.units for each in session.states] == [1, 2, 3, 4]


def mining_after(session: FakeSession, *, asks: bool) -> list[float]:
    """A loop with an epoch that only validates, and with orders made of the weights in others."""
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    run = PyTorchLoop(
        optuna.create_study().ask(), {"model": model, "optimizer": optimizer}, session
    )
    losses = run.kept.setdefault("losses", [])
    x = DATA.tensors[0]
    for epoch in run.epochs(4):
        if epoch == 0:
            run.report(model(x).square().mean().item())
            continue
        with torch.no_grad():
            done = model(x) if asks else x
        for places in run.batches([slice(0, 8), slice(8, 16), slice(0, 16)]):
            loss = (model(x[places]) - done[places].sum() - 1).square().mean()
            descend(loss, optimizer, losses, session)
        run.report(losses[-1])
    return losses


def test_a_call_in_an_epoch_after_one_without_batches_is_seen(tmp_path: Path) -> None:
    """That epoch is not stored: its weights were not copied. The next one is."""
    session = FakeSession({1: "disk"}, checkpoint_dir=tmp_path / "study" / "trial")
    expected = mining_after(FakeSession(), asks=True)
    assert mining_after(session, asks=True) == expected
    assert session.parks == ["resident"]
    train_again = functools.partial(mining_after, asks=True)
    assert by_way_of_disk(train_again, tmp_path / "later", 4, 1) == expected
    train_again = functools.partial(mining_after, asks=False)
    assert by_way_of_disk(train_again, tmp_path / "quiet", 1, 1) == train_again(FakeSession())


def subset(order: torch.Tensor) -> DataLoader[Any]:
    return DataLoader(Subset(DATA, order.tolist()), batch_size=4, shuffle=True)


LOADERS: dict[str, Callable[[torch.Tensor], DataLoader[Any]]] = {
    "subset": subset,
    "of a tensor": lambda order: DataLoader(Subset(DATA, order), batch_size=4),  # type: ignore[arg-type]
    "of tensors": lambda order: DataLoader(Subset(DATA, list(order)), batch_size=4),
    "of NumPy's numbers": lambda order: DataLoader(Subset(DATA, list(order.numpy())), batch_size=4),
    "sampler": lambda order: DataLoader(DATA, 4, sampler=SubsetRandomSampler(order.tolist())),
    "weights": lambda order: DataLoader(DATA, 4, sampler=WeightedRandomSampler(order / 9 + 1, 12)),
}


def hard_examples(session: FakeSession, make: Callable[[torch.Tensor], DataLoader[Any]]) -> Any:
    """A loop that trains, in each epoch, on what the present model does worst, and on the rest."""
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    run = PyTorchLoop(
        optuna.create_study().ask(), {"model": model, "optimizer": optimizer}, session
    )
    losses = run.kept.setdefault("losses", [])
    for epoch in run.epochs(4):
        with torch.no_grad():
            scores = (model(DATA.tensors[0]).squeeze(1) - DATA.tensors[0].sin().sum(1)).abs()
        order = scores.argsort(descending=True)[: 8 + epoch + int(10 * scores[0]) % 4]
        for (x,) in run.batches(make(order)):
            loss = (model(x).squeeze(1) - x.sin().sum(1)).square().mean()
            descend(loss, optimizer, losses, session)
        run.report(losses[-1])
    return losses


@pytest.mark.parametrize("stops", [(1, 2), (5, 3, 1)], ids=str)
@pytest.mark.parametrize("kind", LOADERS)
def test_an_order_made_of_weights_comes_back(
    kind: str, stops: tuple[int, ...], tmp_path: Path
) -> None:
    """A trial that is resumed within an epoch has the order of its begin, and its length."""
    train_again = functools.partial(hard_examples, make=LOADERS[kind])
    assert by_way_of_disk(train_again, tmp_path, *stops) == train_again(FakeSession())


def test_an_order_that_is_set_in_a_loader_comes_back(tmp_path: Path) -> None:
    """The loader was made before the loop, and its subset gets another order in each epoch."""

    def train_again(session: FakeSession) -> Any:
        loader = subset(torch.arange(16))

        def set_anew(order: torch.Tensor) -> DataLoader[Any]:
            loader.dataset.indices = order.tolist()  # type: ignore[attr-defined]
            return loader

        return hard_examples(session, set_anew)

    assert by_way_of_disk(train_again, tmp_path, 1, 4, 2) == train_again(FakeSession())


class Asked:
    """An object that counts the calls of its ``state_dict``."""

    def __init__(self) -> None:
        self.calls = 0

    def state_dict(self) -> dict[str, int]:
        self.calls += 1
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class AskedModule(nn.Linear):
    """A module that does."""

    calls = 0

    def state_dict(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        return super().state_dict(*args, **options)


def test_no_state_is_made_without_a_folder_for_checkpoints() -> None:
    """Nobody could ever read it."""
    session, named = FakeSession(), {"other": Asked(), "model": AskedModule(1, 1)}
    run = PyTorchLoop(optuna.create_study().ask(), named, session)
    for _ in run.epochs(4):
        for _ in run.batches(range(4)):
            session.tick()
        run.report(0.0)
    assert (named["other"].calls, named["model"].calls) == (0, 0)


def test_no_state_is_made_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even to see whether a module has other parameters: only where a checkpoint is due."""
    written, write = threading.Event(), _saver.write

    def slowly(*args: Any, **options: Any) -> Any:
        written.wait(60)
        return write(*args, **options)

    monkeypatch.setattr(_saver, "write", slowly)
    model = AskedModule(1, 1)
    session = FakeSession(checkpoint_dir=tmp_path / "study" / "trial")
    run = PyTorchLoop(optuna.create_study().ask(), {"model": model}, session)
    for epoch in run.epochs(2):
        for _ in run.batches(range(40)):
            session.tick()
        assert model.calls == epoch  # the first epoch's checkpoint is written in the second one
        if epoch:
            written.set()
        run.report(0.0)
    assert len(session.states) == 1
