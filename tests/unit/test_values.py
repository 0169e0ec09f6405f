"""Values of attributes, as trees and back."""

from __future__ import annotations

import contextlib
import io
import math
import operator
import sys
import threading
from array import array
from collections import defaultdict, deque
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from pathlib import Path, PurePosixPath
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import pytest
import torch

from optuna_hermes.errors import CheckpointError, SuspendError, UnstorableError
from optuna_hermes.suspend._modules._unsaved import NameTable
from optuna_hermes.suspend._state import copied
from optuna_hermes.suspend._values import _custom
from optuna_hermes.suspend._values._classes import Classes
from optuna_hermes.suspend._values._custom import ValueReader, ValueWriter
from optuna_hermes.suspend._values._owned import NamedTensors
from optuna_hermes.suspend._values._stacks import unstacked
from optuna_hermes.suspend._values._tree import frozen, pack, unpack


class Meter:
    """It has a state of its own."""

    def __init__(self, total: float = 0.0) -> None:
        self.total = total

    def state_dict(self) -> dict[str, float]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.total = state["total"]


HERE = Classes([globals()], [__name__.partition(".")[0]])


def back(value: Any, present: Any = None) -> Any:
    return ValueReader(HERE).node(ValueWriter().write_only("it", value), present)


def test_a_path_is_of_the_kind_that_is_there() -> None:
    """One that was none before is a pure one: a checkpoint touches no files."""
    there = back(Path("a/b"), Path("c"))
    assert (there, type(there)) == (Path("a/b"), type(Path()))
    assert type(back(Path("a/b"))) is PurePosixPath


@pytest.mark.parametrize(
    "value",
    [
        date(2020, 2, 29),
        datetime(2020, 10, 25, 2, 30, fold=1),
        datetime(2020, 1, 2, 3, 4, 5, 6, timezone(timedelta(hours=2), "CEST")),
        time(1, 2, 3, 4, timezone.utc),
        timedelta(-1, 2, 3),
        Decimal("-0.10"),
        Fraction(-1, 3),
        UUID(int=7),
        array("d", [0.1, float("inf")]),
        array("h"),
    ],
    ids=repr,
)
def test_values_of_the_standard_library_come_back(value: Any) -> None:
    """To the last digit, also in containers and where there was None."""
    restored, again = back([value, {"it": value}], None)
    assert (repr(restored), type(restored)) == (repr(value), type(value))
    assert again["it"] == value


class Smoothed:
    """Has a slot beside its attributes."""

    __slots__ = ("__dict__", "value")


@pytest.mark.parametrize("make", [Smoothed, object, type("Empty", (), {"__slots__": ()})])
def test_an_object_is_refused_that_has_more_than_attributes_or_none(make: type) -> None:
    """A slot would be lost, on some Pythons in silence; what has no attributes is no state."""
    with pytest.raises(CheckpointError, match=f"it is a .*{make.__name__}"):
        ValueWriter().write_only("it", make())


class Stats(SimpleNamespace):
    """A class of the user's below one of C."""


@pytest.mark.parametrize("make", [SimpleNamespace, Stats])
def test_a_namespace_comes_back_where_none_is(make: type[SimpleNamespace]) -> None:
    """``object`` makes no object of its class."""
    restored = back(make(best=1.0))
    assert type(restored) is make
    assert restored.best == 1.0


def test_an_array_of_the_standard_library_stays_the_same_object() -> None:
    """But if it has other types, is another value's by now, or cannot grow."""
    there = array("d", [7.0])
    assert back(array("d", [1.0, 2.0]), there) is there
    assert there.tolist() == [1.0, 2.0]
    assert back(array("f", [3.0]), there).typecode == "f"
    with memoryview(there):
        assert back(array("d", [3.0]), there).tolist() == [3.0]
    assert there.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    "make",
    [io.BytesIO, lambda: io.BytesIO(b"abc"), lambda: io.StringIO("a\nb", newline="\r\n")],
    ids=["empty", "octets", "text"],
)
def test_a_file_in_memory_comes_back(make: Any) -> None:
    """With its content, place and ends of lines, in the one that is there, if that is open."""
    value = make()
    value.seek(2)
    there = type(value)()
    restored, again = back([value, value], [there, None])
    assert restored is again is there
    assert restored.__getstate__() == value.__getstate__()
    there.close()
    assert back(value, there).__getstate__() == value.__getstate__()
    with pytest.raises(ValueError, match="closed file"):
        ValueWriter().write_only("it", there)


