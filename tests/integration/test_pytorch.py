"""A suspended loop in plain PyTorch is, bit for bit, the loop that was never suspended.

As a script, this file is the next process of a run: ``test_pytorch.py FOLDER SEED CASES``.
"""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from optuna.trial import FixedTrial
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy
from tqdm import tqdm

from optuna_hermes.errors import CheckpointError, InvalidInputError, Suspended, UnstorableError
from optuna_hermes.model import Checkpoint, TierName
from optuna_hermes.pytorch import PyTorchLoop, suspendable
from optuna_hermes.suspend._tiers._saver import Saver
from optuna_hermes.testing import FakeSession
from optuna_hermes.workers._fault import is_misuse
from tests.support.loops import by_way_of_disk

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata

EPOCHS = 4
BATCHES = 10
Bits = dict[Any, bytes]


class Points(Dataset[tuple[torch.Tensor, int]]):
    """Data that every generator of random numbers has a hand in."""

    def __init__(self, noise: float = 0.1) -> None:
        generator = torch.Generator().manual_seed(7)
        self._noise = noise
        self._x = torch.randn(BATCHES * 8, 8, generator=generator)
        self._y = (self._x[:, 0] > 0).long() + (self._x[:, 1] > 0).long()

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not self._noise:
            return self._x[index], int(self._y[index])
        noise = torch.randn(8) + np.random.normal() + random.gauss(0, 1)
        return self._x[index] + self._noise * noise, int(self._y[index])


class Cache(nn.Module):
    """A layer with a buffer that no ``state_dict`` has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(16), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 0.01 * x.detach().mean(0)
        return x + 0.1 * self.seen


class Smoothed:
    """An object of the user's own, with the two methods."""

    def __init__(self) -> None:
        self.value = 0.0
        self.history: list[float] = []

    def add(self, loss: float) -> None:
        self.value = 0.9 * self.value + 0.1 * loss
        self.history.append(self.value)

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), Cache(), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 3)
    )


class Trace:
    """Record of a run, to the bit: losses by batch, values by epoch, everything at the end."""

    def __init__(self) -> None:
        self.losses: Bits = {}
        self.rows: Bits = {}
        self.end: Bits = {}

    def note(self, where: Bits, key: Any, value: Any) -> None:
        bits = torch.as_tensor(value, dtype=torch.float64).numpy().tobytes()
        assert where.setdefault(key, bits) == bits, f"trained again, {key} is another one"

    def seen(self) -> tuple[Bits, Bits, Bits]:
        return self.losses, self.rows, self.end


def new_trial(direction: str = "minimize", **parts: Any) -> optuna.Trial:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(direction=direction, **parts).ask()


def scramble(seed: int = 5) -> None:
    """Others train in this process meanwhile, or it is another process."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def by_loader(data: Points, loader: Any = DataLoader, **options: Any) -> Callable[[], Any]:
    """The same loader in each epoch."""
    if "sampler" not in options:
        options["shuffle"] = True
    made = loader(data, batch_size=8, **options)
    return lambda: made


def by_hand(data: Points) -> Iterator[Any]:
    """An order that the loop draws itself, between ``epochs`` and ``batches``."""
    return torch.randperm(len(data)).split(8)


def source(case: str, data: Points) -> Callable[[], Any]:
    """Makes what ``run.batches`` gets in an epoch."""
    generator = torch.Generator().manual_seed(3)
    drawn = WeightedRandomSampler([1.0, 2.0] * (len(data) // 2), len(data))
    forked = {"num_workers": 2, "multiprocessing_context": "fork"}
    cases: dict[str, Callable[[], Callable[[], Any]]] = {
        "stateful": lambda: by_loader(data, StatefulDataLoader),
        "own-generator": lambda: by_loader(data, generator=generator),
        "own-sampler": lambda: by_loader(data, sampler=drawn),
        "workers": lambda: by_loader(data, **forked),
        "persistent-workers": lambda: by_loader(data, **forked, persistent_workers=True),
        "stateful-workers": lambda: by_loader(data, StatefulDataLoader, **forked),
        "by-hand": lambda: functools.partial(by_hand, data),
    }
    return cases.get(case, lambda: by_loader(data))()


def train(
    session: FakeSession | None,
    trace: Trace,
    *,
    case: str = "shuffled",
    seed: int = 1,
    trial: Any = None,
    killed_after: int | None = None,
) -> PyTorchLoop:
    """One process of a run, as a user would write it; a new one has other random numbers."""
    scramble(1)
    model = network()
    average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.9), use_buffers=True)
    body = torch.optim.AdamW(model[:3].parameters(), lr=0.01)
    head = torch.optim.SGD(model[3:].parameters(), lr=0.05, momentum=0.9)
    steps = EPOCHS * BATCHES
    scheduler = torch.optim.lr_scheduler.OneCycleLR(body, 0.05, steps)
    decay = torch.optim.lr_scheduler.MultiStepLR(head, [2, 3])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)
    metrics = MetricCollection({"accuracy": MulticlassAccuracy(3), "area": BinaryAUROC()})
    mean, smoothed, data = MeanMetric(), Smoothed(), Points(0.0 if "workers" in case else 0.1)
    loader = source(case, data)
    every = 4 if case == "accumulated" else 1
    if session is not None and session.checkpoints:
        scramble(seed)
    named = {"model": model, "average": average, "body": body, "head": head, "decay": decay}
    named |= {"scheduler": scheduler, "scaler": scaler, "metrics": metrics, "smoothed": smoothed}
    run = PyTorchLoop(trial or new_trial(), {**named, "mean": mean}, session)
    best = run.kept.setdefault("best", [])
    seen = 0
    for epoch in run.epochs(EPOCHS):
        model.train()
        if case == "frozen-later" and epoch >= 2:
            model[0].requires_grad_(False)
            model[1].eval()
        metrics.reset()
        run.kept["total"] = torch.zeros(())
        for batch in run.batches(loader()):
            x, y = batch if case != "by-hand" else (data._x[batch], data._y[batch])
            out = model(x)
            loss = nn.functional.cross_entropy(out, y) + 0.001 * smoothed.value
            scaler.scale(loss / every).backward()
            if (run.batch + 1) % every == 0:
                for optimizer in (body, head):
                    scaler.step(optimizer)
                    optimizer.zero_grad()
                scaler.update()
                scheduler.step()
            average.update_parameters(model)
            smoothed.add(loss.item())
            mean.update(loss.detach())
            metrics["accuracy"].update(out, y)
            metrics["area"].update(out[:, 0].sigmoid().detach(), (y == 0).long())
            run.kept["total"] += loss.detach()
            trace.note(trace.losses, (epoch, run.batch), loss.item())
            if session is not None:
                session.tick()
            seen += 1
            if seen == killed_after:
                raise SystemExit(9)
            if case == "twice-an-epoch" and run.batch == 4:
                run.report(smoothed.value)
        decay.step()
        row = [loss.item(), run.kept["total"], mean.compute(), *metrics.compute().values()]
        model.eval()
        with torch.no_grad():
            losses = [nn.functional.cross_entropy(model(x), y) for x, y in DataLoader(data, 16)]
        value = float(sum(losses))
        best.append(min([*best[-1:], value]))
        run.report(value)
        trace.note(trace.rows, epoch, [*row, value, scaler.get_scale(), torch.randn(())])
    for name, owner in (("model", model), ("average", average)):
        for key, tensor in owner.state_dict().items():
            trace.note(trace.end, (name, key), tensor)
    trace.note(trace.end, "rest", [run.value, *best, *smoothed.history, head.param_groups[0]["lr"]])
    return run


def suspended(session: FakeSession, trace: Trace, **options: Any) -> FakeSession:
    """Train until the run is put on disk, and give the session of its next process."""
    with pytest.raises(Suspended):
        train(session, trace, **options)
    return session.again()


@functools.cache
def expected(case: str) -> Trace:
    """The trace of the run that is never suspended."""
    trace = Trace()
    train(FakeSession(), trace, case=case)
    return trace


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


# -- exactness ---------------------------------------------------------------------------------


def slow(case: str) -> Any:
    """A case whose parts are tested in others."""
    return pytest.param(case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "case",
    [
        "shuffled",
        "stateful",
        slow("own-generator"),
        "own-sampler",
        slow("workers"),
        "persistent-workers",
        "stateful-workers",
        "by-hand",
        slow("accumulated"),
        "twice-an-epoch",
        "frozen-later",
    ],
)
def test_disk(case: str, tmp_path: Path) -> None:
    """Three suspensions to disk, one of them between epochs, leave no trace."""
    trace = Trace()
    session = FakeSession({7: "disk"}, checkpoint_dir=tmp_path)
    for seed, after in ((2, 3), (3, 15)):
        session = suspended(session, trace, seed=seed, case=case).again({after: "disk"})
    session = suspended(session, trace, seed=4, case=case)
    train(session, trace, seed=5, case=case)
    assert trace.seen() == expected(case).seen()
    assert len(list(tmp_path.iterdir())) <= 3, "the newest, and the two the ledger knew then"


def test_disk_after_a_report(tmp_path: Path) -> None:
    """State saved while it is decided that the run yields is its checkpoint, written once."""
    trace = Trace()
    session = FakeSession(decides={1: "disk"}, checkpoint_dir=tmp_path)
    after = suspended(session, trace)
    assert [checkpoint.units for checkpoint in session.states] == [1, 1]
    assert len(list(tmp_path.iterdir())) == 1
    train(after, trace, seed=2)
    assert trace.seen() == expected("shuffled").seen()


@pytest.mark.parametrize("tier", ["resident", "host"])
def test_disk_from_memory_after_a_report(tier: TierName, tmp_path: Path) -> None:
    """Nor is it written again where the run has to leave memory later."""
    trace = Trace()
    session = FakeSession(
        decides={1: tier}, checkpoint_dir=tmp_path, while_parked=scramble, evicts=("disk",)
    )
    after = suspended(session, trace)
    assert session.parks == [tier, "disk"]
    assert len(list(tmp_path.iterdir())) == 1
    train(after, trace, seed=2)
    assert trace.seen() == expected("shuffled").seen()


@pytest.mark.parametrize("tier", ["resident", "host"])
def test_a_device_does_not_wait_for_a_checkpoint(
    tier: TierName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that yields writes the unit that it has copied once its device is given back."""
    session = FakeSession(decides={1: tier}, checkpoint_dir=tmp_path)
    start, begun = Saver.start, []

    def noted(saver: Saver) -> None:
        if saver.busy and not begun:
            begun.append(list(session.parks))
        start(saver)

    monkeypatch.setattr(Saver, "start", noted)
    train(session, Trace())
    assert begun == [[tier]]
    assert [checkpoint.units for checkpoint in session.states][:2] == [1, 2]


