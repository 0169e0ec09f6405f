"""Fingerprints see what changes, and cost little where there is much."""

from __future__ import annotations

import io
import queue
import random
import subprocess
import sys
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from functools import cached_property, partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from optuna_hermes.suspend._modules._unsaved import reachable
from optuna_hermes.suspend._values._fingerprint import fingerprint, outside
from optuna_hermes.suspend._values._generators import GeneratorOwner, holders_in

Change = Callable[[Any], object]


def put(index: Any, value: Any) -> Change:
    return lambda items: items.__setitem__(index, value)


class Private:
    """Its only attribute has another name than in ``__slots__``."""

    __slots__ = ("__count",)

    def __init__(self) -> None:
        self.__count = 0

    def count(self) -> None:
        self.__count += 1


class Unit(np.ndarray[Any, Any]):
    """An array with an attribute, as users derive them."""

    unit = "m"


FIELDS = np.dtype([("name", "O"), ("size", "f8")])
CASES: dict[str, tuple[Callable[[], Any], Change]] = {
    "one of many numbers": (lambda: list(range(60_000)), put(31_234, 7)),
    "minus one and two": (lambda: [-1] * 100, put(50, -2)),
    "minus one alone": (lambda: [-1], put(0, -2)),
    "a number's type": (lambda: [1] * 20, put(3, 1.0)),
    "one of many objects": (lambda: [(i, str(i)) for i in range(60_000)], put(31_234, (0, "x"))),
    "one of many values": (lambda: {i: (i,) for i in range(60_000)}, put(31_234, (0,))),
    "a ring": (lambda: deque(((i,) for i in range(9000)), 9000), lambda ring: ring.append((0,))),
    "one number of an array": (lambda: np.zeros(3_000_000), put(1_234_567, 1.0)),
    "a page of a large array": (lambda: np.zeros(25_000_000), put(slice(12_345, 13_000), 1.0)),
    "two rows of an array": (
        lambda: np.arange(200_000.0).reshape(-1, 2000),
        put([3, 4], np.arange(6000.0, 10_000.0).reshape(2, 2000)[::-1]),
    ),
    "one number of a large tensor": (lambda: torch.zeros(50_000_000), put(31_234_567, 1.0)),
    "a mask": (lambda: np.ma.array([1.0, 2.0], mask=[0, 0]), lambda it: it.mask.put(1, True)),
    "an attribute of an array": (lambda: np.zeros(2).view(Unit), lambda it: setattr(it, "unit", 1)),
    "a number of such an array": (lambda: np.zeros(2).view(Unit), put(1, 1.0)),
    "a field of an array": (lambda: np.array([("a", 1.0)] * 900, FIELDS), put(7, ("b", 1.0))),
    "a number of a field": (lambda: np.array([("a", 1.0)] * 900, FIELDS), put(7, ("a", 2.0))),
    "the shape of an array of objects": (
        lambda: np.array([None, "a"]),
        lambda it: setattr(it, "shape", (2, 1)),
    ),
    "a row of a table": (
        lambda: pd.DataFrame({"loss": [1.0]}),
        lambda it: it.loc.__setitem__(1, 2.0),
    ),
    "a cell of a table": (
        lambda: pd.DataFrame({"of": ["a", "b"]}),
        lambda it: it.iloc.__setitem__((0, 0), "c"),
    ),
    "the index of a table": (
        lambda: pd.DataFrame({"loss": [1.0]}),
        lambda it: setattr(it, "index", [1]),
    ),
    "a value of a series": (lambda: pd.Series([1.0, 2.0]), put(0, 3.0)),
    "a private slot": (Private, lambda it: it.count()),
    "a decimal": (lambda: [Decimal("1.0")], put(0, Decimal("1.00"))),
    "a fraction": (lambda: [Fraction(1, 2)], put(0, Fraction(1, 3))),
    "a time": (lambda: [timedelta(1)], put(0, timedelta(2))),
    "an array of Python's": (lambda: array("d", [1.0]), lambda numbers: numbers.append(1.0)),
    "a queue": (queue.Queue, lambda waiting: waiting.put(1)),
    "a file in memory": (lambda: io.BytesIO(b"1"), lambda file: file.write(b"2")),
    "text in memory": (lambda: [io.StringIO()], lambda files: files[0].write("1")),
    "a function": (lambda: [functional.mse_loss], put(0, functional.l1_loss)),
    "a function of a line": (lambda: [lambda x: x], put(0, lambda x: -x)),
    "a function of C": (lambda: [torch.relu], put(0, torch.tanh)),
    "a method": (lambda: [deque().append], put(0, deque().appendleft)),
    "what a method is bound to": (lambda: [deque().append], lambda items: items[0](1)),
    "a class": (lambda: [nn.ReLU], put(0, nn.GELU)),
    "a function with arguments": (lambda: [partial(torch.relu)], put(0, partial(torch.tanh))),
    "an argument of a function": (
        lambda: [partial(functional.mse_loss, reduction="sum")],
        put(0, partial(functional.mse_loss, reduction="mean")),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_change_is_seen(case: str) -> None:
    """Nothing else but a change makes another fingerprint."""
    make, change = CASES[case]
    value = make()
    before = fingerprint(value)
    assert fingerprint(value) == before
    change(value)
    assert fingerprint(value) != before


def test_to_read_a_file_in_memory_is_no_change() -> None:
    """Nor is it one to close it once more; a closed one cannot be looked into."""
    files = [io.BytesIO(b"1"), io.StringIO("1"), io.BytesIO()]
    before = fingerprint(files)
    assert [each.read() for each in files] == [b"1", "1", b""]
    assert fingerprint(files) == before
    for each in files:
        each.close()
    assert fingerprint(files) == fingerprint(files)


def test_a_function_that_is_defined_again_is_the_same() -> None:
    """As loops do that have a ``def`` within."""

    def make() -> Callable[[], int]:
        return lambda: 1

    assert make() is not make()
    assert fingerprint(make()) == fingerprint(make())


def test_tensors_that_are_saved_elsewhere_may_change_in_a_list() -> None:
    """A list of a model's parameters is another one only if it has others."""
    one, other = torch.zeros(3), torch.zeros(3)
    known = {id(one), id(other)}
    before = fingerprint([one], known)
    one += 1
    assert fingerprint([one], known) == before
    assert fingerprint([other], known) != before
    assert fingerprint([one]) != fingerprint([torch.zeros(3)])


def test_it_counts_which_data_and_which_saved_object_there_is() -> None:
    """Their content does not: it is saved elsewhere, or with the data."""
    layer, data = nn.Linear(1, 1), TensorDataset(torch.zeros(3))
    held = [layer, DataLoader(data), data]
    known = {id(layer), id(other := nn.Linear(1, 1))}
    before = fingerprint(held, known)
    layer.train(False)
    data.tensors[0].add_(1)
    assert fingerprint(held, known) == before
    for place, each in enumerate([other, DataLoader(data), TensorDataset(torch.ones(3))]):
        others = [*held[:place], each, *held[place + 1 :]]
        assert fingerprint(others, known) != before


def test_no_data_set_is_taken_for_one_that_is_gone() -> None:
    """Its address is soon that of another one, and so is its ``id``."""
    made = (TensorDataset(torch.zeros(1)) for _ in range(20))
    assert len(set(map(fingerprint, made))) == 20
    kept = TensorDataset(torch.zeros(1))
    assert fingerprint(kept) == fingerprint(kept)


def test_methods_of_the_global_generators_do_not_change() -> None:
    """Their numbers come back with each training."""
    drawn = [random.random, np.random.rand, np.random.default_rng(0).normal]
    before = [fingerprint(each) for each in drawn]
    assert [each() for each in drawn]
    assert [fingerprint(each) == told for each, told in zip(drawn, before, strict=True)] == [
        *(True, True, False)
    ]


def test_what_changes_by_itself_makes_no_other_function() -> None:
    """A generator, weights or a list that a function has as an argument: each is restored apart."""
    drawn, weights, seen = torch.Generator(), torch.zeros(3), [1.0]
    noise = partial(torch.randn, 8, generator=drawn)
    given = [noise, partial(functional.mse_loss, weights), partial(max, seen)]
    before = [fingerprint(each) for each in given]
    noise()
    weights += 1
    seen.append(2.0)
    assert [fingerprint(each) for each in given] == before
    assert fingerprint(partial(functional.mse_loss, None)) != before[1]


class Config:
    """Of its properties two are kept at their first use."""

    @cached_property
    def size(self) -> int:
        return 3

    @cached_property
    def seen(self) -> list[int]:
        return []


def test_what_is_kept_at_its_first_use_is_no_change() -> None:
    """Any process makes it again; what may change in it counts."""
    config, normal = Config(), MultivariateNormal(torch.zeros(2), torch.eye(2))
    before = fingerprint(config), fingerprint(normal)
    assert config.size == 3
    assert normal.precision_matrix.shape == (2, 2)
    assert (fingerprint(config), fingerprint(normal)) == before
    config.seen.append(1)
    normal.loc[0] = 1.0
    assert fingerprint(config) != before[0]
    assert fingerprint(normal) != before[1]


@pytest.mark.parametrize(
    ("make", "other"),
    [
        (lambda: torch.autocast("cpu"), lambda: torch.autocast("cpu", enabled=False)),
        (torch.no_grad, torch.enable_grad),
        (torch.inference_mode, lambda: torch.inference_mode(False)),
    ],
    ids=["autocast", "no_grad", "inference_mode"],
)
def test_to_use_a_mode_of_torch_is_no_change(
    make: Callable[[], Any], other: Callable[[], Any]
) -> None:
    """It keeps what it sets back at its exit; another mode in its place is a change."""
    mode = make()
    before = fingerprint([mode])
    for outer in (torch.enable_grad(), torch.no_grad()):
        with outer, mode:
            pass
        assert fingerprint([mode]) == before
    assert fingerprint([other()]) != before


def test_a_compiled_module_is_the_module_that_is_saved() -> None:
    """What the compiler keeps beside it is no state."""
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    compiled: Any = torch.compile(layer, backend="eager")
    known = {id(layer), id(other)}
    before = fingerprint(compiled, known)
    compiled(torch.zeros(1, 2))
    compiled.eval()
    assert fingerprint(compiled, known) == before
    assert fingerprint(torch.compile(other, backend="eager"), known) != before


class Missing:
    """A proxy of an object that is not there, as of a request outside of one."""

    @property
    def __class__(self) -> Any:
        raise LookupError("nothing is there")

    __dict__ = __class__


class Closed(dict[str, int]):
    """A mapping that can no longer be read."""

    def keys(self) -> Any:
        raise OSError("closed")


class Memoized:
    """Computes a slot that is not set, as objects of SQLAlchemy do, and cannot."""

    __slots__ = ("ref",)

    def __getattr__(self, name: str) -> Any:
        raise TypeError("cannot be computed")


ODD: dict[str, Callable[[], Any]] = {
    "slot that is not set": Memoized,
    "proxy": lambda: weakref.proxy(deque()),
    "proxy of a library": Missing,
    "text of NumPy": lambda: np.array(["a", "b"], np.dtypes.StringDType()),
    "nested tensor": lambda: torch.nested.as_nested_tensor([torch.zeros(1), torch.zeros(2)]),
    "sparse tensor": lambda: torch.eye(2).to_sparse(),
    "without shape": lambda: nn.LazyLinear(2),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_odd_objects_are_no_changes(kind: str) -> None:
    """Nor errors: an objective may have any object."""
    value = ODD[kind]()
    assert fingerprint([value]) == fingerprint([value])
    assert list(reachable([value]))
    assert holders_in(GeneratorOwner("local variable", [value])) is not None


@pytest.mark.parametrize(
    "package",
    ["aim", "clearml", "comet_ml", "dvclive", "mlflow", "neptune", "sacred", "swanlab", "trackio"],
)
def test_a_tracker_is_no_state_of_the_training(package: str) -> None:
    """It counts what it is told, and the next process makes another one."""
    assert outside(type("Run", (), {"__module__": f"{package}.run"})())


@pytest.mark.parametrize("size", [3, 100_000])
def test_a_tensor_that_was_looked_at_can_be_resized(size: int) -> None:
    """Observers of quantisation resize their buffers: else each training with these would fail."""
    tensor = torch.zeros(size)
    fingerprint(tensor)
    assert tensor.resize_(2 * size).shape == (2 * size,)


def test_a_view_of_a_storage_that_was_freed_is_not_read() -> None:
    """It ended the process; so are parameters that FSDP has given back."""
    whole = torch.zeros(400)
    view = whole[200:]
    whole.untyped_storage().resize_(0)
    same = fingerprint(view) == fingerprint(view)  # pytest would read it, to show it
    assert same


def test_what_cannot_be_looked_at_is_unlike_all() -> None:
    """It may have changed."""
    value = Closed(a=1)
    assert fingerprint([value]) != fingerprint([value])


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.random.rand(25_000_000),
        lambda: torch.rand(50_000_000),
        lambda: [(np.float32(i), i % 10, f"{i}.png") for i in range(60_000)],
        lambda: {name: [(i, f"{i}") for i in range(6000)] for name in range(10)},
        lambda: [[0] * 100 for _ in range(100)],
        lambda: np.full(3_000_000, "a", np.dtypes.StringDType()),
    ],
    ids=["array", "tensor", "samples", "by class", "grid", "text"],
)
def test_a_look_at_much_costs_little(make: Callable[[], Any]) -> None:
    """Milliseconds of this thread's time, with room for slow machines."""
    value = make()
    seconds = []
    for _ in range(3):
        begin = time.thread_time()
        fingerprint(value)
        seconds.append(time.thread_time() - begin)
    assert min(seconds) < 0.1


def test_masked_arrays_are_not_imported_for_others() -> None:
    """Each worker would import them before its first batch."""
    code = (
        "import sys, types\n"
        "from optuna_hermes.suspend._values._fingerprint import fingerprint\n"
        "before = 'numpy.ma' in sys.modules\n"
        "fingerprint([types.SimpleNamespace(part=[1])])\n"
        "sys.exit('numpy.ma' in sys.modules and not before)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
