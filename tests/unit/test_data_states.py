"""State of data sets, collate functions and samplers comes back with a trial from disk."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import logging
import random
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from optuna_hermes.errors import Suspended
from optuna_hermes.pytorch import PyTorchLoop
from optuna_hermes.suspend._loaders._attributes import LoaderAttributes
from optuna_hermes.suspend._loaders._workers import Workers
from optuna_hermes.suspend._values import _generators
from optuna_hermes.suspend._values._generators import (
    GeneratorOwner,
    holders_in,
    set_states,
    states_of,
)
from optuna_hermes.testing import FakeSession

EPOCHS, SAMPLES, SIZE = 5, 32, 8
Objective = Callable[["Trial"], None]


@pytest.fixture(autouse=True)
def _warn_anew() -> None:
    torch.set_num_threads(1)
    _generators._warn_of_missing.cache_clear()


class Trial:
    """A trial's objective in one of its processes, and the batches of all of them."""

    def __init__(self, trial: Any, session: FakeSession, seen: dict[Any, Any]) -> None:
        self._session = session
        self.run = PyTorchLoop(trial, {"model": torch.nn.Linear(1, 1)}, session)
        self.seen = seen

    def epochs(self) -> Iterable[int]:
        return self.run.epochs(EPOCHS)

    def train(self, epoch: int, loader: Any) -> Iterator[int]:
        """Note an epoch's batches; yield each batch's number before the next clean point."""
        for batch in self.run.batches(loader):
            self.seen[epoch, self.run.batch] = batch.flatten().tolist()
            self._session.tick()
            yield self.run.batch
        self.run.report(0.0)

    def tick(self) -> None:
        """Count an epoch without batches as one."""
        self._session.tick()

    def go_through(self, epoch: int, loader: Any) -> None:
        for _ in self.train(epoch, loader):
            pass


def seen(objective: Objective, folder: Path, stops: Iterable[int] = ()) -> dict[Any, Any]:
    """All batches of a trial that goes to disk after these numbers of batches of each process."""
    trial = optuna.create_study().ask()
    found: dict[Any, Any] = {}
    left: list[int | None] = [*stops, None]
    checkpoints: tuple[Any, ...] = ()
    while left:
        stop = left.pop(0)
        yields: Any = None if stop is None else {stop: "disk"}
        session = FakeSession(yields, checkpoint_dir=folder / "trial", checkpoints=checkpoints)
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(0)
        try:
            objective(Trial(trial, session, found))
            assert stop is None
        except Suspended:
            checkpoints = session.checkpoints
            gc.collect()
    return found


def check(objective: Objective, folder: Path, *stops: int) -> None:
    """A trial that goes to disk sees the batches of one that does not."""
    uninterrupted = seen(objective, folder / "plain")
    assert seen(objective, folder / "stopped", stops) == uninterrupted


def own_generators(data: object) -> list[GeneratorOwner]:
    return holders_in(GeneratorOwner("dataset", data))


def numbers() -> Any:
    return torch.arange(float(SAMPLES)).reshape(-1, 1)


# -- random generators ----------------------------------------------------------------------------


class Noise:
    """Adds random numbers of a generator of its own."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        own = self.generator
        if isinstance(own, torch.Generator):
            return value + torch.rand(value.shape, generator=own)
        return value + (own.random() if isinstance(own, random.Random) else float(own.normal()))


class Late(Dataset[torch.Tensor]):
    """Makes its generator with its first sample."""

    def __init__(self, make: Callable[[int], Any], *, declared: bool) -> None:
        self._make = make
        if declared:
            self.rng: Any = None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        if getattr(self, "rng", None) is None:
            worker: Any = get_worker_info()
            self.rng = self._make(worker.seed if worker else 0)
        return Noise(self.rng)(torch.tensor([float(index)]))


@dataclasses.dataclass(slots=True)
class NoiseInSlots:
    """The same, without a ``__dict__``."""

    generator: Any = None

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        if self.generator is None:
            self.generator = np.random.default_rng(1)
        return Noise(self.generator)(value)


class Nested(Dataset[torch.Tensor]):
    def __init__(self, noise: Any = None) -> None:
        self.augment = {"noise": [noise or Noise(np.random.default_rng(1))]}
        self.itself = self

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.augment["noise"][0](torch.tensor([float(index)]))


class Collate:
    def __init__(self, generator: Any) -> None:
        self.noise = Noise(generator)

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return self.noise(torch.stack(samples))

    def method(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return self(samples)


def collate_with(samples: list[torch.Tensor], *, noise: Noise) -> torch.Tensor:
    return noise(torch.stack(samples))


MAKERS: dict[str, Callable[[int], Any]] = {
    "torch": lambda seed: torch.Generator().manual_seed(seed),
    "generator": np.random.default_rng,
    "mt19937": lambda seed: np.random.Generator(np.random.MT19937(seed)),
    "state": lambda seed: np.random.RandomState(seed % 2**32),
    "python": random.Random,
}


def one_loader(make: Callable[[], Any]) -> Objective:
    """An objective that goes through one loader in all its epochs."""

    def objective(trial: Trial) -> None:
        loader = make()
        for epoch in trial.epochs():
            trial.go_through(epoch, loader)

    return objective


@pytest.mark.parametrize(
    ("kind", "workers"), [*((kind, 0) for kind in MAKERS), ("torch", 2), ("generator", 2)]
)
def test_a_generator_made_with_the_first_sample(kind: str, workers: int, tmp_path: Path) -> None:
    """A generator that a data set makes when it is first used goes on where it was."""
    data = functools.partial(Late, MAKERS[kind], declared=kind != "torch")
    check(one_loader(lambda: DataLoader(data(), batch_size=SIZE, num_workers=workers)), tmp_path, 6)


@pytest.mark.parametrize(
    ("kind", "workers"), [("torch", 0), ("generator", 0), ("python", 0), ("python", 2)]
)
def test_a_generator_of_a_collate_function(kind: str, workers: int, tmp_path: Path) -> None:
    """The generator of an object that collates goes on where it was."""

    def make() -> Any:
        collate = Collate(MAKERS[kind](3))
        return DataLoader(numbers(), batch_size=SIZE, collate_fn=collate, num_workers=workers)

    check(one_loader(make), tmp_path, 6, 3)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_generators_of_a_loader_that_keeps_its_position(tmp_path: Path) -> None:
    """Those of its data set and of its collate function, as of any other loader."""
    collate = Collate(np.random.default_rng(3))
    data = functools.partial(Late, MAKERS["generator"], declared=True)

    def make() -> Any:
        collate.noise.generator = np.random.default_rng(3)
        return StatefulDataLoader(data(), batch_size=SIZE, shuffle=True, collate_fn=collate)

    check(one_loader(make), tmp_path, 6, 3)


@pytest.mark.parametrize("kind", ["method", "partial"])
def test_a_generator_behind_a_collate_function(kind: str, tmp_path: Path) -> None:
    """The generator in a bound method's object, or in a partial's arguments, is found, too."""

    def make() -> Any:
        own = np.random.default_rng(2)
        method, partial = Collate(own).method, functools.partial(collate_with, noise=Noise(own))
        collate: Any = method if kind == "method" else partial
        return DataLoader(numbers(), batch_size=SIZE, collate_fn=collate)

    check(one_loader(make), tmp_path, 6)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_generator_within_parts_of_a_data_set(workers: int, tmp_path: Path) -> None:
    """Generators are found in parts of any name, also where a data set refers to itself."""
    check(
        one_loader(lambda: DataLoader(Nested(), batch_size=SIZE, num_workers=workers)), tmp_path, 6
    )


class Spawning(Dataset[torch.Tensor]):
    """Gives each sample a child of its generator, which draws nothing itself."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        (child,) = self.rng.spawn(1)
        return torch.tensor([float(child.normal())])