@pytest.mark.parametrize("tier", ["resident", "host"])
@pytest.mark.parametrize("case", ["shuffled", "stateful", "accumulated"])
def test_memory(case: str, tier: TierName, tmp_path: Path) -> None:
    """A run that waits in its process while others use the random numbers goes on as it was."""
    trace = Trace()
    yields = dict.fromkeys((1, 6, 10, 13, 31), tier)
    session = FakeSession(yields, checkpoint_dir=tmp_path, while_parked=scramble)
    train(session, trace, case=case)
    assert session.parks == [tier] * 5
    assert trace.seen() == expected(case).seen()


@pytest.mark.parametrize("tiers", [("resident", "disk"), ("host", "disk")])
def test_evicted(tiers: tuple[TierName, TierName], tmp_path: Path) -> None:
    """A run that waits in its process can be put on disk later, with others' numbers drawn."""
    trace = Trace()
    session = FakeSession(
        {23: tiers[0]}, checkpoint_dir=tmp_path, while_parked=scramble, evicts=tiers[1:]
    )
    session = suspended(session, trace, seed=2)
    train(session, trace, seed=3)
    assert trace.seen() == expected("shuffled").seen()


@pytest.mark.slow  # as of Lightning in test_lightning_exact
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    processes=st.lists(
        st.dictionaries(
            st.integers(1, 19), st.sampled_from(["resident", "host", "disk"]), max_size=4
        ),
        max_size=4,
    )
)
def test_any_suspensions(
    processes: list[dict[int, TierName]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whenever and wherever a run is suspended, it stays the same run."""
    trace = Trace()
    session = FakeSession(checkpoint_dir=tmp_path_factory.mktemp("run"), while_parked=scramble)
    for seed, yields in enumerate(processes):
        session = session.again(yields)
        try:
            train(session, trace, seed=seed)
        except Suspended:
            continue
        break
    else:
        train(session.again(), trace, seed=99)
    assert trace.seen() == expected("shuffled").seen()


def test_new_process(tmp_path: Path) -> None:
    """A run goes on in another process, with another seed, as in its first one."""
    traces = {"shuffled": Trace(), "stateful": Trace()}
    for case, trace in traces.items():
        session = FakeSession({17: "disk"}, checkpoint_dir=tmp_path / case)
        session = suspended(session, trace, case=case)
        state = asdict(session.checkpoints[0])
        (tmp_path / case / "state.json").write_text(json.dumps(state))
    command = [sys.executable, __file__, str(tmp_path), "99", *traces]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for case, trace in traces.items():
        losses, rows, end = torch.load(tmp_path / case / "trace.pt", weights_only=True)
        assert ({**trace.losses, **losses}, {**trace.rows, **rows}, end) == expected(case).seen()


@pytest.mark.parametrize(
    "killed_after", [9, *[pytest.param(each, marks=pytest.mark.slow) for each in (10, 11, 29)]]
)
def test_killed(killed_after: int, tmp_path: Path) -> None:
    """A killed run repeats at most a unit: the same one, and it is reported once."""
    trace, trial = Trace(), new_trial()
    session = FakeSession(checkpoint_dir=tmp_path)
    with pytest.raises(SystemExit):
        train(session, trace, trial=trial, killed_after=killed_after)
    train(session.again(), trace, trial=trial, seed=6)  # a second report would be a warning
    assert trace.seen() == expected("shuffled").seen()
    assert sorted(trial.study.trials[0].intermediate_values) == [1, 2, 3, 4]


# -- reports -----------------------------------------------------------------------------------


def tiny(
    session: FakeSession | None,
    *,
    trial: Any = None,
    loader: Any = None,
    epochs: int = 3,
    **named: Any,
) -> PyTorchLoop:
    """The shortest loop there is, with one weight."""
    model = nn.Linear(1, 1)
    run = PyTorchLoop(trial or new_trial(), {"model": model, **named}, session)
    for epoch in run.epochs(epochs):
        for _ in run.batches([1.0, 2.0, 3.0] if loader is None else loader):
            run.kept["sum"] = run.kept.get("sum", 0) + 1
            if session is not None:
                session.tick()
        run.report(10.0 - epoch)
    return run


def test_without_a_broker() -> None:
    """Under plain Optuna every value is reported to the trial, counted from 1."""
    trial = new_trial()
    run = suspendable(trial, model=nn.Linear(1, 1))
    for epoch in run.epochs(2):
        assert [run.batch for _ in run.batches("abc")] == [0, 1, 2]
        run.report(torch.tensor(1.5 - epoch))
    assert trial.study.trials[0].intermediate_values == {1: 1.5, 2: 0.5}
    assert run.value == 0.5


def test_a_class_that_the_objective_makes_goes_with_its_trial() -> None:
    """Many trials may train in one process, and its methods may close over a data set."""

    def objective() -> weakref.ref[Any]:
        data = torch.ones(1)

        class Net(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) + data

        tiny(None, net=Net(1, 1))
        return weakref.ref(data)

    data = objective()
    gc.collect()
    assert data() is None


def test_fixed_trial() -> None:
    """An objective can be called with a ``FixedTrial``, to see what it does."""
    assert tiny(None, trial=FixedTrial({})).value == 8.0


def test_pruned() -> None:
    """The study's pruner stops the run."""
    trial = new_trial(pruner=optuna.pruners.ThresholdPruner(upper=9.5))
    with pytest.raises(optuna.TrialPruned, match=r"after unit 1 at 10\.0"):
        tiny(None, trial=trial)


def test_maximized_values_are_turned_for_the_session_only() -> None:
    """The session gets lower-is-better values, the user and Optuna get the value."""
    session, trial = FakeSession(), new_trial("maximize")
    assert tiny(session, trial=trial).value == 8.0
    assert session.reports == [(1, 1, -10.0), (2, 2, -9.0), (3, 3, -8.0)]
    assert trial.study.trials[0].intermediate_values[3] == 8.0


def test_first_batch_is_told_once_a_grant(tmp_path: Path) -> None:
    """The session learns of the first batch, and whether the run can be stored, at every grant."""
    session = FakeSession({4: "resident"}, checkpoint_dir=tmp_path)
    tiny(session)
    assert session.trainings == [True, True]
    assert len(session.beats) == 1


def test_beats_in_a_validation() -> None:
    """A long validation says that it is alive, and that costs nothing without a broker."""
    session = FakeSession()
    PyTorchLoop(new_trial(), {}, session).beat()
    PyTorchLoop(new_trial(), {}, None).beat()
    assert len(session.beats) == 1


def test_every_unit_is_saved(tmp_path: Path) -> None:
    """Each unit but the last, after which there is nothing to come back to, has a checkpoint."""
    session = FakeSession(checkpoint_dir=tmp_path)
    tiny(session)
    assert [state.units for state in session.states] == [1, 2]


def test_not_after_the_last_batch_of_an_epoch(tmp_path: Path) -> None:
    """Code after a loop may use the loop's variables: a run asked there waits an epoch on."""
    session = FakeSession({3: "disk"}, checkpoint_dir=tmp_path)
    with pytest.raises(Suspended):
        tiny(session)
    assert [unit for unit, *_ in session.reports] == [1]


# -- where a run waits -------------------------------------------------------------------------


class Stateless(DataLoader[torch.Tensor]):
    """A loader that has the methods of a stateful one, and no state."""

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(3.0))


class Misjudged(Stream):
    """A stream that says a length which it does not have."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
@pytest.mark.parametrize(
    "data", [Stream(), Misjudged(2), Misjudged(9)], ids=["unknown", "too short", "too long"]
)
def test_not_after_the_last_batch_of_a_stream(data: Stream, tmp_path: Path) -> None:
    """A run asked there waits an epoch on too, though no length says that it is the last one."""

    def loop(session: FakeSession) -> float | None:
        run = PyTorchLoop(new_trial(), {"model": nn.Linear(1, 1)}, session)
        for _ in run.epochs(2):
            for x in run.batches(DataLoader(data, batch_size=1)):
                last = float(x)
                session.tick()
            run.report(last)
        return run.value

    session = FakeSession({3: "disk"}, checkpoint_dir=tmp_path)
    with pytest.raises(Suspended):
        loop(session)
    assert [unit for unit, *_ in session.reports] == [1]
    assert loop(session.again()) == 2.0


class Recent(IterableDataset[float]):
    """Draws from what the training puts there."""

    def __init__(self, recent: list[float]) -> None:
        self._recent = recent

    def __iter__(self) -> Iterator[float]:
        return (random.choice(self._recent) for _ in range(4))


def test_a_stream_that_the_training_feeds(tmp_path: Path) -> None:
    """A batch is drawn after the one before it was trained, also where the run waits."""

    def loop(session: FakeSession | None) -> list[float]:
        scramble(1)
        run = PyTorchLoop(new_trial(), {}, session)
        recent: list[float] = run.kept.setdefault("recent", [0.5])
        seen = []
        for _ in run.epochs(3):
            for drawn in run.batches(DataLoader(Recent(recent), batch_size=None)):
                seen.append(float(drawn))
                recent.append(random.random())
                if session is not None:
                    session.tick()
            run.report(0.0)
        return seen

    asked: dict[int, TierName] = {1: "resident", 2: "resident", 4: "resident", 6: "disk"}
    session = FakeSession(asked, checkpoint_dir=tmp_path, while_parked=scramble)
    assert loop(session) == loop(None)
    assert session.parks == ["resident"] * 4


class Repeat:
    """Gives what a sampler gives, again and again."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class InfiniteDataLoader(DataLoader[torch.Tensor]):
    """Keeps its workers by keeping its iterator, as those of timm and ultralytics do."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        object.__setattr__(self, "batch_sampler", Repeat(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]

    def __iter__(self) -> Iterator[torch.Tensor]:  # type: ignore[override]
        for _ in range(len(self)):
            yield next(self.iterator)


class Slices(DataLoader[torch.Tensor]):
    """Goes through its samples by itself."""

    def __iter__(self) -> Iterator[torch.Tensor]:  # type: ignore[override]
        return iter(self.dataset[torch.randperm(3)].split(1))


def persisting() -> DataLoader[torch.Tensor]:
    return DataLoader(Stream(), batch_size=1, num_workers=1, persistent_workers=True)


@pytest.mark.parametrize(
    ("case", "loader"),
    [
        ("no folder", None),
        ("a stream in workers that persist", persisting()),
        ("neither", {1.0, 2.0, 3.0}),
        ("no state after all", Stateless(torch.arange(3.0))),
        ("an order of its own", Slices(torch.arange(3.0), batch_size=1)),
        ("an iterator of its own", InfiniteDataLoader(torch.arange(3.0), batch_size=1)),
    ],
)
def test_trials_that_cannot_be_stored(case: str, loader: Any, tmp_path: Path) -> None:
    """A run that could not come back exactly waits in memory, whatever tier it is asked for."""
    folder = None if case == "no folder" else tmp_path
    session = FakeSession({2: "disk", 5: "host"}, checkpoint_dir=folder)
    assert tiny(session, loader=loader).kept == {"sum": 9}
    assert session.parks == ["resident", "host"]
    assert not any(session.trainings)
    assert not session.states


AROUND: dict[str, Callable[[Any], Any]] = {
    "zip": lambda batches: zip(DataLoader(torch.arange(3.0)), enumerate(batches), strict=False),
    "islice": lambda batches: (each for each in itertools.islice(batches, 2)),
    "map": lambda batches: map(lambda *both: both, batches, range(3)),
    "enumerate": lambda batches: enumerate(map(float, batches)),
}


@pytest.mark.parametrize("case", AROUND)
def test_iterators_around_the_batches(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that they would begin anew is stored between epochs only, and says so once."""
    session = FakeSession({1: "disk"}, checkpoint_dir=tmp_path)
    anew = case != "enumerate"

    def loop() -> None:
        run = PyTorchLoop(new_trial(), {}, session)
        for _ in run.epochs(3):
            for _ in AROUND[case](run.batches([1.0, 2.0, 3.0])):
                session.tick()
            run.report(1.0)

    if anew:
        loop()
    else:
        with pytest.raises(Suspended):
            loop()
    assert session.parks == (["resident"] if anew else ["disk"])
    messages = [each.getMessage() for each in caplog.records]
    said = [f"Trial 0 is stored between epochs only, and waits in memory within them: {case}() is"]
    assert [each[: len(said[0])] for each in messages] == (said if anew else [])
    assert session.states


def test_an_iterator_in_a_generator_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where Python runs the loop by another instruction from some round on."""
    session = FakeSession({1: "disk", 7: "disk"}, checkpoint_dir=tmp_path)
    run = PyTorchLoop(new_trial(), {}, session)

    def pairs(batches: Any) -> Any:
        for batch, number in zip(batches, range(9), strict=False):
            session.tick()
            if number % 2:
                yield batch

    for _ in run.epochs(2):
        for _ in pairs(run.batches([1.0] * 8)):
            pass
        run.report(1.0)
    assert session.parks == ["resident"] * 2
    assert sum("between epochs only" in each.getMessage() for each in caplog.records) == 1


def summed_by_next(batches: Any, step: Callable[[float], float]) -> float:
    items, total = iter(batches), 0.0
    for _ in range(3):
        total += step(next(items))
    return total


COLLECTING: dict[str, tuple[str, Callable[[Any, Callable[[float], float]], float]]] = {
    "a comprehension": (
        "a comprehension",
        lambda batches, step: sum([step(each) for each in batches]),
    ),
    "a dictionary": (
        "a comprehension",
        lambda batches, step: sum({each: step(each) for each in batches}.values()),
    ),
    "a comprehension of two loops": (
        "a comprehension",
        lambda batches, step: sum([step(each) * other for each in batches for other in (1, 2)]),
    ),
    "sum": ("a call such as", lambda batches, step: sum(step(each) for each in batches)),
    "max": ("a call such as", lambda batches, step: max(map(step, batches))),
    "next": ("a call such as", summed_by_next),
}


@pytest.mark.parametrize("case", COLLECTING)
def test_what_collects_batches_without_a_variable(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What it has by then is kept by no checkpoint: it is stored between epochs only."""
    words, collect = COLLECTING[case]

    def loop(session: FakeSession) -> list[float]:
        run, values = PyTorchLoop(new_trial(), {}, session), []

        def step(batch: float) -> float:
            session.tick()
            return batch

        for _ in run.epochs(2):
            values.append(collect(run.batches([1.0, 2.0, 3.0]), step))
            run.report(values[-1])
        return values

    session = FakeSession({1: "disk"}, checkpoint_dir=tmp_path)
    assert loop(session) == loop(FakeSession(checkpoint_dir=tmp_path / "other"))
    assert session.parks == ["resident"]
    assert f"within them: {words}" in caplog.records[0].getMessage()


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_generator_and_a_class_that_pass_batches_on_hold_nothing(
    wrapped: bool, tmp_path: Path
) -> None:
    """A trial with these around its batches is stored within an epoch."""

    class PassingOn:
        def __init__(self, batches: Any) -> None:
            self.items = iter(batches)

        def __iter__(self) -> PassingOn:
            return self

        def __next__(self) -> Any:
            return next(self.items)

    session = FakeSession({1: "disk"}, checkpoint_dir=tmp_path)

    def loop() -> None:
        run = PyTorchLoop(new_trial(), {}, session)
        for _ in run.epochs(2):
            batches = run.batches([1.0, 2.0, 3.0])
            for batch in PassingOn(batches) if wrapped else (2 * each for each in batches):
                session.tick()
                _ = [*[1], batch]  # which appends, but not the batches

    with pytest.raises(Suspended):
        loop()
    assert session.parks == ["disk"]


def test_what_collects_epochs_keeps_the_trial_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The least of the values until then is on Python's stack alone."""
    session = FakeSession({1: "disk"}, checkpoint_dir=tmp_path)
    run = PyTorchLoop(new_trial(), {}, session)

    def train(epoch: int) -> float:
        for _ in run.batches([1.0, 2.0]):
            session.tick()
        run.report(float(epoch))
        return float(epoch)

    assert min(train(epoch) for epoch in run.epochs(3)) == 0.0
    assert session.parks == ["resident"]
    assert "a call such as next() or sum() is around run.epochs()" in caplog.text


@pytest.mark.parametrize("case", ["a list", "a dictionary", "a condition"])
def test_a_comprehension_of_epochs_and_batches_keeps_the_trial_in_memory(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What it has of the epochs until then is nowhere else."""
    session = FakeSession({1: "disk"}, checkpoint_dir=tmp_path)
    run = PyTorchLoop(new_trial(), {}, session)

    def train(epoch: int, batch: float) -> float:
        session.tick()
        if run.batch == 1:
            run.report(0.0)
        return epoch + batch

    loader = [1.0, 2.0]
    if case == "a list":
        found = [train(epoch, each) for epoch in run.epochs(2) for each in run.batches(loader)]
    elif case == "a dictionary":
        by_place = {
            (epoch, each): train(epoch, each)
            for epoch in run.epochs(2)
            for each in run.batches(loader)
        }
        found = list(by_place.values())
    else:
        found = [
            value
            for epoch in run.epochs(2)
            if epoch < 2
            for each in run.batches(loader)
            if (value := train(epoch, each))
        ]
    assert found == [1.0, 2.0, 2.0, 3.0]
    assert session.parks == ["resident"]
    assert "a comprehension is around run.epochs()" in caplog.text


def test_a_loader_whose_batches_come_as_they_are_ready(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Which of them were trained cannot be told within an epoch; between epochs it is stored."""
    caplog.set_level("INFO")
    session = FakeSession({1: "disk", 5: "disk"}, checkpoint_dir=tmp_path)
    loader = DataLoader(
        torch.arange(4.0),
        num_workers=2,
        in_order=False,
        multiprocessing_context="fork",
    )

    def loop() -> None:
        run = PyTorchLoop(new_trial(), {}, session)
        for epoch in run.epochs(3):
            for _ in run.batches(loader):
                session.tick()
            run.report(float(epoch))

    loop()
    assert session.parks[0] == "resident"
    assert session.states
    assert "stored between epochs only: their loader has in_order=False" in caplog.text


class Estimating(Sampler[list[int]]):
    """Batches whose number is only estimated."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2], [3]])

    def __len__(self) -> int:
        return self._length


@pytest.mark.parametrize("length", [2, 4])
def test_not_after_the_last_batch_of_an_epoch_of_another_length(
    length: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once an epoch has shown that its length is wrong: which batch is the last is not known.

    The trial's next process knows it, too.
    """
    caplog.set_level("INFO")
    session = FakeSession({6: "disk"}, checkpoint_dir=tmp_path)
    loader = DataLoader(torch.arange(4.0), batch_sampler=Estimating(length))
    tiny(session, loader=loader)
    assert session.parks == ["resident"]
    assert [state.units for state in session.states] == [1, 2]
    session = session.again({3: "disk"})
    tiny(session, loader=loader)
    assert session.parks == ["resident"]
    assert caplog.text.count(f"the length of its loader is {length}, but it gave 3") == 1


def test_batches_in_another_thread_are_refused(tmp_path: Path) -> None:
    """It would pass the points between batches while the loop trains on."""
    run = PyTorchLoop(new_trial(), {}, FakeSession(checkpoint_dir=tmp_path))
    problems: list[BaseException] = []

    def prefetch(batches: Any) -> None:
        try:
            list(batches)
        except InvalidInputError as error:
            problems.append(error)

    for _ in run.epochs(1):
        thread = threading.Thread(target=prefetch, args=(run.batches([1.0, 2.0]),))
        thread.start()
        thread.join()
    assert "in another thread than that of its loop" in str(problems[0])


def test_trials_that_cannot_be_stored_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On the console once for a study, and in the log of each trial, by what its loader is."""
    for number in range(2):
        run = PyTorchLoop(new_trial(), {}, FakeSession(checkpoint_dir=tmp_path / str(number)))
        for _ in run.epochs(2):
            for _ in run.batches(iter([1.0, 2.0])):
                pass
    on_console = [each for each in caplog.records if each.name.startswith("optuna_hermes.suspend")]
    assert len(caplog.records) == len(on_console) + 2 == 3
    for each in caplog.records:
        assert each.levelname == "WARNING"
        assert "only wait in memory: its loader, of list_iterator, is neither" in each.getMessage()


@pytest.mark.parametrize(
    ("around", "words"),
    [
        (tqdm, "a progress bar: write tqdm(run.batches(loader)), not run.batches(tqdm(loader))"),
        (enumerate, "enumerate(): write enumerate(run.batches(loader)), not run.batches(enum"),
        (lambda loader: zip(loader, "ab", strict=True), "zip(): write zip(run.batches(loader), o"),
    ],
)
def test_an_iterator_within_the_batches_is_named(
    around: Callable[[Any], Any], words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With what to write in place of it, after which nothing is warned of."""
    for number, loader in enumerate([around([1.0, 2.0]), [1.0, 2.0]]):
        run = PyTorchLoop(new_trial(), {}, FakeSession(checkpoint_dir=tmp_path / str(number)))
        for _ in run.epochs(1):
            for _ in around(run.batches(loader)):
                pass
    assert len(caplog.records) == 2
    for each in caplog.records:
        assert f"can only wait in memory: its loader is within {words}" in each.getMessage()


def test_a_loss_with_a_gradient_is_reported_without_a_warning() -> None:
    """Torch would warn of it in the log of each trial."""
    run = PyTorchLoop(new_trial(), {}, FakeSession())
    for _ in run.epochs(1):
        run.report(torch.ones((), requires_grad=True))
    assert run.value == 1.0


@pytest.mark.parametrize(
    ("noise", "kind", "lines"),
    [(0.0, StatefulDataLoader, 0), (0.1, StatefulDataLoader, 1), (0.1, DataLoader, 0)],
)
def test_random_numbers_in_workers(
    noise: float, kind: Any, lines: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Random numbers that cannot be brought back exactly are reported, by name and once."""
    loader = kind(Points(noise), 32, num_workers=1, multiprocessing_context="fork")
    tiny(FakeSession(checkpoint_dir=tmp_path), loader=loader)
    assert [r.getMessage()[:27] for r in caplog.records] == ["Trial 0: Points draws rando"] * lines


@pytest.mark.parametrize("workers", [0, 1])
def test_nothing_is_left_in_the_loader(workers: int, tmp_path: Path) -> None:
    """After a suspension, and after a resumed loop, the loader is as before."""
    session = FakeSession({4: "disk"}, checkpoint_dir=tmp_path)
    context = "fork" if workers else None
    loader = DataLoader(Points(0.0), 32, num_workers=workers, multiprocessing_context=context)
    before = dict(vars(loader))
    with pytest.raises(Suspended):
        tiny(session, loader=loader)
    assert vars(loader) == before
    tiny(session.again(), loader=loader)
    assert vars(loader) == before


@pytest.mark.parametrize("workers", [0, 1])
def test_trials_without_checkpoints_may_share_a_loader(workers: int) -> None:
    """It stays as it is: threads of a plain study begin and end their trials in any order."""
    context = "fork" if workers else None
    loader = DataLoader(Points(0.0), 32, num_workers=workers, multiprocessing_context=context)
    before = dict(vars(loader))

    def objective() -> Iterator[dict[str, Any]]:
        run = PyTorchLoop(new_trial(), {}, FakeSession())
        for _ in run.epochs(2):
            for _ in run.batches(loader):
                yield dict(vars(loader))

    trials = [objective(), objective()]
    assert [next(each) for each in trials] == [before, before]


def test_a_loader_with_a_state_that_an_epoch_makes_goes_with_it(tmp_path: Path) -> None:
    """Its workers end where the loop leaves it before its last batch."""
    made: list[weakref.ref[Any]] = []
    run = PyTorchLoop(new_trial(), {}, FakeSession(checkpoint_dir=tmp_path))

    def loader() -> Any:
        each = StatefulDataLoader(Points(), 8, num_workers=1, multiprocessing_context="fork")
        made.append(weakref.ref(each))
        return each

    for epoch in run.epochs(3):
        for _ in run.batches(loader()):
            break
        gc.collect()
        assert [each() for each in made[:epoch]] == [None] * epoch
        run.report(0.0)


def test_kept_values(tmp_path: Path) -> None:
    """A list that the objective holds is the one that comes back filled."""

    def loop(session: FakeSession) -> list[int]:
        run = PyTorchLoop(new_trial(), {}, session)
        seen: list[int] = run.kept.setdefault("seen", [])
        for epoch in run.epochs(2):
            seen.append(-epoch)
            for number in run.batches(range(4)):
                seen.append(number)
                session.tick()
            run.report(0.0)
        return seen

    session = FakeSession({6: "disk"}, checkpoint_dir=tmp_path)
    with pytest.raises(Suspended):
        loop(session)
    assert loop(session.again()) == [0, 0, 1, 2, 3, -1, 0, 1, 2, 3]


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"best": 0.5}, r"suspendable\(best=\.\.\.\) must have state_dict.* is 0\.5: .*run\.kept"),
        ({"net": nn.Linear}, r"net=\.\.\.\) must have"),
        ({"data": DataLoader([1])}, r"data=\.\.\.\) must not be a loader.*run\.batches\(\)"),
        ({"data": DataLoader(Stream())}, "is a DataLoader"),
    ],
)
def test_what_cannot_be_named(named: dict[str, Any], message: str) -> None:
    """An object that could not be brought back is refused by its name, with or without a broker."""
    with pytest.raises(InvalidInputError, match=message):
        suspendable(new_trial(), **named)


def test_an_object_that_is_none_is_left_out() -> None:
    """As where a scheduler is optional."""
    run = suspendable(new_trial(), net=nn.Linear(1, 1), scheduler=None)
    for _ in run.epochs(1):
        run.report(1.0)
    assert run.value == 1.0


def test_one_call_in_an_objective() -> None:
    """A second call would count the same units: that is refused."""
    session = FakeSession()
    tiny(session)
    with pytest.raises(InvalidInputError, match=r"once in an objective, but trial 0.* in one loop"):
        tiny(session)


def test_one_loop_over_epochs() -> None:
    """A second loop would have no place to come back to."""
    run = tiny(None)
    with pytest.raises(InvalidInputError, match=r"run\.epochs\(\) must be used once"):
        list(run.epochs(3))


def test_a_number_of_epochs_that_is_not_known() -> None:
    """It is refused with what to write, at the call; a number's length shows in progress bars."""
    run = PyTorchLoop(new_trial(), {}, None)
    with pytest.raises(InvalidInputError, match=r"got count\(0\): .* leave the loop with break"):
        run.epochs(itertools.count())  # type: ignore[arg-type]
    epochs: Any = run.epochs(range(1, 5))
    assert len(epochs) == 4
    assert list(epochs) == [1, 2, 3, 4]


def test_one_loop_over_batches() -> None:
    """Neither would a second loop over batches, nor one outside of an epoch."""
    run = PyTorchLoop(new_trial(), {}, None)
    with pytest.raises(InvalidInputError, match="once in each epoch"):
        next(iter(run.batches([1])))
    for _ in run.epochs(1):
        list(run.batches([1]))
        with pytest.raises(InvalidInputError, match="once in each epoch"):
            next(iter(run.batches([1])))


def test_no_report_outside_of_epochs() -> None:
    """A loop that goes past ``run.epochs`` would never give its device back."""
    run = PyTorchLoop(new_trial(), {}, None)
    with pytest.raises(InvalidInputError, match=r"must come in the loop over run\.epochs"):
        run.report(1.0)


def test_a_report_of_no_number_is_refused() -> None:
    """With the trial, and what it has reported."""
    run = PyTorchLoop(new_trial(), {}, None)
    values: list[Any] = [None, "x", torch.ones(2)]
    for epoch in run.epochs(len(values)):
        with pytest.raises(InvalidInputError, match=r"^Trial 0 must report a number but got .*: "):
            run.report(values[epoch])


def test_a_loop_for_what_is_no_trial_is_refused() -> None:
    """At the call, not once it has trained an epoch."""
    with pytest.raises(InvalidInputError, match=r"suspendable\(\) must be given the trial first"):
        suspendable(nn.Linear(1, 1))


@pytest.mark.parametrize("early", [False, True])
def test_workers_that_begin_before_the_loop(early: bool, tmp_path: Path, caplog: Any) -> None:
    """Those of a second loader: nobody has noted what they draw, and it may be random numbers."""
    loader = DataLoader(list(range(4)), num_workers=1, persistent_workers=True)
    if early:
        next(iter(loader))
    session = FakeSession(decides={1: "disk"}, checkpoint_dir=tmp_path)

    def train() -> None:
        run = PyTorchLoop(new_trial(), {"model": nn.Linear(1, 1)}, session)
        for _ in run.epochs(2):
            for _ in run.batches([1, 2]):
                session.tick()
            run.report(float(sum(loader)))

    with pytest.raises(Suspended):
        train()
    said = [each for each in caplog.messages if "have begun before the loop" in each]
    assert len(said) == early


def test_a_loop_for_no_trial() -> None:
    """The loop that has tuned a model trains the last one, too."""
    run = suspendable(None, model=nn.Linear(1, 1))
    for epoch in run.epochs(2):
        assert list(run.batches("ab")) == ["a", "b"]
        run.report(float(epoch))
    assert run.value == 1.0


def test_reports_within_the_first_batch(tmp_path: Path) -> None:
    """Validation may come by the number of batches, and count from the first one."""
    session = FakeSession(checkpoint_dir=tmp_path)
    run = PyTorchLoop(new_trial(), {"model": nn.Linear(1, 1)}, session)
    for epoch in run.epochs(2):
        for _ in run.batches([1.0, 2.0, 3.0]):
            if run.batch % 2 == 0:
                run.report(10.0 * epoch + run.batch)
            session.tick()
    assert [value for _, _, value in session.reports] == [0.0, 2.0, 10.0, 12.0]
    run = PyTorchLoop(new_trial(), {}, None)
    for _ in run.loader([1.0]):
        run.report(1.0)
    assert run.value == 1.0


def test_epochs_of_one_batch_that_are_left_at_once(tmp_path: Path) -> None:
    """As ``next(iter(run.batches(loader)))``: what is reported to Optuna is heard, and saved."""

    def train(session: FakeSession) -> list[float]:
        model = nn.Linear(1, 1)
        nn.init.ones_(model.weight)
        trial = new_trial()
        run = PyTorchLoop(trial, {"model": model}, session)
        values = run.kept.setdefault("values", [])
        for epoch in run.epochs(4):
            x = next(iter(run.batches([1.0, 2.0])))
            with torch.no_grad():
                model.weight *= 2 * x
            values.append(model.weight.item())
            session.tick()
            trial.report(values[-1], epoch)
        return values

    session = FakeSession({2: "disk"}, checkpoint_dir=tmp_path)
    with pytest.raises(Suspended):
        train(session)
    assert [value for _, _, value in session.reports] == [2.0, 4.0]
    session = session.again()
    assert train(session) == [2.0, 4.0, 8.0, 16.0]
    assert [value for _, _, value in session.reports] == [8.0, 16.0]


Part = Callable[[Any], Iterator[Any]]


def by_others(loader: Any, model: nn.Module, epochs: int, part: Part = iter) -> list[float]:
    """A function that has loops and optimizer, and asks its loader for more than batches."""
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for _ in range(epochs):
        model.train()
        for x, y in part(loader):
            loss = nn.functional.cross_entropy(model(x), y) / len(loader) * len(loader.dataset)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("tier", ["resident", "host"])
def test_loops_of_a_function(tier: TierName, tmp_path: Path) -> None:
    """Between batches of the loader that it is given others may train, and nothing changes."""

    def train(session: FakeSession | None) -> tuple[list[float], PyTorchLoop, optuna.Trial]:
        scramble(1)
        model, trial = network(), new_trial()
        run = PyTorchLoop(trial, {"model": model}, session)
        loader = run.loader(DataLoader(Points(), 8, shuffle=True), report=lambda: random.random())
        if session is not None:
            session.tick()
        return by_others(loader, model, EPOCHS), run, trial

    wanted, _, _ = train(None)
    session = FakeSession({1: tier}, checkpoint_dir=tmp_path)
    losses, run, trial = train(session)
    assert losses == wanted
    assert [unit for unit, *_ in session.reports] == [1, 2, 3, 4]
    assert list(trial.study.trials[0].intermediate_values) == [1, 2, 3, 4]
    assert session.parks == [tier]
    assert session.trainings == [False, False]
    assert run._unit == EPOCHS


def by_count(loader: Any) -> Iterator[Any]:
    """All batches, without asking for one more."""
    batches = iter(loader)
    return (next(batches) for _ in range(len(loader)))


@pytest.mark.parametrize("part", [lambda loader: itertools.islice(loader, 5), by_count])
def test_passes_that_a_function_leaves(part: Part, tmp_path: Path) -> None:
    """Each is reported once, when the next one begins, and nothing changes; a look is no pass."""

    def train(trial: Any, session: FakeSession | None, wrap: bool = True) -> list[float]:
        def at_begin(loader: Any) -> Iterator[Any]:
            weights.append(weight())
            if session is not None:
                session.tick()
            return part(loader)

        def weight() -> float:
            return model[0].weight.sum().item()

        def report() -> float:
            random.random()
            return weight() if model.eval() else 0.0

        scramble(1)
        model, loader = network(), DataLoader(Points(), 8, shuffle=True)
        batches = (
            PyTorchLoop(trial, {"model": model}, session).loader(loader, report) if wrap else loader
        )
        next(iter(batches))
        return by_others(batches, model, EPOCHS, at_begin)

    weights: list[float] = []
    wanted = train(None, None, wrap=False)
    reports = [(unit, unit, weights[unit]) for unit in range(1, EPOCHS)]
    trial, plain, waits = new_trial(), new_trial(), []
    session = FakeSession({2: "host"}, checkpoint_dir=tmp_path)
    session._while_parked = lambda: waits.append(len(session.reports))
    assert train(trial, session) == wanted
    assert (session.reports, waits) == (reports, [1])
    assert train(plain, None) == wanted
    again = FakeSession(checkpoint_dir=tmp_path)  # its process has ended, and it begins anew
    assert train(trial, again) == wanted
    assert again.reports == reports
    for each in (trial, plain):
        values = each.study.trials[0].intermediate_values
        assert values == {unit: value for unit, _, value in reports}


def test_a_pass_that_was_left_is_reported_once() -> None:
    """Whole passes follow, which are reported at their ends, and one that is only looked at."""
    trial = new_trial()
    loader = PyTorchLoop(trial, {}, None).loader("abc", report=lambda: 1.0)
    reported = []
    for batches in (2, 4, 4, 1, 3, 1):
        list(itertools.islice(loader, batches))
        reported.append(len(trial.study.trials[0].intermediate_values))
    assert reported == [0, 2, 3, 3, 3, 4]


def test_loops_of_a_function_do_not_go_on_from_a_loop(tmp_path: Path) -> None:
    """A checkpoint of a loop over epochs says nothing about a function that begins anew."""
    session = stored(tmp_path)
    run = PyTorchLoop(new_trial(), {"model": nn.Linear(1, 1)}, session)
    with pytest.raises(CheckpointError, match=r"stored in a loop over run\.epochs"):
        run.loader([1.0])


def test_values_that_the_loop_reports_to_optuna(tmp_path: Path) -> None:
    """``trial.report`` may stay: the broker hears of it, and a checkpoint follows."""
    trial, session = new_trial("maximize"), FakeSession(checkpoint_dir=tmp_path)
    trial.report(5.0, 77)
    run = PyTorchLoop(trial, {"model": nn.Linear(1, 1)}, session)
    trial.report(6.0, 78)  # before its loop
    for epoch in run.epochs(3):
        for _ in run.batches([1.0, 2.0]):
            session.tick()
        trial.report(value=10.0 - epoch, step=epoch)
        assert not trial.should_prune()
    assert session.reports == [(1, 1, -10.0), (2, 2, -9.0), (3, 3, -8.0)]
    assert [each.units for each in session.states] == [1, 2]
    assert trial.study.trials[0].intermediate_values == {77: 5.0, 78: 6.0, 0: 10.0, 1: 9.0, 2: 8.0}
    assert run.value == 8.0


def test_values_are_not_heard_twice(tmp_path: Path) -> None:
    """A loop that calls ``run.report`` may tell Optuna something else besides."""
    trial, session = new_trial(), FakeSession(checkpoint_dir=tmp_path)
    run = PyTorchLoop(trial, {"model": nn.Linear(1, 1)}, session)
    for epoch in run.epochs(2):
        run.report(1.0)
        trial.report(2.0, 100 + epoch)
    assert [value for _, _, value in session.reports] == [1.0, 1.0]


def test_epochs_may_begin_at_one(tmp_path: Path) -> None:
    """A range is gone through from the epoch where the run is, by its own numbers."""
    session = FakeSession({2: "disk"}, checkpoint_dir=tmp_path)
    seen = []

    def train(session: FakeSession) -> None:
        run = PyTorchLoop(new_trial(), {}, session)
        for epoch in run.epochs(range(1, 8, 2)):
            seen.append(epoch)
            session.tick()
            run.report(1.0)

    with pytest.raises(Suspended):
        train(session)
    train(session.again())
    assert seen == [1, 3, 5, 7]


@pytest.mark.parametrize("first", [0, 2])
def test_an_objective_that_resumes_by_itself_too(first: int, tmp_path: Path) -> None:
    """Its range begins where it has come to, which is no other training than that of the first."""
    done: list[int] = []

    def train(session: FakeSession) -> int:
        run = PyTorchLoop(new_trial(), {}, session)
        epochs = run.epochs(range(done[-1] + 1 if done else first, 8))
        for epoch in epochs:
            for _ in run.batches([0, 0]):
                session.tick()
            done.append(epoch)
            run.report(1.0)
        return len(epochs)  # type: ignore[arg-type]

    assert by_way_of_disk(train, tmp_path, 3, 4, 3) == 8 - first
    assert done == list(range(first, 8))


def test_fewer_epochs_than_are_trained_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A loop over what an objective of its own counting has left would end in silence."""

    def train(session: FakeSession) -> None:
        run = PyTorchLoop(new_trial(), {}, session)
        for _ in run.epochs(4 if session.checkpoints else 8):
            session.tick()
            run.report(1.0)

    by_way_of_disk(train, tmp_path, 5)
    (said,) = [each.getMessage() for each in caplog.records]
    assert "its loop now has 4 epochs, and ends before the one in which the trial was" in said


def test_batches_have_what_the_loader_has() -> None:
    """A function that trains an epoch may ask for length, data set and batch size."""
    loader = DataLoader(Points(), 8)
    run = PyTorchLoop(new_trial(), {}, None)
    for _ in run.epochs(1):
        batches: Any = run.batches(loader)
        assert (len(batches), batches.batch_size) == (len(loader), 8)
        assert batches.dataset is loader.dataset
        assert len(list(batches)) == len(loader)
        with pytest.raises(AttributeError):
            _ = batches.nothing


class Buckets(Sampler[list[int]]):
    """Batches in an order drawn from the epoch, which the loop sets."""

    def __init__(self) -> None:
        self.epoch = 0
        self._size = 2

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.default_rng(self.epoch).permutation(8).tolist()
        return iter([order[at : at + self._size] for at in range(0, 8, self._size)])

    def __len__(self) -> int:
        return 8 // self._size


def bucketed(session: FakeSession | None, seen: list[list[int]]) -> None:
    """A loop that tells the loader's sampler the epoch."""
    loader = DataLoader(torch.arange(8), batch_sampler=Buckets())
    run = PyTorchLoop(new_trial(), {}, session)
    for epoch in run.epochs(3):
        loader.batch_sampler.epoch = epoch
        for batch in run.batches(loader):
            seen.append(batch.tolist())
            if session is not None:
                session.tick()
        assert loader.batch_sampler.epoch == epoch
        run.report(0.0)


def test_attributes_of_a_sampler(tmp_path: Path) -> None:
    """An attribute set by a loop on its loader's sampler is there, in memory and after disk."""
    plain: list[list[int]] = []
    bucketed(None, plain)
    assert plain[:4] != plain[4:8] != plain[8:]
    for yields in ({}, {6: "disk"}):
        seen: list[list[int]] = []
        session = FakeSession(yields, checkpoint_dir=tmp_path)
        if yields:
            with pytest.raises(Suspended):
                bucketed(session, seen)
            session = session.again()
        bucketed(session, seen)
        assert seen == plain


def newton(session: FakeSession | None, trace: Trace) -> None:
    """All data at once: an epoch has a closure that is called some times, and no batches."""
    scramble(1)
    model, data = network(), Points()
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)
    x, y = (torch.stack(list(map(torch.as_tensor, each))) for each in zip(*data, strict=True))
    if session is not None and session.checkpoints:
        scramble(session.checkpoints[0].units + 20)
    run = PyTorchLoop(new_trial(), {"model": model, "optimizer": optimizer}, session)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for epoch in run.epochs(EPOCHS):
        loss = optimizer.step(closure)
        trace.note(trace.losses, epoch, loss.item())
        if session is not None:
            session.tick()
        run.report(loss.item())
    trace.note(trace.end, "random", torch.rand(()))


def validated_first(session: FakeSession | None, trace: Trace) -> None:
    """Reports before its first batch, and between two epochs without ``batches``."""
    scramble(1)
    model = nn.Sequential(nn.Linear(8, 3), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(Points(), 8, shuffle=True)
    if session is not None and session.checkpoints:
        scramble(session.checkpoints[0].units + 20)
    run = PyTorchLoop(new_trial(), {"model": model, "optimizer": optimizer}, session)
    for epoch in run.epochs(EPOCHS):
        if epoch == 0:
            run.report(model[0].weight.sum().item())
        for number, (x, y) in enumerate(loader if epoch == 1 else run.batches(loader)):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            key = (epoch, number if epoch == 1 else run.batch)
            trace.note(trace.losses, key, loss.item())
            if session is not None:
                session.tick()
        run.report(loss.item())
    trace.note(trace.end, "random", torch.rand(()))


class Walk:
    """An environment of the user's own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)
        self.place = 0.0

    def step(self) -> float:
        self.place += self.rng.normal()
        return self.place


def remembering(session: FakeSession | None, trace: Trace) -> None:
    """Draws from a buffer of what an environment has done before."""
    run = PyTorchLoop(new_trial(), {}, session)
    buffer = run.kept.setdefault("buffer", collections.deque(maxlen=7))
    walk = run.kept.setdefault("walk", Walk())
    last = run.kept.setdefault("last", (0.0, buffer))
    assert last[1] is run.kept["last"][1]
    for epoch in run.epochs(EPOCHS):
        for number in run.batches(range(BATCHES)):
            buffer.append((epoch, number, np.float32(walk.step())))
            trace.note(trace.losses, (epoch, number), float(random.choice(buffer)[2]))
            if session is not None:
                session.tick()
        run.report(walk.place)


def test_kept_arrays_that_the_loop_holds(tmp_path: Path) -> None:
    """Arrays got from ``run.kept`` before the loop are those that are stored, in each process."""

    def train(session: FakeSession) -> dict[str, Any]:
        model = nn.Linear(1, 1)
        run = PyTorchLoop(new_trial(), {"model": model}, session)
        losses = run.kept.setdefault("losses", np.zeros(6))
        seen = run.kept.setdefault("parts", {"seen": torch.zeros(6)})["seen"]
        run.kept["weights"] = model.state_dict()
        for epoch in run.epochs(6):
            nn.init.constant_(model.weight, epoch)
            losses[epoch] = epoch
            seen[epoch] += 1
            session.tick()
            run.report(1.0)
        assert run.kept["losses"] is losses
        assert model.weight.item() == 5
        return run.kept

    session = FakeSession({2: "disk"}, checkpoint_dir=tmp_path)
    for yields in ({2: "disk"}, {}):
        with pytest.raises(Suspended):
            train(session)
        session = session.again(yields)
    kept = train(session)
    assert kept["losses"].tolist() == [0, 1, 2, 3, 4, 5]
    assert kept["parts"]["seen"].tolist() == [1] * 6


def test_kept_containers_and_objects(tmp_path: Path) -> None:
    """A replay buffer and an environment come back, and what the objective holds is them."""
    plain, trace = Trace(), Trace()
    scramble(1)
    remembering(None, plain)
    scramble(1)
    session = FakeSession({BATCHES + 3: "disk"}, checkpoint_dir=tmp_path)
    for stop in (2, BATCHES, 0):
        with pytest.raises(Suspended):
            remembering(session, trace)
        scramble()
        session = session.again({stop: "disk"} if stop else {})
    remembering(session, trace)
    assert trace.seen() == plain.seen()


@pytest.mark.parametrize("value", [iter([1]), collections.defaultdict(object), threading.Lock()])
def test_what_is_kept_must_be_storable(value: object, tmp_path: Path) -> None:
    """It is that trial's fault alone."""
    session = FakeSession({3: "disk"}, checkpoint_dir=tmp_path)
    run = PyTorchLoop(new_trial(), {}, session)
    run.kept["it"] = value

    def loop() -> None:
        for _ in run.epochs(1):
            for _ in run.batches(range(5)):
                session.tick()

    with pytest.raises(UnstorableError, match=r"run\.kept\['it'\] could not be made") as raised:
        loop()
    assert is_misuse(raised.value, anything_reported=False)


@pytest.mark.parametrize(
    ("train", "stops", "units"),
    [(newton, (1, 2), 4), (validated_first, (3, 14, 2), 5), (validated_first, (15,), 5)],
)
def test_epochs_without_batches(
    train: Callable[[FakeSession | None, Trace], None],
    stops: tuple[int, ...],
    units: int,
    tmp_path: Path,
) -> None:
    """``epochs`` alone is a place to switch, and what is reported there is reported once."""
    plain, trace = Trace(), Trace()
    train(None, plain)
    session = FakeSession(checkpoint_dir=tmp_path)
    told: list[int] = []
    for stop in stops:
        session = session.again({stop: "disk"})
        with pytest.raises(Suspended):
            train(session, trace)
        told += [report[0] for report in session.reports]
    session = session.again()
    train(session, trace)
    assert trace.seen() == plain.seen()
    assert [*told, *(report[0] for report in session.reports)] == list(range(1, units + 1))


class LatenessSession(FakeSession):
    """Notes of each first batch whether the trial had trained before."""

    def training(self, *, can_store: bool, late: bool = False) -> None:
        self.trainings.append(late)


@pytest.mark.parametrize(
    ("train", "late"), [(newton, True), (validated_first, True), (remembering, False)]
)
def test_what_is_trained_before_the_first_clean_point_is_said(
    train: Callable[[FakeSession | None, Trace], None], late: bool, tmp_path: Path
) -> None:
    """Nobody knows of a first epoch that it has no batches; later it waits at the epoch's begin."""
    session = LatenessSession({3: "resident"}, checkpoint_dir=tmp_path)
    train(session, Trace())
    assert session.trainings == [late, False]


# -- checkpoints -------------------------------------------------------------------------------


def stored(folder: Path, **named: Any) -> FakeSession:
    """A run that was stored after its second unit."""
    session = FakeSession({7: "disk"}, checkpoint_dir=folder)
    with pytest.raises(Suspended):
        tiny(session, **named)
    return session.again()


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({}, "it holds model, other, not model"),
        ({"other": nn.Linear(3, 3)}, "other cannot be loaded from it: .*size mismatch"),
    ],
)
def test_other_objects(named: dict[str, Any], message: str, tmp_path: Path) -> None:
    """A checkpoint that does not fit what the objective makes now is named, with the reason."""
    session = stored(tmp_path, other=nn.Linear(2, 2))
    path = Path(session.checkpoints[0].path)
    with pytest.raises(CheckpointError, match=rf"(?s){path.name} of trial 0 must fit.*{message}"):
        tiny(session, **named)


def test_no_good_checkpoint(tmp_path: Path) -> None:
    """A run none of whose checkpoints is good is an error, never a restart from epoch 0."""
    session = stored(tmp_path)
    for state in session.checkpoints:
        Path(state.path).write_bytes(Path(state.path).read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"No checkpoint of trial 0 can be used.*must have"):
        tiny(session)
    assert session.reports == []


def test_state_that_cannot_be_stored(tmp_path: Path) -> None:
    """An object whose state is no plain value is an error that names it, at the first save."""
    odd = Smoothed()
    odd.value = object()  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match=r"trial 0 must hold only .*odd.*value"):
        tiny(FakeSession(checkpoint_dir=tmp_path), odd=odd)
    assert list(tmp_path.iterdir()) == []


