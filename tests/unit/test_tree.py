"""A state survives being written as named tensors and a text, to the bit and to the type."""

from __future__ import annotations

import collections
import datetime
import json
import math
import struct
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from optuna_hermes.errors import CheckpointError, SuspendError
from optuna_hermes.suspend import read, write
from optuna_hermes.suspend._values._tree import (
    frozen,
    pack,
    sparse_parts,
    unpack,
    with_references,
    without_references,
)

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2fnuz),
]
SHAPES = [(), (0,), (1,), (3,), (2, 3), (2, 0, 4)]
NUMPY_DTYPES = ["?", "u1", "<i8", ">i2", "<f2", "<f4", ">f8", "g", "<c8", "<c16"]


def exact(value: Any) -> Any:
    """A value as plain tuples that are equal if types and bits are."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        octets = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return torch.Tensor, value.dtype, value.shape, octets.numpy().tobytes()
    if isinstance(value, np.ndarray | np.generic):
        return kind, value.dtype.str, value.shape, value.tobytes()
    if kind is float:
        return kind, struct.pack(">d", value)
    if kind is complex:
        return kind, struct.pack(">dd", value.real, value.imag)
    if isinstance(value, list | tuple):
        return kind, [exact(item) for item in value]
    if isinstance(value, set | frozenset):
        return kind, sorted(repr(exact(item)) for item in value)
    if isinstance(value, dict):
        items = [(exact(key), exact(item)) for key, item in value.items()]
        return kind, items, exact(getattr(value, "__dict__", None))
    return kind, value


def there_and_back(tree: Any) -> Any:
    return unpack(*pack(tree, "trial 7"))


def refusal(tree: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        pack(tree, "trial 7")
    return str(caught.value)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(SHAPES))
    size = math.prod(shape) * dtype.itemsize
    octets = torch.tensor(list(draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    return (octets % 2 if dtype is torch.bool else octets).view(dtype).reshape(shape)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    numbers = np.array(draw(st.lists(st.integers(0, 100), min_size=6, max_size=6)))
    array = numbers.astype(draw(st.sampled_from(NUMPY_DTYPES)))
    return draw(st.sampled_from([array, array.reshape(2, 3).T, array[:0], array[0].reshape(())]))


plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | st.text(st.characters())
    | st.binary()
    | st.complex_numbers()
    | arrays().filter(lambda array: array.size).map(lambda array: array.flatten()[0])
    | st.sampled_from([torch.float32, torch.device("cuda:1"), torch.Size((2, 3))])
    | st.sampled_from([np.dtype("f4"), np.dtype(">i2"), np.dtype("U3"), np.dtype("M8[s]")])
)
keys = plain | st.tuples(plain, plain)
tag_like = st.sampled_from(["$tensor", "$dict", "$int", "$", "$anything"])
trees = st.recursive(
    plain | tensors() | arrays() | st.sets(keys) | st.frozensets(keys),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(keys, inner)
        | st.dictionaries(tag_like, inner, max_size=2)
        | st.dictionaries(keys, inner).map(OrderedDict)
        | st.dictionaries(keys, inner).map(Counter)
    ),
    max_leaves=10,
)


@given(trees)
def test_every_tree_comes_back(tree: Any) -> None:
    """A packed tree is unpacked with equal types, bits and order."""
    assert exact(there_and_back(tree)) == exact(tree)


@given(trees)
@settings(max_examples=30)
def test_every_tree_comes_back_from_a_file(
    tmp_path_factory: pytest.TempPathFactory, tree: Any
) -> None:
    """A written tree is read with equal types, bits and order."""
    state = write(tmp_path_factory.mktemp("run"), tree, trial="trial 7", units=1)
    assert exact(read((state,), "trial 7", Path(state.path).parent)) == exact((state, tree))


@given(trees)
def test_a_frozen_tree_is_equal(tree: Any) -> None:
    """A copy has the types and bits of the original."""
    assert exact(frozen(tree)) == exact(tree)


@given(trees)
def test_strict_json(tree: Any) -> None:
    """The text has no literals that only Python's JSON knows."""
    json.loads(pack(tree, "trial 7")[1], parse_constant=pytest.fail)


def test_the_common_case_is_plain() -> None:
    """Text, numbers, lists and dictionaries are in the text as they are, and compact."""
    tree = {"epoch": 3, "best": [0.5, None, True], "name": "Grüße"}
    assert pack(tree, "trial 7") == ({}, '{"epoch":3,"best":[0.5,null,true],"name":"Grüße"}')
    assert pack((1, "$"), "trial 7")[1] == '{"$tuple":[1,"$"]}'


@pytest.mark.parametrize(
    "number", [math.nan, -math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1, 2**63, -(2**63)]
)
def test_numbers(number: float) -> None:
    """Numbers that JSON does not know, or does not keep, come back to the bit."""
    assert exact(there_and_back(number)) == exact(number)