@pytest.mark.parametrize("workers", [0, 2])
def test_children_of_a_generator_are_not_spawned_again(workers: int, tmp_path: Path) -> None:
    """Their number is not in its state, but among its seeds."""
    check(
        one_loader(lambda: DataLoader(Spawning(), batch_size=SIZE, num_workers=workers)),
        tmp_path,
        6,
    )


def test_a_search_that_is_given_up_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """A generator behind ten thousand values is not found."""
    caplog.set_level("INFO")
    data = Nested()
    vars(data)["samples"] = [{str(key): [object()] for key in range(20)} for _ in range(900)]
    for _ in range(2):
        holders_in(GeneratorOwner("dataset", data))
    assert caplog.text.count("are looked for among 10000 values") == 1


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_generator_in_slots(workers: int, late: bool, tmp_path: Path) -> None:
    """Those of an object without a ``__dict__`` are found, and made again."""

    def make() -> Any:
        noise = NoiseInSlots(None if late else np.random.default_rng(1))
        return DataLoader(Nested(noise), batch_size=SIZE, num_workers=workers)

    check(one_loader(make), tmp_path, 6)


def test_a_generator_of_a_streams_collate_function(tmp_path: Path) -> None:
    """A stream's batches are passed over with the state that its collate function had."""

    def make() -> Any:
        collate = Collate(np.random.default_rng(3))
        return DataLoader(Shuffled(0), batch_size=SIZE, collate_fn=collate)

    check(one_loader(make), tmp_path, 6)


class Around:
    """Collates by a function that it keeps under the name that a wrapper of ours once used."""

    def __init__(self) -> None:
        self.inner = torch.stack
        self.noise = Noise(np.random.default_rng(4))

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return self.noise(self.inner(samples))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collate_object_with_an_inner_function(workers: int, tmp_path: Path) -> None:
    """The object itself is searched for generators, whatever its attributes are called."""
    check(
        one_loader(
            lambda: DataLoader(numbers(), batch_size=SIZE, collate_fn=Around(), num_workers=workers)
        ),
        tmp_path,
        *(6, 3),
    )


_of_module = np.random.default_rng(5)
_pipeline = [Noise(_of_module)]
_late: Any = None


def as_in_a_new_process() -> None:
    """Give the generators of this module the states that its import gives them."""
    global _late
    _of_module.bit_generator.state = np.random.default_rng(5).bit_generator.state
    ByClass.rng.seed(6)
    _late = None


def noisy(value: torch.Tensor) -> torch.Tensor:
    return value + float(_of_module.normal())


def late(value: torch.Tensor) -> torch.Tensor:
    global _late
    if _late is None:
        _late = random.Random(7)
    return value + _late.random()


class Mapped(Dataset[torch.Tensor]):
    """Gives its samples by a function."""

    def __init__(self, transform: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.transform(torch.tensor([float(index)]))


class ByModule(Mapped):
    def __init__(self) -> None:
        super().__init__(torch.abs)

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + float(_of_module.normal())


class ByComprehension(ByModule):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([sum([index + float(_of_module.normal()) for _ in range(2)])])


class ByClass(Mapped):
    rng = random.Random(6)

    def __init__(self) -> None:
        super().__init__(torch.abs)

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + self.rng.random()


class ByProperty(ByModule):
    @property
    def noise(self) -> float:
        return float(_of_module.normal())

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index + self.noise])