# -- with everything ---------------------------------------------------------------------------

STUDY = """
import optuna
import torch
from torch import nn

from optuna_hermes import HermesPruner, HermesSampler, optimize, suspendable
from optuna_hermes.suspend._state import seed_everything, trial_seed


def objective(trial):
    model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.2), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=trial.suggest_float("lr", 1e-4, 1e-1))
    data = torch.utils.data.TensorDataset(torch.randn(512, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    run = suspendable(trial, model=model, optimizer=optimizer)
    for epoch in run.epochs(6):
        run.kept["loss"] = 0.0
        for (x,) in run.batches(loader):
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.kept["loss"] += loss.item()
        run.report(run.kept["loss"])
    return run.value


study = optuna.create_study(
    storage="sqlite:///study.db", sampler=HermesSampler(), pruner=HermesPruner()
)
rates = [0.001 * 2**number for number in range(6)]
for lr in rates:
    study.enqueue_trial({"lr": lr})
result = optimize(
    study, objective, n_trials=6, devices="cpu:2", policy="round-robin", slice_seconds=0.05, seed=3
)
assert result.switches, result
torch.set_num_threads(1)
for number, lr in enumerate(rates):
    seed_everything(trial_seed(3, number))
    assert objective(optuna.trial.FixedTrial({"lr": lr})) == study.trials[number].value, number
"""


@pytest.mark.slow
def test_study(tmp_path: Path) -> None:
    """Trials that take turns have the values of trials that nobody suspends, bit for bit."""
    (tmp_path / "study.py").write_text(STUDY)
    done = subprocess.run(
        [sys.executable, "study.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def main(folder: Path, seed: int, case: str) -> None:
    """Go on from the checkpoint described in ``folder``, and write down the rest of the run."""
    torch.set_num_threads(1)
    state = json.loads((folder / "state.json").read_text())
    stored = Checkpoint(**state)
    trace = Trace()
    session = FakeSession(checkpoint_dir=folder, checkpoints=(stored,))
    train(session, trace, seed=seed, case=case)
    torch.save(trace.seen(), folder / "trace.pt")


if __name__ == "__main__":
    for name in sys.argv[3:]:
        main(Path(sys.argv[1]) / name, int(sys.argv[2]), name)