def test_what_no_checkpoint_holds_does_not_become_none() -> None:
    """An object that is not there is an error, whatever holds it."""
    held = [back, {"lock": threading.Lock()}]
    assert back(held, held[:]) == held
    for there in ([back], [None, held[1]], None):
        with pytest.raises(SuspendError, match="holds something that no checkpoint does"):
            back(held, there)


def test_what_is_of_another_kind_by_now_is_replaced() -> None:
    there = {"a": 1}
    assert back([1, 2], there) == [1, 2]
    assert there == {"a": 1}


def test_a_deque_is_filled_in_place_if_it_is_as_long() -> None:
    there: deque[int] = deque([7], maxlen=2)
    assert back(deque([1, 2], maxlen=2), there) is there
    assert list(there) == [1, 2]
    longer = back(deque([1, 2], maxlen=3), there)
    assert (list(longer), longer.maxlen) == ([1, 2], 3)


def test_who_has_a_state_dict_loads_it() -> None:
    """It is loaded into the object that is there, and none is made up."""
    there = Meter()
    assert back(Meter(3.0), there) is there
    assert there.total == 3.0
    with pytest.raises(SuspendError, match=r"it holds a .*Meter, and there is none to load"):
        back(Meter(3.0))


def test_a_parameter_stays_the_one_that_an_optimizer_holds() -> None:
    there = torch.nn.Parameter(torch.zeros(2))
    assert back(torch.nn.Parameter(torch.ones(2)), there) is there
    assert there.tolist() == [1.0, 1.0]
    assert back(torch.nn.Parameter(torch.ones(3)), there).shape == (3,)


def test_a_trained_tensor_stays_the_one_that_an_optimizer_holds() -> None:
    """One that is not trained is a new one, as what is there may be a part of something else."""
    there = torch.zeros(2, requires_grad=True)
    trained = torch.ones(2, requires_grad=True)
    assert back(trained, there) is there
    assert there.tolist() == [1.0, 1.0]
    assert back(trained, torch.zeros(2)).requires_grad
    fixed = torch.zeros(2)
    assert back(torch.ones(2), fixed).tolist() == [1.0, 1.0]
    assert fixed.tolist() == [0.0, 0.0]


def test_what_cannot_be_written_to_is_left_as_it_is() -> None:
    """An expanded tensor, a read-only array, and those of another shape or type."""
    fixed = np.zeros(2)
    fixed.flags.writeable = False
    for there in (fixed, np.zeros(3), np.zeros(2, np.int64), None):
        assert copied(there, np.ones(2)).tolist() == [1.0, 1.0]
    for other in (torch.zeros(1).expand(2), torch.zeros(3), torch.zeros(2).long(), None):
        assert copied(other, torch.ones(2)).tolist() == [1.0, 1.0]
    assert fixed.tolist() == [0.0, 0.0]


class Link:
    """An object that leads to the next one."""

    def __init__(self, next_: Any) -> None:
        self.next = next_


def test_what_can_be_written_can_be_packed() -> None:
    """A chain of objects is refused before it is too long for the checkpoint's text."""
    chain, length = Link(None), 0
    with contextlib.suppress(CheckpointError):
        while length < 200:
            pack({"it": ValueWriter().write_only("it", chain)}, "trial 0")
            chain, length = Link(chain), length + 1
    assert length > 70
    assert isinstance(back(chain.next).next, Link)
    with pytest.raises(CheckpointError, match="it is nested too deeply"):
        ValueWriter().write_only("it", chain)