class FromModule(Sampler[int]):
    """Draws its order from a generator of this module."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(_of_module.permutation(SAMPLES).tolist())


def closing_over() -> Callable[[list[torch.Tensor]], torch.Tensor]:
    rng = np.random.default_rng(1)

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) + float(rng.normal())

    return collate


def decorated() -> Callable[[list[torch.Tensor]], torch.Tensor]:
    collate = closing_over()

    @functools.wraps(collate)
    def wrapper(*args: Any) -> torch.Tensor:
        return collate(*args)

    return wrapper


def by_default() -> Callable[[list[torch.Tensor]], torch.Tensor]:
    def collate(samples: Any, rng: Any = np.random.default_rng(2)) -> torch.Tensor:  # noqa: B008
        return torch.stack(samples) + float(rng.normal())

    return collate


def by_keyword() -> Callable[[list[torch.Tensor]], torch.Tensor]:
    def collate(samples: Any, *, rng: Any = torch.Generator()) -> torch.Tensor:  # noqa: B008
        return torch.stack(samples) + torch.rand((), generator=rng)

    return collate


def by_attribute() -> Callable[[list[torch.Tensor]], torch.Tensor]:
    def collate(samples: Any) -> torch.Tensor:
        return torch.stack(samples) + vars(collate)["rng"].random()

    vars(collate)["rng"] = random.Random(3)
    return collate


def drawing() -> Callable[[torch.Tensor], torch.Tensor]:
    rng = np.random.default_rng(4)
    return lambda value: value + float(rng.normal())


def bound() -> Callable[[torch.Tensor], torch.Tensor]:
    draw = np.random.default_rng(4).normal
    return lambda value: value + float(draw())


def lazily() -> Callable[[torch.Tensor], torch.Tensor]:
    rng: Any = None

    def transform(value: torch.Tensor) -> torch.Tensor:
        nonlocal rng
        rng = rng or random.Random(8)
        return value + rng.random()

    return transform


FUNCTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "closure": lambda: {"collate_fn": closing_over()},
    "decorated": lambda: {"collate_fn": decorated()},
    "default": lambda: {"collate_fn": by_default()},
    "keyword": lambda: {"collate_fn": by_keyword()},
    "attribute": lambda: {"collate_fn": by_attribute()},
    "global": lambda: {"collate_fn": lambda samples: noisy(torch.stack(samples))},
    "pipeline": lambda: {"collate_fn": lambda samples: _pipeline[0](torch.stack(samples))},
    "transform": lambda: {"dataset": Mapped(drawing())},
    "bound": lambda: {"dataset": Mapped(bound())},
    "late-closure": lambda: {"dataset": Mapped(lazily())},
    "late-global": lambda: {"dataset": Mapped(late)},
    "method": lambda: {"dataset": ByModule()},
    "comprehension": lambda: {"dataset": ByComprehension()},
    "class": lambda: {"dataset": ByClass()},
    "property": lambda: {"dataset": ByProperty()},
    "sampler": lambda: {"sampler": FromModule()},
}


def of_function(kind: str, **options: Any) -> DataLoader[Any]:
    as_in_a_new_process()
    made = {"dataset": numbers(), "batch_size": SIZE, **FUNCTIONS[kind](), **options}
    return DataLoader(**made)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_a_generator_of_a_function(kind: str, tmp_path: Path) -> None:
    """Generators that functions close over, have as defaults or find in their module go on."""
    check(one_loader(lambda: of_function(kind)), tmp_path, 6, 3)


@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["closure", "late-global", "method"])
def test_a_generator_of_a_function_in_workers(kind: str, persistent: bool, tmp_path: Path) -> None:
    """The copies of such generators in worker processes go on, too."""
    options = {"num_workers": 2, "persistent_workers": persistent}
    check(one_loader(lambda: of_function(kind, **options)), tmp_path, 6, 3)


@pytest.mark.parametrize("stops", [(5, 1), (6, 3)])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_generator_that_the_training_draws_from(
    workers: int, stops: tuple[int, ...], tmp_path: Path
) -> None:
    """Workers begin with the state that their generator had when they were started first."""

    def objective(trial: Trial) -> None:
        loader = of_function("method", num_workers=workers)
        for epoch in trial.epochs():
            for batch in trial.train(epoch, loader):
                trial.seen[epoch, batch, "mixed"] = float(_of_module.beta(1, 1))

    check(objective, tmp_path, *stops)


def test_a_generator_that_only_the_training_draws_from(tmp_path: Path) -> None:
    """A generator of a module that no data set draws from goes on."""

    def objective(trial: Trial) -> None:
        as_in_a_new_process()
        loader = DataLoader(numbers(), batch_size=SIZE)
        for epoch in trial.epochs():
            for batch in trial.train(epoch, loader):
                trial.seen[epoch, batch, "mixed"] = float(_of_module.beta(1, 1))

    check(objective, tmp_path, 5, 1)


class Noisy(torch.nn.Module):
    """Draws from a generator of this module, and from one of its class."""

    rng = random.Random(10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return noisy(x) + self.rng.random()


def test_generators_of_the_code_of_a_loop(tmp_path: Path) -> None:
    """Those that its functions close over, and that methods of its objects draw from, go on.

    Code before an epoch's batches runs again, and draws what it drew; what is made anew in the
    loop has no state.
    """

    def objective(trial: Trial) -> None:
        as_in_a_new_process()
        Noisy.rng.seed(10)
        layers, mixed = torch.nn.Sequential(Noisy()), closing_over()

        def step(trial: Trial, epoch: int, loader: Any) -> None:
            for batch in trial.train(epoch, loader):
                anew = drawing()
                value = anew(layers(mixed([torch.zeros(())])))
                trial.seen[epoch, batch, "mixed"] = value.tolist()

        for epoch in trial.epochs():
            order = _of_module.permutation(SAMPLES)
            step(trial, epoch, DataLoader(numbers()[order], batch_size=SIZE))

    check(objective, tmp_path, 2, 5, 1)


def test_a_generator_of_a_streams_function(tmp_path: Path) -> None:
    """A stream whose method draws from its module's generator is passed over with its states."""
    check(
        one_loader(lambda: of_function("closure", dataset=Spread(), collate_fn=None)),
        tmp_path,
        *(6, 3),
    )


@pytest.mark.parametrize("kind", ["closure", "method"])
def test_a_generator_of_a_function_behind_accelerate(kind: str, tmp_path: Path) -> None:
    """A batch that was fetched ahead is fetched again with the states of its first fetch."""

    def make() -> Any:
        return Accelerator(cpu=True).prepare(of_function(kind))

    check(one_loader(make), tmp_path, 6, 1, 2)


@pytest.mark.parametrize("kind", ["object", "closure"])
def test_another_transform_in_each_epoch(kind: str, tmp_path: Path) -> None:
    """A batch that was fetched ahead has noise of this epoch's generator, not of an earlier one."""

    def objective(trial: Trial) -> None:
        data = Mapped(torch.abs)
        loader = Accelerator(cpu=True).prepare(DataLoader(data, batch_size=SIZE))
        for epoch in trial.epochs():
            own = np.random.default_rng(epoch)
            data.transform = Noise(own) if kind == "object" else lambda x, own=own: x + own.normal()
            trial.go_through(epoch, loader)

    check(objective, tmp_path, 10)
    check(objective, tmp_path, 6, 5)