def test_a_long_number() -> None:
    """An integer may have more digits than Python converts to decimal."""
    assert there_and_back(10**5000) == 10**5000


def test_other_nans() -> None:
    """A NaN keeps the bits that say where it came from."""
    nan = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]
    assert struct.pack(">d", there_and_back(nan)) == struct.pack(">d", nan)


def test_one_object_stays_one() -> None:
    """A tensor that is in the tree twice is stored once, also where it is stored as bytes."""
    for tensor in (torch.ones(3), torch.ones(3, dtype=torch.complex64)):
        packed, text = pack({"a": tensor, "b": [tensor]}, "trial 7")
        assert len(packed) == 1
        tree = unpack(packed, text)
        assert tree["a"] is tree["b"][0]


def test_shared_memory_is_parted() -> None:
    """Tensors that share memory, and views of all kinds, are stored as what they show."""
    base = torch.arange(12.0).reshape(3, 4)
    tree = {
        "base": base,
        "same": base.detach(),
        "row": base[1],
        "columns": base.T,
        "spread": base[:, :1].expand(3, 5),
        "nothing": base[:0],
        "conjugate": torch.complex(base, base).conj(),
        "negative": torch.complex(base, base).conj().imag,
    }
    packed, text = pack(tree, "trial 7")
    assert len({tensor.data_ptr() for tensor in packed.values() if tensor.numel()}) == 7
    assert all(tensor.is_contiguous() for tensor in packed.values())
    back = unpack(packed, text)
    assert {name: value.tolist() for name, value in back.items()} == {
        name: value.tolist() for name, value in tree.items()
    }


def test_nothing_is_copied_without_need() -> None:
    """A tensor that can be written as it lies is not copied."""
    tensor = torch.ones(3)
    packed, _ = pack([tensor], "trial 7")
    assert packed["0"].data_ptr() == tensor.data_ptr()


def test_parameters_come_back_as_tensors() -> None:
    """A parameter loses what only its module needs: its class, and that it takes gradients."""
    back = there_and_back(nn.Parameter(torch.ones(2)))
    assert type(back) is torch.Tensor
    assert not back.requires_grad


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128, torch.bool])
def test_sparse_tensors_come_back(dtype: torch.dtype) -> None:
    """With the same layout and parts; one that occurs twice is one object again."""
    dense = torch.tensor([[0, 1, 0, 0], [2, 0, 0, 3], [0, 0, 0, 0], [0, 0, 4, 0]]).to(dtype)
    tensors = [
        dense.to_sparse(),
        torch.sparse_coo_tensor(torch.tensor([[1, 1], [2, 2]]), dense[1, ::3], (4, 4)),
        torch.stack([dense, dense], -1).to_sparse(2),
        torch.zeros(3, 0, dtype=dtype).to_sparse(),
        *(dense.to_sparse_csr(), dense.to_sparse_csc()),
        *(dense.to_sparse_bsr((2, 2)), dense.to_sparse_bsc((2, 2))),
    ]
    fixed = frozen(tensors)
    for each in tensors:
        sparse_parts(each)[-1].zero_()
    with torch.device("meta"):  # a script's default, which is not where they were
        back = there_and_back([*fixed, fixed[0]])
    assert back[0] is back.pop()
    for tensor, copy in zip(fixed, back, strict=True):
        assert copy.layout is tensor.layout
        assert copy.shape == tensor.shape
        assert exact(sparse_parts(copy)) == exact(sparse_parts(tensor))
        if tensor.layout is torch.sparse_coo:
            assert copy.is_coalesced() == tensor.is_coalesced()
    assert fixed[0].to_dense().any()


def test_module_and_optimizer() -> None:
    """The versions that a module's state names come back, and the integer keys of an optimizer."""
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    states = {"module": module.state_dict(), "optimizer": optimizer.state_dict()}
    back = there_and_back(states)
    assert back["module"]._metadata == states["module"]._metadata
    assert back["module"]._metadata["1"] == {"version": 2}
    assert exact(back) == exact(states)
    optimizer.load_state_dict(back["optimizer"])


def test_another_default_device() -> None:
    """The default device of new tensors has no effect."""
    tree = {"tensor": torch.ones(3), "array": np.ones(3), "complex": torch.ones(2).to(torch.cfloat)}
    with torch.device("meta"):
        back, copy = there_and_back(tree), frozen(tree)
    assert exact(back) == exact(tree) == exact(copy)


class Thing:
    """Class that a user may have."""


class Table(dict[str, int]):
    """A dictionary that is more than its items."""


class Pair(NamedTuple):
    """A tuple that is more than its items."""

    left: int


class Marked(torch.Tensor):
    """A tensor that is more than its values."""