def test_what_cannot_be_restored_is_named() -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(CheckpointError, match="it is nested too deeply"):
        ValueWriter().write_only("it", deep)
    with pytest.raises(CheckpointError, match="it has more than 3 parts"):
        ValueWriter(most=3).write_only("it", [1, 2, 3])
    with pytest.raises(CheckpointError, match=r"it is a tensor of Tensor"):
        ValueWriter().write_only("it", torch.ones(2, device="meta"))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_tensor_comes_back(layout: torch.layout) -> None:
    """One that an optimizer trains would be another object than it has."""
    value = torch.eye(3).to_sparse(layout=layout)
    restored = back([value, value], None)
    assert restored[0].layout is layout
    assert restored[0] is restored[1]
    assert torch.equal(restored[0].to_dense(), torch.eye(3))
    with pytest.raises(CheckpointError, match=r"it is a tensor of Tensor"):
        ValueWriter().write_only("it", value.requires_grad_())


def test_what_makes_the_values_of_a_dictionary() -> None:
    """It is known by name where it is a class of Python's; else the dictionary must be there."""
    made = back(defaultdict(list, a=[1]))
    made["b"].append(2)
    assert made == {"a": [1], "b": [2]}
    with pytest.raises(SuspendError, match="what makes its values is not known"):
        back(defaultdict(lambda: 0))
    there = defaultdict(lambda: defaultdict(int))
    tree = ValueWriter().write_only("it", defaultdict(lambda: 0, a=defaultdict(float, b=1.0)))
    assert ValueReader(HERE).node(tree, there) is there
    assert (there["a"]["b"], there["a"]["c"], there["d"]["e"]) == (1.0, 0.0, 0)


def test_the_versions_of_parts_in_kept_weights_come_back() -> None:
    """A module asks for them when it loads weights, and they are in no item of a ``state_dict``."""
    weights = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
    versions = {"": {"version": 1}, "0": {"version": 2}}
    assert back(weights)._metadata == versions
    there = torch.nn.Sequential(torch.nn.Linear(1, 1)).state_dict()
    assert back(weights, there)._metadata == versions
    assert back(weights, there) is there


def test_a_known_object_comes_back_by_its_name() -> None:
    """In the next process it is another one; where there is none, the value cannot be restored."""
    first, second = Meter(1.0), Meter(2.0)
    tree = ValueWriter({id(first)}, named=NameTable({"meter": first})).write_only("it", [first])
    (found,) = ValueReader(HERE, named=NameTable({"meter": second})).node(tree)
    assert found is second
    with pytest.raises(SuspendError, match="it refers to meter, which is not there"):
        ValueReader(HERE).node(tree)


def test_a_class_below_a_module_that_the_code_names_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not one that would run code when it is collected, nor one of another package."""
    names, place = [{"torch": torch}], "torch.distributions.normal"
    kind = torch.distributions.Normal
    assert Classes(names, [], [torch]).find(place, "Normal") is kind
    assert Classes(names, [], [torch.nn]).find(place, "Normal") is None
    assert Classes(names, [], [torch]).find("tempfile", "SpooledTemporaryFile") is None
    assert Classes.of(Meter()).find(place, "Normal") is kind
    below = ModuleType("torch.made_here")
    below.Ends = type("Ends", (), {"__del__": print, "__module__": below.__name__})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, below.__name__, below)
    assert Classes(names, [], [torch]).find(below.__name__, "Ends") is None


class Items(dict[str, Any]):
    """Has its items as attributes, and raises ``KeyError`` for others."""

    __getattr__ = dict.__getitem__


class Configured(Meter):
    settings = Items(scale=2.0)


def test_attributes_of_a_class_are_not_asked_for_more() -> None:
    """Only its methods name classes."""
    assert Classes.of(Configured()).find(__name__, "Meter") is Meter


class StandIn:
    """Has a function's attributes, as the decorators of wrapt do."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def test_a_function_behind_a_decorator_names_classes() -> None:
    kind = type("Decorated", (), {"method": StandIn(of_objects), "__module__": __name__})
    assert Classes.of(kind()).find(__name__, "Meter") is Meter


def test_a_class_that_the_code_cannot_name_is_not_found() -> None:
    assert HERE.find(__name__, "Meter") is Meter
    assert HERE.find("elsewhere", "Meter") is None
    assert HERE.find(__name__, "Nobody") is None


def of_objects(*items: Any) -> np.ndarray[Any, Any]:
    array = np.empty(len(items), object)
    for index, item in enumerate(items):
        array[index] = item
    return array