def test_a_generator_is_restored_in_place() -> None:
    """Whoever else holds a generator draws on from the restored state, too."""
    as_in_a_new_process()
    data = ByModule()
    _of_module.random(3)
    states = states_of(own_generators(data))
    expected = _of_module.random(3).tolist()
    held = _of_module
    as_in_a_new_process()
    set_states(own_generators(data), states)
    assert held is _of_module
    assert held.random(3).tolist() == expected


def test_a_global_name_of_something_else_stays() -> None:
    """A stored state makes no generator in place of what a function has now."""
    scope: dict[str, Any] = {"rng": random.Random(1)}
    exec("def draw(value): return value + rng.random()", scope)
    states = states_of(own_generators(scope["draw"]))
    scope["rng"] = "none"
    set_states(own_generators(scope["draw"]), states)
    assert len(states) == 1
    assert scope["rng"] == "none"


def test_a_studys_generators_are_not_those_of_data() -> None:
    """A function that reads its trial leaves the sampler of the study alone."""
    trial = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=1)).ask()
    own = random.Random(1)

    def collate(samples: Any) -> Any:
        return samples, trial.number, own.random()

    assert [name for _, name, _, _ in states_of(own_generators(collate))] == ["own"]


def test_classes_of_libraries_are_not_searched() -> None:
    """A class of an installed package is no data of the user, and may have many methods."""
    held = [each.owner for each in own_generators([optuna.Trial, DataLoader, Mapped])]
    assert Mapped.__getitem__ in held
    assert [each for each in held if isinstance(each, type)] == [Mapped]


class Boxed:
    """Collates, and holds what takes long to be searched: samples, and boxes in them."""

    def __init__(self) -> None:
        self.samples = [(torch.zeros(1), index) for index in range(500)]
        self.boxes = [{"boxes": [[index]]} for index in range(300)]
        self.rng = random.Random(9)

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) + self.rng.random()


def _count_items(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count how many objects are looked into."""
    counted, items = [0], _generators.items_of

    def counting(owner: Any) -> dict[Any, Any]:
        counted[0] += 1
        return items(owner)

    monkeypatch.setattr(_generators, "items_of", counting)
    return counted


def test_a_worker_does_not_search_for_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker process searches its data set for generators after few of its batches only."""
    loader = DataLoader(numbers(), batch_size=SIZE, collate_fn=Boxed(), num_workers=1)
    with torch.device("meta"):  # a script's default: numbers of processes are on the CPU
        workers = Workers(loader)
    counts = []
    with workers.recording(loader):
        collate: Any = loader.collate_fn
        collate.begin(0)
        counted = _count_items(monkeypatch)
        for _ in range(100):
            collate(list(numbers()))
            counts.append(counted[0])
    assert max(np.diff(counts)[70:]) < 50
    assert counts[-1] < 20_000


class Noting(Mapped):
    """Makes an object of what it has read last."""

    def __getitem__(self, index: int) -> torch.Tensor:
        self.last = Noise(index)
        return super().__getitem__(index)


def test_a_wrapped_loader_does_not_search_for_each_batch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nor does the training process, which reads the states before each fetch of Accelerate."""
    counted = _count_items(monkeypatch)

    def make() -> Any:
        data = Noting(torch.abs)
        data.boxed = Boxed()  # type: ignore[attr-defined]
        return Accelerator(cpu=True).prepare(DataLoader(data, batch_size=1))

    seen(one_loader(make), tmp_path)
    assert counted[0] < 100_000


def test_a_state_without_a_generator_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """A stored state for which there is no generator is no secret."""
    states = states_of(own_generators(Noise(random.Random(1))))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            set_states(own_generators(Noise("none")), states)
    assert [each.getMessage() for each in caplog.records] == [
        "A random generator was stored of dataset.generator, but none is there now: it begins "
        "anew. Make the same data sets and functions whenever the objective runs."
    ]


def test_looking_for_generators_runs_no_code_of_the_user() -> None:
    """Properties are not read, and the process's own generators are left to others."""

    class Careful:
        def __init__(self) -> None:
            self.shared = [np.random.mtrand._rand, torch.default_generator, random.shuffle]

        @property
        def costly(self) -> Any:
            raise AssertionError("it was read")

    assert states_of(own_generators(Careful())) == []


# -- iterable data sets ---------------------------------------------------------------------------


class Shuffled(IterableDataset[torch.Tensor]):
    """Gives its samples in the order of a generator of its own."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = list(range(SAMPLES))
        self.rng.shuffle(order)
        return iter(numbers()[order])


class Spread(IterableDataset[torch.Tensor]):
    """Adds numbers of this module's generator to its samples."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (noisy(each) for each in numbers())


class Shards(IterableDataset[torch.Tensor]):
    """Draws random numbers once for two batches."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for shard in numbers().chunk(2):
            yield from shard[torch.randperm(len(shard))]


class Counted(Shuffled):
    """Counts its passes, as a data set does that shuffles by seed and epoch."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.passes = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.passes += 1
        return (each + 100 * self.passes for each in super().__iter__())


class Buffered(IterableDataset[torch.Tensor]):
    """Shuffles what another data set gives within a buffer."""

    def __init__(self, source: Any) -> None:
        self.pipeline = [{"source": source}]
        self.rng = random.Random(9)

    def __iter__(self) -> Iterator[torch.Tensor]:
        buffer: list[torch.Tensor] = []
        for each in self.pipeline[0]["source"]:
            buffer.append(each)
            if len(buffer) == 3:
                yield buffer.pop(self.rng.randrange(3))
        yield from buffer


class Reading(IterableDataset[torch.Tensor]):
    """Reads a data set whose samples are augmented by a generator of its own."""

    def __init__(self) -> None:
        self.base = Nested()

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self.base[index] for index in range(SAMPLES))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["buffered", "chained", "reading"])
def test_data_sets_inside_of_a_stream(kind: str, workers: int, tmp_path: Path) -> None:
    """Their generators and counters come back, also in later epochs."""

    def make() -> Any:
        data: Any = Reading() if kind == "reading" else Buffered(Counted(0))
        if kind == "chained":
            data = ChainDataset([Counted(1), Counted(2)])
        return DataLoader(data, batch_size=SIZE, num_workers=workers)

    check(one_loader(make), tmp_path, 3, 10)