def test_a_refusal_names_the_place() -> None:
    """The error says whose checkpoint, where in it, and of which type the object is."""
    tree = {"epoch": 1, "callbacks": {"MyCallback": {"history": [1, Thing()]}}}
    assert refusal(tree) == (
        "A checkpoint of trial 7 must hold only tensors, numbers, text, lists and dictionaries, "
        f"but callbacks / MyCallback / history / 1 holds a {__name__}.Thing: let its state_dict "
        "return plain values."
    )


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Table(a=1), "Table"),
        (Pair(1), "Pair"),
        (collections.defaultdict(int), "collections.defaultdict"),
        (datetime.timedelta(1), "datetime.timedelta"),
        (bytearray(b"x"), "builtins.bytearray"),
        (len, "builtins.builtin_function_or_method"),
        (np.str_("x"), "numpy.str_ of <U1"),
        (np.dtype([("a", "f4")]), "numpy.dtypes.VoidDType"),
        (np.array([None]), "numpy.ndarray of object"),
        (np.array(["2024"], dtype="M8[Y]"), "numpy.ndarray of datetime64[Y]"),
        (np.ma.array([1]), "MaskedArray of int64"),
        (torch.ones(2).as_subclass(Marked), "Marked"),
        (torch.ones(2).to_sparse().to("meta"), "torch.Tensor (torch.sparse_coo"),
        (torch.ones(2, device="meta"), "torch.Tensor (torch.strided, torch.float32, meta)"),
        (torch.Generator(), "Generator"),
    ],
)
def test_nothing_loses_its_class_in_silence(value: Any, named: str) -> None:
    """Whatever would come back as something else, or not at all, is refused by name."""
    assert named in refusal({"state": {3: value}})
    assert "state / 3 holds a " in refusal({"state": {3: value}})
    assert "trial 7 must hold only" in refusal(value)


def test_keys_are_values_too() -> None:
    """A key that cannot be stored is refused like a value."""
    assert f"Pair(left=1) holds a {__name__}.Pair" in refusal({Pair(1): 2})


def test_a_list_that_holds_itself() -> None:
    """A list without end is refused."""
    endless: list[Any] = []
    endless.append(endless)
    assert "trial 7 must be a tree" in refusal(frozen({"state": endless}))


def test_later_changes_do_not_show_in_a_frozen_tree() -> None:
    """Tensors, arrays and collections of the copy are its own; one object stays one."""
    weight = nn.Parameter(torch.ones(3))
    state = OrderedDict(weight=weight, again=weight, seen=[1], array=np.ones(2))
    vars(state)["_metadata"] = {"": {"version": 1}}
    copy = frozen({"state": state, "pair": ({"a": 1}, [weight])})
    with torch.no_grad():
        weight.zero_()
    state["seen"].append(2)
    state["array"][:] = 0
    vars(state)["_metadata"][""]["version"] = 2
    assert copy["state"]["weight"].tolist() == [1, 1, 1]
    assert copy["state"]["weight"] is copy["state"]["again"] is copy["pair"][1][0]
    assert not copy["state"]["weight"].requires_grad
    assert copy["state"]["seen"] == [1]
    assert copy["state"]["array"].tolist() == [1, 1]
    assert copy["state"]._metadata == {"": {"version": 1}}


def test_what_is_refused_can_be_frozen() -> None:
    """A copy keeps what cannot be stored, so that the error comes from where it can be named."""
    thing = Thing()
    assert frozen({"a": [thing]})["a"][0] is thing


def test_a_text_of_someone_else() -> None:
    """An unknown tag, or a name that is no dtype, is an error and calls nothing."""
    with pytest.raises(KeyError):
        unpack({}, '{"$eval":"1"}')
    with pytest.raises(ValueError, match="'load' is no dtype"):
        unpack({}, '{"$dtype":"load"}')


def test_state_lies_in_memory_that_can_be_given_back(tmp_path: Path) -> None:
    """A tensor that was read can be moved to host memory: its storage is its own and resizable."""
    tree = {"a": torch.ones(3), "b": torch.ones(2, dtype=torch.complex64)}
    found = read((write(tmp_path, tree, trial="trial 7", units=1),), "trial 7", tmp_path)
    assert found is not None
    for tensor in found[1].values():
        storage = tensor.untyped_storage()
        assert storage.nbytes() == tensor.nbytes
        storage.resize_(0)


def test_an_object_that_is_saved_by_itself_is_referred_to() -> None:
    """It is another one in the next process, where it must be there."""
    first, second = Path(), Path()
    tree = {"held": [first, 1], "of all": ()}
    assert with_references(tree, {id(second): "second"}) is tree
    stored = there_and_back(with_references(tree, {id(first): "first"}))
    assert without_references(stored, {"first": second}) == {"held": [second, 1], "of all": ()}
    with pytest.raises(SuspendError, match="it refers to first, which is not there"):
        without_references(stored, {})