@pytest.mark.parametrize(
    "items", [((1, 2.0), (3, 4.0), (5, 6.0)), ([7],), (0, (1, 2)), ((),)], ids=repr
)
def test_arrays_of_objects_come_back_as_they_are(items: tuple[Any, ...]) -> None:
    """Those of a replay buffer, whose tuples NumPy would take for another dimension."""
    restored = back(of_objects(*items), None)
    assert restored.dtype == object
    assert restored.tolist() == list(items)


def test_an_array_with_fields_is_named() -> None:
    """Their names are in no plain text of its type."""
    fields = np.zeros(3, [("state", "f4", 4), ("reward", "f4")])
    with pytest.raises(CheckpointError, match=r"numpy\.ndarray"):
        ValueWriter().write_only("it", [fields])


class Step(NamedTuple):
    state: Any
    action: Any
    reward: Any
    after: Any


class Replay:
    """A buffer as most are: the state after a step is that before the next one."""

    def __init__(self, states: list[Any]) -> None:
        pairs = enumerate(pairwise(states))
        steps = (Step(a, n % 3, np.float32(n / 3), b if n % 7 else None) for n, (a, b) in pairs)
        self.steps = deque(steps, maxlen=99)
        self.last = self.steps[-1]
        self.now = states[-1]


_BIG = np.arange(80.0).reshape(40, 2)
_LIKE = {
    "arrays": lambda: Replay([np.full(4, n, "f") for n in range(40)]),
    "tensors": lambda: Replay([torch.full((1, 4), n) for n in range(40)]),
    "numbers": lambda: [np.float64(n / 7) for n in range(20)],
    "mixed numbers": lambda: [(n, np.int64(n) if n % 2 else n, None) for n in range(20)],
    "a set": lambda: {(n, -n) for n in range(20)},
    "other bytes": lambda: [np.array([n, math.nan], ">f8") for n in range(20)],
    "one number each": lambda: deque(np.array(n) for n in range(20)),
    "one tensor each": lambda: [torch.tensor(n / 3, dtype=torch.bfloat16) for n in range(20)],
    "all the same": lambda: [np.zeros(3)] * 20,
    "None": lambda: [(None, None)] * 20,
    "rows of one array": lambda: list(_BIG),
    "rows of lists": lambda: [(float(n), f"{n}", [n]) for n in range(20)],
    "lists twice": lambda: [[n] for n in range(20)] * 2,
    "dictionaries": lambda: [{"loss": n / 3, "n": n, n: None} for n in range(20)],
    "a row twice": lambda: [Step(np.zeros(3), 1, 2, 3)] * 20,
    "other shapes": lambda: [np.zeros(n) for n in range(20)],
    "other classes": lambda: [np.zeros(2) if n % 2 else torch.zeros(2) for n in range(20)],
    "other rows": lambda: [(0,) * (n % 3) for n in range(20)],
    "with gradients": lambda: [torch.zeros(2, requires_grad=True) for _ in range(20)],
    "large": lambda: [np.zeros(1000) for _ in range(20)],
    "order of Fortran": lambda: [np.ones((2, 2), order="F") for _ in range(20)],
    "lists of lists": lambda: [[[n]] for n in range(20)],
    "few": lambda: [np.zeros(2) for _ in range(3)],
    "one memory twice": lambda: [each.reshape(2, 1) for each in list(_BIG[:20]) * 2],
    "columns": lambda: list(np.ones((3, 20)).T),
}
_STACKED = list(_LIKE)[: list(_LIKE).index("a row twice")]


def taken_apart(tree: Any) -> Any:
    """A tree with a node for each item, and with arrays as text."""
    if isinstance(tree, np.ndarray | torch.Tensor):
        told = tree.detach().to(torch.float64).tolist() if isinstance(tree, torch.Tensor) else tree
        return f"{tree.dtype} {tuple(tree.shape)} {told!r}"
    if isinstance(tree, list | tuple):
        if tree[:1] == ["stacked"]:
            tree = unstacked(*tree[1:])
        elif tree[:1] == ["numbers"]:
            tree = [["plain", each] for each in tree[1]]
        return [taken_apart(each) for each in tree]
    return f"{tree!r} {type(tree)}"