def test_a_chain_of_data_sets_without_a_length(tmp_path: Path) -> None:
    """One that only validates comes back, too, though ``ChainDataset`` has a ``__len__``."""

    def objective(trial: Trial) -> None:
        training = DataLoader(numbers(), batch_size=SIZE)
        validating = DataLoader(ChainDataset([Shuffled(1), Shuffled(2)]), batch_size=SIZE)
        for epoch in trial.epochs():
            trial.go_through(epoch, training)
            trial.seen[epoch, "validated"] = [batch.flatten().tolist() for batch in validating]

    check(objective, tmp_path, 3, 5)


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_draws_before_a_fetch_that_draws_nothing(stop: int, tmp_path: Path) -> None:
    """Numbers that the training draws count for a later fetch, if the next one draws none."""

    def objective(trial: Trial) -> None:
        loader = DataLoader(Shards(), batch_size=SIZE)
        for epoch in trial.epochs():
            for batch in trial.train(epoch, loader):
                if batch == 0:
                    torch.rand(3)

    check(objective, tmp_path, stop)


@pytest.mark.parametrize("stop", [8, 10])
@pytest.mark.parametrize("kept", [False, True])
def test_a_data_set_for_each_epoch(stop: int, kept: bool, tmp_path: Path) -> None:
    """A data set that is made in an epoch gets no state of another epoch's."""

    def objective(trial: Trial) -> None:
        loaders = []
        for epoch in trial.epochs():
            loader = DataLoader(Shuffled(epoch), batch_size=SIZE)
            if kept:
                loaders.append(loader)
            trial.go_through(epoch, loader)

    check(objective, tmp_path, stop, 5)


@pytest.mark.parametrize("stop", [8, 10, 14])
def test_data_sets_in_turns(stop: int, tmp_path: Path) -> None:
    """Data sets made before the epochs get their own states, in whatever order they come."""

    def objective(trial: Trial) -> None:
        loaders = [DataLoader(Shuffled(seed), batch_size=SIZE) for seed in range(2)]
        for epoch in trial.epochs():
            trial.go_through(epoch, loaders[epoch % 2])

    check(objective, tmp_path, stop, 3)


def test_a_data_set_of_an_epoch_that_is_over_goes(tmp_path: Path) -> None:
    """A data set that the objective has dropped is neither held nor stored."""
    references: list[weakref.ref[Any]] = []
    stored: list[int] = []

    def objective(trial: Trial) -> None:
        for epoch in trial.epochs():
            loader = DataLoader(Shuffled(epoch), batch_size=SIZE)
            references.append(weakref.ref(loader.dataset))
            trial.go_through(epoch, loader)
            del loader
            gc.collect()
            stored.append(len(trial.run._position.streams.state_dict()))

    seen(objective, tmp_path)
    assert [each() for each in references] == [None] * EPOCHS
    assert max(stored) == 1


# -- attributes of samplers -----------------------------------------------------------------------


class Steered(Sampler[int]):
    """Gives another order once the training has set an attribute."""

    def __init__(self) -> None:
        self.hard = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter([(index * (1 + 2 * self.hard)) % SAMPLES for index in range(SAMPLES)])


@pytest.mark.parametrize(("at", "stops"), [(0, (10,)), (2, (10, 6)), (2, (10, 1, 6))])
@pytest.mark.parametrize("anew", [False, True])
def test_an_attribute_set_in_one_epoch(
    at: int, stops: tuple[int, ...], anew: bool, tmp_path: Path
) -> None:
    """An attribute that an epoch's code sets in a sampler stays, however often a trial resumes."""

    def objective(trial: Trial) -> None:
        sampler = Steered()
        loader = DataLoader(numbers(), batch_size=SIZE, sampler=sampler)
        for epoch in trial.epochs():
            if epoch == at:
                sampler.hard = 1
            if anew:
                loader = DataLoader(numbers(), batch_size=SIZE, sampler=sampler)
            trial.go_through(epoch, loader)

    check(objective, tmp_path, *stops)


class Dealing(Sampler[int]):
    """Deals from two piles, which are shuffled again when they are used up."""

    def __init__(self) -> None:
        self.piles: defaultdict[str, deque[int]] = defaultdict(deque)
        self.dealt: Counter[str] = Counter()

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter([self._deal("long" if number % 3 else "short") for number in range(SAMPLES)])

    def _deal(self, name: str) -> int:
        if not self.piles[name]:
            self.piles[name].extend(random.sample(range(SAMPLES), 12))
        self.dealt[name] += 1
        return (self.piles[name].popleft() + self.dealt.most_common()[0][1]) % SAMPLES


class Reshuffled(Sampler[Any]):
    """Shuffles a list of numbers of some kind again and again."""

    def __init__(self, order: list[Any]) -> None:
        self.order = order

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[Any]:
        random.shuffle(self.order)
        return iter(self.order)


ORDERS: dict[str, Callable[[], Sampler[Any]]] = {
    "piles": Dealing,
    "of-numpy": lambda: Reshuffled(list(np.arange(SAMPLES))),
    "of-torch": lambda: Reshuffled(list(torch.arange(SAMPLES))),
}


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_an_order_that_lasts_over_epochs(order: str, wrapped: bool, tmp_path: Path) -> None:
    """Containers and numbers of any kind in a sampler are those of the epoch that is resumed."""

    def make() -> Any:
        loader = DataLoader(numbers(), batch_size=SIZE, sampler=ORDERS[order]())
        return Accelerator(cpu=True).prepare(loader) if wrapped else loader

    check(one_loader(make), tmp_path, 6, 3, 4)


class Parted(Sampler[int]):
    """Shuffles one part in place, and replaces the other one."""

    def __init__(self, shuffled: Any, replaced: Any) -> None:
        self.parts = [shuffled, replaced]

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        np.random.shuffle(self.parts[0])
        self.parts[1] = np.random.permutation(self.parts[1])
        return iter(np.concatenate(self.parts).tolist())


def test_arrays_that_the_objective_holds_too(tmp_path: Path) -> None:
    """Those that the sampler has are filled; those that it has replaced are left alone."""

    def objective(trial: Trial) -> None:
        held = np.arange(SAMPLES).reshape(2, -1).copy()
        shuffled, replaced = held[0].copy(), held[1].copy()
        loader = DataLoader(numbers(), batch_size=SIZE, sampler=Parted(shuffled, replaced))
        for epoch in trial.epochs():
            trial.go_through(epoch, loader)
            trial.seen[epoch, "held"] = shuffled.tolist(), replaced.tolist()

    check(objective, tmp_path, 6, 3)


def test_what_no_checkpoint_holds_of_a_sampler_is_left_as_it_is(tmp_path: Path) -> None:
    """A list of other objects, or one that holds itself, ends no training."""

    def objective(trial: Trial) -> None:
        sampler: Any = Steered()
        sampler.others, sampler.itself = [Steered(), Noise(1)], []
        sampler.itself.append(sampler.itself)
        loader = DataLoader(numbers(), batch_size=SIZE, sampler=sampler)
        for epoch in trial.epochs():
            sampler.hard = epoch
            trial.go_through(epoch, loader)

    check(objective, tmp_path, 6)


# -- attributes of objects that collate -----------------------------------------------------------


class Warming:
    """Collates by the number of its calls and the sums of the last batches."""

    def __init__(self) -> None:
        self.step = 0
        self.sums: list[float] = []

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        self.step += 1
        self.sums = [*self.sums[-2:], float(torch.stack(samples).sum())]
        return torch.stack(samples) * self.step + sum(self.sums)


def test_an_object_that_collates_goes_on(tmp_path: Path) -> None:
    """What it counts and keeps comes back, within an epoch and in later ones."""

    def make() -> Any:
        return DataLoader(numbers(), batch_size=SIZE, shuffle=True, collate_fn=Warming())

    check(one_loader(make), tmp_path, 6, 1, 4)


def test_an_object_that_collates_behind_accelerate(tmp_path: Path) -> None:
    """It does not count twice a batch that was fetched ahead, and is fetched again."""

    def make() -> Any:
        loader = DataLoader(numbers(), batch_size=SIZE, shuffle=True, collate_fn=Warming())
        return Accelerator(cpu=True).prepare(loader)

    check(one_loader(make), tmp_path, 6, 1, 4)


def test_an_object_that_collates_for_two_loaders(tmp_path: Path) -> None:
    """It goes on where the one that only validates has left it."""

    def objective(trial: Trial) -> None:
        collate = Warming()
        training = DataLoader(numbers(), batch_size=SIZE, collate_fn=collate)
        validating = DataLoader(numbers(), batch_size=2 * SIZE, collate_fn=collate)
        for epoch in trial.epochs():
            trial.go_through(epoch, training)
            trial.seen[epoch, "validated"] = [batch.flatten().tolist() for batch in validating]

    check(objective, tmp_path, 6, 5)


# -- attributes of data sets ----------------------------------------------------------------------


class Harder(Dataset[torch.Tensor]):
    """Has a level, which the training raises, and remembers what it has read last."""

    def __init__(self) -> None:
        self.level = 0
        self.last = -1
        self.shard: Any = None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._of(index) + 100 * self.level

    def _of(self, index: int) -> torch.Tensor:
        if self.last != index // 4:
            self.last, self.shard = index // 4, torch.arange(4.0) + index // 4 * 4
        return self.shard[index % 4].reshape(1)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_what_the_training_sets_in_a_data_set(workers: int, wrapped: bool, tmp_path: Path) -> None:
    """A curriculum goes on, with what each batch is of; what reading sets begins anew."""

    def objective(trial: Trial) -> None:
        data = Harder()
        given: Any = ConcatDataset([Subset(data, range(SAMPLES))]) if wrapped else data
        loader = DataLoader(given, batch_size=SIZE, num_workers=workers)
        for epoch in trial.epochs():
            for batch in trial.train(epoch, loader):
                if batch == 1:
                    data.level += 1

    check(objective, tmp_path, 6, 4, 3)


class Stronger:
    """A transform with a strength, which the training raises, and a count of what it is given."""

    def __init__(self) -> None:
        self.strength = 0
        self.given = 0

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        self.given += 1
        return value + 100 * self.strength


class StrongerModule(torch.nn.Module):
    """The same, as a module without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.strength = 0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + 100 * self.strength


class Transformed(Dataset[torch.Tensor]):
    """Numbers that some transforms change."""

    def __init__(self, *transforms: Any) -> None:
        self.transforms = transforms

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = torch.full((1,), float(index))
        return functools.reduce(lambda value, each: each(value), self.transforms, sample)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Stronger, StrongerModule])
def test_what_the_training_sets_in_a_transform(
    kind: Any, workers: int, wrapped: bool, tmp_path: Path
) -> None:
    """An augmentation grows stronger, of a data set's own or within a library's object."""

    def objective(trial: Trial) -> None:
        transform = kind()
        is_module = kind is StrongerModule
        inner = torch.nn.Sequential(StrongerModule(), transform) if is_module else transform
        data = Transformed(Stronger(), inner)
        given: Any = Subset(data, range(SAMPLES)) if wrapped else data
        loader = DataLoader(given, batch_size=SIZE, num_workers=workers)
        for epoch in trial.epochs():
            for batch in trial.train(epoch, loader):
                if batch == 1:
                    transform.strength += 1

    check(objective, tmp_path, 6, 4, 3)


class Items(dict[str, Any]):
    """Has its items as attributes, and raises ``KeyError`` for others."""

    __getattr__ = dict.__getitem__


class Configured(Harder):
    """Has settings for all its objects."""

    settings = Items(factor=100)


def test_attributes_of_the_class_of_a_data_set_are_not_asked_for_more(tmp_path: Path) -> None:
    """What asks only methods for their code meets no errors of others."""
    check(one_loader(lambda: DataLoader(Configured(), batch_size=SIZE)), tmp_path, 3)


class Optional(Stronger):
    """Has its options as attributes, and None or ``KeyError`` for others."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = {"strict": False, **options}

    def __getattr__(self, name: str) -> Any:
        return self.options[name] if self.options["strict"] else self.options.get(name)