@pytest.mark.parametrize("case", _LIKE)
def test_like_items_are_written_together_as_if_each_had_a_node(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small arrays, lists, numbers and tuples of these; others still have a node each."""
    value = _LIKE[case]()
    together = frozen(ValueWriter().write("it", value))
    tensors, text = pack(together, "t")
    assert ("stacked" in text) == (case in _STACKED)
    assert len(tensors) < 8 or case not in _STACKED
    monkeypatch.setattr(_custom, "LEAST", math.inf)
    one_by_one = taken_apart(ValueWriter().write("it", value))
    assert taken_apart(together) == taken_apart(unpack(tensors, text)) == one_by_one


@pytest.mark.parametrize("case", ["arrays", "tensors"])
def test_what_is_held_twice_in_a_buffer_is_one_object_again(case: str) -> None:
    """Each with memory of its own: a view would keep that of all items."""
    value = _LIKE[case]()
    restored = back(value)
    assert type(restored.steps[0]) is Step
    assert restored.steps.maxlen == 99
    assert restored.last is restored.steps[-1]
    assert restored.last.after is restored.now
    for one, other in pairwise(restored.steps):
        assert (one.after is other.state) == (one.after is not None)
    for one, other in zip(restored.steps, value.steps, strict=True):
        assert (one.state == other.state).all()
        assert (one.action, one.reward, type(one.reward)) == (*other[1:3], np.float32)
    if case == "arrays":
        assert all(each.state.base is None for each in restored.steps)
    assert all(each.state.nbytes == memory_bytes(each.state) for each in restored.steps)


def memory_bytes(value: Any) -> int:
    tensor = torch.as_tensor(value)
    return tensor.untyped_storage().nbytes()


def test_like_items_are_restored_in_place() -> None:
    """If each process makes them: others may hold them."""
    value = [np.full(2, n) for n in range(20)]
    made = {id(each): each for each in value[:5]}
    node = frozen(ValueWriter(made=made).write_only("it", value))
    there = [np.zeros(2, int) for _ in range(20)]
    restored = ValueReader(HERE).node(node, there[:])
    assert [a is b for a, b in zip(restored, there, strict=True)] == [True] * 5 + [False] * 15
    assert np.array_equal(restored, value)
    given = {id(each): each for each in restored}
    again = ValueReader(HERE, given).node(node, restored[:])
    assert all(a is b for a, b in zip(again, restored, strict=True))


def test_like_items_that_are_saved_elsewhere_are_not_written_again() -> None:
    """They are referred to, and parts of named tensors stay such."""
    weights = [torch.full((2,), float(n)) for n in range(20)]
    by_name = {f"w{n}": each for n, each in enumerate(weights)}
    known = {id(each) for each in weights}
    writer = ValueWriter(known, named=NameTable(by_name))
    node = writer.write_only("it", weights)
    restored = ValueReader(HERE, named=NameTable(by_name)).node(node)
    assert all(map(operator.is_, restored, weights))
    owned = NamedTensors(lambda: by_name)
    node = ValueWriter(owned=owned).write_only("it", weights)
    restored = ValueReader(HERE, owned=owned).node(node)
    assert all(map(operator.is_, restored, weights))


def test_like_items_must_not_overlap_and_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each had a node; a view of one stays a view of it."""
    frames = np.arange(80.0)
    windows = [frames[n : n + 4] for n in range(0, 80, 2)]
    with pytest.raises(UnstorableError, match=r"it\.\d+ must have memory of its own"):
        ValueWriter().write_only("it", windows)
    apart = windows[::2]
    held, view = back([apart, apart[3].reshape(2, 2)])
    view[0, 0] = -1.0
    assert held[3].tolist() == [-1.0, *apart[3][1:]]
    rows = [(0, each) for each in apart]
    ValueWriter(most=3 * 20 + 1).write_only("it", rows)
    with pytest.raises(CheckpointError, match="more than 59 parts"):
        ValueWriter(most=59).write_only("it", [[n, n] for n in range(20)])
    monkeypatch.setattr(_custom, "stack_or_node", None)  # each save would do this in vain
    with pytest.raises(CheckpointError, match="more than 60 parts"):
        ValueWriter(most=60).write_only("it", rows)