@pytest.mark.parametrize("strict", [False, True])
def test_transforms_with_attributes_for_all_names(strict: bool, tmp_path: Path) -> None:
    """One is the same in each loader that reads with it."""

    def objective(trial: Trial) -> None:
        transform = Optional(strict=strict)
        for epoch in trial.epochs():
            trial.go_through(epoch, DataLoader(Transformed(transform), batch_size=SIZE))
            transform.strength += 1

    check(objective, tmp_path, 6, 4)


class Decorated:
    """Stands in for a method, as the objects of decorators do."""

    def __init__(self, method: Callable[..., Any]) -> None:
        functools.update_wrapper(self, method)

    def __get__(self, owner: Any, kind: type) -> Any:
        return functools.partial(self.__wrapped__, owner)  # type: ignore[attr-defined]


class Remembering(Dataset[torch.Tensor]):
    """Remembers what it has read last, behind a decorator."""

    def __init__(self) -> None:
        self.last = -1
        self.shard: Any = None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self._of(index)

    _of = Decorated(Harder._of)


def test_what_reading_behind_a_decorator_sets_begins_anew(tmp_path: Path) -> None:
    """Else the number of a part would come back without the part."""
    check(one_loader(lambda: DataLoader(Remembering(), batch_size=3)), tmp_path, 1)


@dataclasses.dataclass
class ByValue:
    """A transform that compares by its value, and has no hash."""

    strength: float = 1.0

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.strength


@dataclasses.dataclass(unsafe_hash=True)
class HashedByValue(ByValue):
    """The same, with the hash of its value."""


@pytest.mark.parametrize("kind", [ByValue, HashedByValue])
def test_transforms_that_compare_by_value(kind: Any, tmp_path: Path) -> None:
    """Each has its own strength, also where one loader after the other reads with it."""

    def objective(trial: Trial) -> None:
        first, second = kind(), kind()
        validating = DataLoader(Transformed(second), batch_size=SIZE)
        for epoch in trial.epochs():
            trial.go_through(epoch, DataLoader(Transformed(first), batch_size=SIZE))
            trial.seen[epoch, "validated"] = [batch.flatten().tolist() for batch in validating]
            first.strength *= 2
            second.strength *= 3

    check(objective, tmp_path, 6, 4)


class LoaderByValue(DataLoader[Any]):
    """Compares by its data set, and has no hash."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoaderByValue) and self.dataset is other.dataset


def test_loaders_that_compare_by_value(tmp_path: Path) -> None:
    """Each comes back to its own place."""

    def objective(trial: Trial) -> None:
        data = numbers()
        loaders = [LoaderByValue(data, SIZE, shuffle=shuffle) for shuffle in (True, False)]
        for epoch in trial.epochs():
            trial.go_through(epoch, loaders[epoch % 2])

    check(objective, tmp_path, 6, 3)


def test_another_transform_does_not_get_the_values_of_the_first(tmp_path: Path) -> None:
    """Each process makes its transforms, and the next one may have fewer of them."""
    several = Transformed(Stronger(), StrongerModule())
    state = LoaderAttributes(DataLoader(several), None)
    several.transforms[0].strength = 2
    other = Transformed(StrongerModule())
    LoaderAttributes(DataLoader(other), None).load_state(state.state())
    assert other.transforms[0].strength == 0
    again = Transformed(Stronger(), StrongerModule())
    LoaderAttributes(DataLoader(again), None).load_state(state.state())
    assert [each.strength for each in again.transforms] == [2, 0]


class Scaled(Harder):
    """Sets what it reads by only where its level changes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = None

    def set_level(self, level: int) -> None:
        if level != self.level:
            self.level, self.scale = level, torch.tensor(float(level))

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._of(index) + 100 * (0 if self.scale is None else self.scale)


def test_a_setter_of_a_data_set_does_not_find_its_work_half_done(tmp_path: Path) -> None:
    """A level without what belongs to it does not come back: it is set again in each epoch."""

    def objective(trial: Trial) -> None:
        data = Scaled()
        loader = DataLoader(data, batch_size=SIZE)
        for epoch in trial.epochs():
            data.set_level(epoch)
            trial.go_through(epoch, loader)

    check(objective, tmp_path, 6, 4)


def test_what_the_training_sets_in_data_of_another_loader(tmp_path: Path) -> None:
    """One that only validates."""

    def objective(trial: Trial) -> None:
        training, data = DataLoader(numbers(), batch_size=SIZE), Harder()
        validating = DataLoader(data, batch_size=SIZE)
        for epoch in trial.epochs():
            trial.go_through(epoch, training)
            data.level += 1
            trial.seen[epoch, "validated"] = [batch.flatten().tolist() for batch in validating]

    check(objective, tmp_path, 6, 5)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("stops", [(2, 2), (6,), (6, 1, 4)])
def test_persistent_workers_have_their_own_data_set(
    stops: tuple[int, ...], before: bool, tmp_path: Path
) -> None:
    """Values that the training sets after their start never reach them, also after a return."""

    def objective(trial: Trial) -> None:
        data = Harder()
        loader = DataLoader(data, batch_size=SIZE, num_workers=1, persistent_workers=True)
        for epoch in trial.epochs():
            if before:
                data.level = 1 + epoch
            trial.go_through(epoch, loader)
            trial.seen[epoch, "level"] = data.level
            if not before:
                data.level += 1

    check(objective, tmp_path, *stops)


# -- loaders beside the one that is trained on ----------------------------------------------------


def test_a_loader_in_training_can_be_copied(tmp_path: Path) -> None:
    """As with a module that holds it, whose best weights are kept."""

    def objective(trial: Trial) -> None:
        loader = DataLoader(numbers(), batch_size=SIZE, shuffle=True)
        for epoch in trial.epochs():
            for batch in trial.train(epoch, loader):
                if batch == 1:
                    other = copy.deepcopy(loader)
                    trial.seen[epoch, "copy"] = len(other), sum(1 for _ in other)

    check(objective, tmp_path, 6)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_look_into_the_loader_within_its_pass(workers: int, tmp_path: Path) -> None:
    """A second pass over the loader is not taken for the trained one."""

    def objective(trial: Trial) -> None:
        loader = DataLoader(numbers(), batch_size=SIZE, shuffle=True, num_workers=workers)
        for epoch in trial.epochs():
            for batch in trial.train(epoch, loader):
                if batch == 1:
                    next(iter(loader))

    check(objective, tmp_path, 6, 1)


def test_a_look_into_a_stream_within_its_pass(tmp_path: Path) -> None:
    """A trial that does so is stored between its epochs only: the data set may notice."""

    def objective(trial: Trial) -> None:
        loader = DataLoader(Shuffled(0), batch_size=SIZE)
        for epoch in trial.epochs():
            for batch in trial.train(epoch, loader):
                if batch == 1:
                    next(iter(loader))

    check(objective, tmp_path, 5, 4)


def test_a_look_that_takes_the_workers_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Workers that persist serve one pass at a time: the trial waits in memory from then on."""
    session = FakeSession({3: "disk"}, checkpoint_dir=tmp_path / "trial")
    trial = Trial(optuna.create_study().ask(), session, {})
    loader = DataLoader(numbers(), batch_size=SIZE, num_workers=1, persistent_workers=True)
    for epoch in trial.epochs():
        for batch in trial.train(epoch, loader):
            if (epoch, batch) == (0, 1):
                next(iter(loader))
    assert session.parks == ["resident"]
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    reason = "Trial 0 can only wait in memory: its loader does not go by its sampler."
    assert [reason in each for each in said] == [False, True, True]  # on the screen, in its log
    assert said[0].startswith("A trial can only wait in memory from here on: within an epoch it ")


class Doubling(DataLoader[Any]):
    """Asks for its own iterator with the first batch."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield 2 * batch


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_a_loader_that_begins_with_the_first_batch(
    workers: int, persistent: bool, tmp_path: Path
) -> None:
    """A trial that is stored between two epochs does not train the first one's order again."""
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent}
    make = functools.partial(Doubling, numbers(), batch_size=SIZE, shuffle=True, **options)
    check(one_loader(make), tmp_path, 4, 6, 1)


class Turning(Sampler[int]):
    """Begins one sample later with each pass."""

    def __init__(self) -> None:
        self.passes = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter([(index + self.passes) % SAMPLES for index in range(SAMPLES)])


def test_two_alike_loaders_of_which_one_was_used(tmp_path: Path) -> None:
    """The state of the second of two alike loaders does not go to the first."""

    def objective(trial: Trial) -> None:
        training = DataLoader(numbers(), batch_size=SIZE)
        one, two = (DataLoader(numbers(), batch_size=SIZE, sampler=Turning()) for _ in range(2))
        for epoch in trial.epochs():
            trial.go_through(epoch, training)
            trial.seen[epoch, "two"] = [batch.flatten().tolist() for batch in two]
            if epoch == EPOCHS - 1:
                trial.seen[epoch, "one"] = [batch.flatten().tolist() for batch in one]

    check(objective, tmp_path, 6)


@pytest.mark.parametrize("stops", [(6,), pytest.param((10, 3), marks=pytest.mark.slow), (14, 1)])
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_training_loaders_in_turn(
    workers: int, persistent: bool, stops: tuple[int, ...], tmp_path: Path
) -> None:
    """The one that is not trained on has its generator, sampler and workers again, too."""

    def objective(trial: Trial) -> None:
        options: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent}
        data = functools.partial(Late, MAKERS["python"], declared=True)
        loaders = [
            DataLoader(data(), SIZE, shuffle=True, generator=MAKERS["torch"](seed), **options)
            for seed in range(2)
        ]
        for epoch in trial.epochs():
            trial.go_through(epoch, loaders[epoch % 2])
            trial.seen[epoch, "drawn"] = torch.rand(1).item()

    check(objective, tmp_path, *stops)


def with_generator(kind: str) -> Any:
    """A loader with a generator that nothing else holds."""
    options: dict[str, Any] = {"batch_size": SIZE, "generator": MAKERS["torch"](1)}
    if kind == "stream":
        return DataLoader(Shuffled(0), collate_fn=Collate(random.Random(1)), **options)
    if kind == "workers":
        options |= {"num_workers": 2, "persistent_workers": True}
    loader = DataLoader(numbers(), shuffle=True, **options)
    return Accelerator(cpu=True).prepare(loader) if kind == "wrapped" else loader


@pytest.mark.parametrize("kind", ["map", "stream", "wrapped", "workers"])
def test_epochs_without_batches_between(kind: str, tmp_path: Path) -> None:
    """A trial that is stored in one has the loader's own state in the next that has batches."""

    def objective(trial: Trial) -> None:
        loader = with_generator(kind)
        for epoch in trial.epochs():
            if epoch in (1, 3):
                trial.tick()
                trial.run.report(0.0)
            else:
                trial.go_through(epoch, loader)

    check(objective, tmp_path, 5, 5)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_loader_with_a_state_in_turn_with_others(tmp_path: Path) -> None:
    """Its state is not known while it is in no epoch: the trial waits in memory then."""
    session = FakeSession({6: "disk"}, checkpoint_dir=tmp_path / "trial")
    trial = Trial(optuna.create_study().ask(), session, {})
    loaders: list[Any] = [StatefulDataLoader(numbers(), SIZE), DataLoader(numbers(), SIZE)]
    for epoch in trial.epochs():
        trial.go_through(epoch, loaders[epoch % 2])
    assert session.parks == ["resident"]
