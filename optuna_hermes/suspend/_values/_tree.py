"""Conversion of a state to named tensors and a JSON text, so that checkpoints need no pickle.

JSON's own types are written as they are. Everything else is an object with one key that begins with
a dollar: ``{"$tuple": [1, 2]}``. A dictionary that would look like one, or whose keys are not all
text, is written as ``{"$dict": [[key, value], ...]}``.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from optuna_hermes.errors import CheckpointError, SuspendError, UnstorableError
from optuna_hermes.suspend._tiers._safetensors import DTYPES

# Torch is imported inside the functions: importing ``optuna_hermes.suspend`` must not cost seconds.
if TYPE_CHECKING:
    import torch

_MAPPINGS = (OrderedDict, Counter)
_KINDS = "biufc"  # NumPy's kinds: bool, integers with and without sign, real and complex
_CONTAINERS = (dict, list, tuple, set, frozenset)
NUMBERS = frozenset((type(None), bool, int, float, complex, str, bytes))
"""Types of values that lead to no other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """A leaf in the place of an object that is saved by itself, by its name."""

    name: str


def pack(tree: Any, trial: str) -> tuple[dict[str, torch.Tensor], str]:
    """Take a tree of tensors and plain values apart.

    Args:
        tree: None, numbers, text, bytes, lists, tuples, sets, dictionaries (also ``OrderedDict``
            and ``Counter``), tensors, arrays, dtypes, sizes and devices of torch, and references.
        trial: its name in messages.

    Returns:
        Contiguous tensors in main memory by name, of which no two share memory, and the text that
        ``unpack`` needs. The tensors are those of the tree where they can be.

    Raises:
        CheckpointError: the tree holds anything else, also objects of subclasses.
    """
    packer = _Packer(trial)
    try:
        # Without NaN, which is no JSON: the packer writes such numbers by their bits.
        text = json.dumps(
            packer.encode(tree, ()), separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
    except RecursionError as error:
        raise CheckpointError(
            f"A checkpoint of {trial} must be a tree, but a list or dictionary in it holds itself "
            "or is nested too deeply: let state_dict return plain values."
        ) from error
    return packer.tensors, text


def of_unknown_class(leaf: Any) -> bool:
    """True for an object of a class that ``pack`` does not know, but for tensors and containers."""
    import torch

    # Without a look into large ones.
    if type(leaf) in NUMBERS or isinstance(leaf, (torch.Tensor, np.ndarray, *_CONTAINERS)):
        return False
    try:
        _Packer("").encode(leaf, ())
    except UnstorableError:
        return True
    return False


def tensors_in(tree: Any, place: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """The tensors in dictionaries, lists and tuples, each by its place below ``place``."""
    import torch

    if isinstance(tree, torch.Tensor):
        yield place, tree
    elif isinstance(tree, dict | list | tuple):
        for key, each in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from tensors_in(each, (*place, key))


def each_once(
    root: Any, inside: Callable[[Any], Collection[Any]]
) -> Iterator[tuple[Any, Collection[Any]]]:
    """A value and all that it leads to but numbers and text, each object once, with its parts.

    Args:
        inside: returns the parts of an object.
    """
    waiting, seen = [root], set()
    while waiting:
        each = waiting.pop()
        if type(each) not in NUMBERS and id(each) not in seen:
            seen.add(id(each))
            parts = inside(each)
            yield each, parts
            if not NUMBERS.issuperset(map(type, parts)):  # at once: there may be a million of them
                waiting += parts


def leaves(tree: Any) -> Iterator[Any]:
    """Items of dictionaries, lists, tuples and sets, but numbers and text; each object once."""

    def inside(each: Any) -> Collection[Any]:
        if issubclass(type(each), dict):
            return [*each, *each.values()]
        return each if issubclass(type(each), list | tuple | set | frozenset) else ()

    return (each for each, parts in each_once(tree, inside) if not parts)


def unpack(tensors: Mapping[str, torch.Tensor], text: str) -> Any:
    """Put together what ``pack`` took apart.

    Every value has its type and its bits again, except that parameters become plain tensors without
    gradient. A tensor that was in the tree twice is one object again; a list or dictionary that was
    becomes two.
    """
    return json.loads(text, object_hook=_Unpacker(tensors).decode)


def frozen(tree: Any, copies: Mapping[int, torch.Tensor] | None = None) -> Any:
    """Copy a tree into main memory, so that later changes of the original do not affect it.

    Args:
        copies: those of its tensors that are copied already, by the ``id`` of the original.
    """
    known = dict(copies or {})

    def copy(value: Any) -> Any:
        if type(value) is np.ndarray:
            return value.copy()
        if not (storable(value) or is_sparse(value)):
            return value  # also what cannot be stored: ``pack`` raises its error
        if id(value) not in known:  # a tensor that occurs twice stays one object
            known[id(value)] = value.detach().to("cpu", copy=True)
        return known[id(value)]

    try:
        return mapped(tree, copy)
    except RecursionError:
        return tree


def mapped(value: Any, replace: Callable[[Any], Any]) -> Any:
    """A copy of a tree, with its leaves replaced by what a function returns for them.

    It is not called for numbers and text.
    """
    kind = type(value)
    if kind in NUMBERS:
        return value
    if kind in (list, tuple, set, frozenset):
        if NUMBERS.issuperset(map(type, value)):  # at once: there may be a million of them
            return kind(value)
        return kind(mapped(item, replace) for item in value)
    if kind is dict:
        return {
            key if type(key) is str else mapped(key, replace): mapped(item, replace)
            for key, item in value.items()
        }
    if kind in _MAPPINGS:  # with attributes: a module's state_dict has _metadata
        return _mapping(kind, mapped(dict(value), replace), mapped(vars(value), replace))
    return replace(value)


def same(one: Any, other: Any) -> bool:
    """True for two trees of the same values."""
    import torch

    kind = type(one)
    if kind is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and bool(np.array_equal(one, other))
    if kind is dict:
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if kind is not list or NUMBERS.issuperset(map(type, one)):
        return bool(one == other)
    return len(one) == len(other) and all(map(same, one, other))


def with_references(tree: Any, names: Mapping[int, str]) -> Any:
    """A tree, or a copy with references to the objects whose names there are, by ``id``."""
    try:
        if not any(id(each) in names for each in leaves(tree)):
            return tree  # others may hold its lists
        return mapped(
            tree, lambda leaf: Reference(name=names[id(leaf)]) if id(leaf) in names else leaf
        )
    except RecursionError:  # ``pack`` raises its error
        return tree


def without_references(tree: Any, objects: Mapping[str, object]) -> Any:
    """A tree, or a copy with these objects in place of the references to them.

    Raises:
        SuspendError: one of them is not there.
    """

    def referred_to(leaf: Any) -> Any:
        if type(leaf) is not Reference:
            return leaf
        if leaf.name not in objects:
            raise SuspendError(f"it refers to {leaf.name}, which is not there")
        return objects[leaf.name]

    found = any(type(each) is Reference for each in leaves(tree))
    return mapped(tree, referred_to) if found else tree


def with_plain_tensors(tree: Any) -> Any:
    """A tree, or a copy with plain tensors in place of those of subclasses that only add to them.

    A metric is of the class of what it was computed from, and its value is all that matters.
    """
    import torch

    found = []

    def as_plain(leaf: Any) -> Any:
        kind = type(leaf)
        if not issubclass(kind, torch.Tensor) or issubclass(kind, torch.nn.Parameter):
            return leaf
        # One with a ``__torch_dispatch__`` may have its values elsewhere.
        if kind is torch.Tensor or kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return leaf
        found.append(leaf)
        with torch._C.DisableTorchFunctionSubclass():  # which would make it one again
            return leaf.as_subclass(torch.Tensor)

    try:
        plain = mapped(tree, as_plain)
    except RecursionError:  # ``pack`` raises its error
        return tree
    return plain if found else tree  # others may hold its lists


class _Packer:
    def __init__(self, trial: str) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._name = trial
        self._references: dict[int, list[Any]] = {}
        self._storages: set[int] = set()

    def encode(self, value: Any, place: tuple[Any, ...]) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:  # longer ones are slow in decimal, and Python limits them
            return value if value.bit_length() < 64 else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if kind is list:
            return self._items(value, place)
        if kind is dict:
            return self._dict(value, place)
        if kind in (tuple, set, frozenset):
            return {f"${kind.__name__}": self._items(value, place)}
        if kind in _MAPPINGS:  # with attributes: a module's state_dict has _metadata
            parts = dict(value), vars(value)
            return {f"${kind.__name__}": [self._dict(part, place) for part in parts]}
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if kind is complex:
            return {"$complex": self._items((value.real, value.imag), place)}
        return self._of_library(value, place)

    def _of_library(self, value: Any, place: tuple[Any, ...]) -> dict[str, Any]:
        import torch

        if storable(value):
            return {"$tensor": self._tensor(value)}
        if is_sparse(value):
            return {"$sparse": self._sparse(value)}
        if type(value) is torch.Size:
            return {"$size": list(value)}
        if type(value) is torch.dtype:
            return {"$dtype": _name(value)}
        if is_numpy_dtype(value):
            return {"$numpy_dtype": value.str}
        if type(value) is torch.device:
            return {"$device": str(value)}
        if is_array(value):
            octets = torch.from_numpy(value.flatten().view(np.uint8))
            return {"$array": [self._add(octets), value.dtype.str, *value.shape]}
        if type(value) is Reference:
            return {"$known": value.name}
        if is_scalar(value):
            return {"$scalar": [value.dtype.str, value.tobytes().hex()]}
        raise UnstorableError(
            f"A checkpoint of {self._name} must hold only tensors, numbers, text, lists and "
            f"dictionaries, but {' / '.join(map(str, place)) or 'its root'} holds a "
            f"{_described(value)}: let its state_dict return plain values."
        )

    def _items(self, items: Iterable[Any], place: tuple[Any, ...]) -> list[Any]:
        return [self.encode(item, (*place, index)) for index, item in enumerate(items)]

    def _dict(self, value: dict[Any, Any], place: tuple[Any, ...]) -> dict[str, Any]:
        tag_like = len(value) == 1 and str(next(iter(value))).startswith("$")
        if not tag_like and all(type(key) is str for key in value):
            return {key: self.encode(item, (*place, key)) for key, item in value.items()}
        return {
            "$dict": [
                [self.encode(part, (*place, key)) for part in (key, item)]
                for key, item in value.items()
            ]
        }

    def _tensor(self, value: torch.Tensor) -> list[Any]:
        if id(value) not in self._references:
            self._references[id(value)] = self._named(value)
        return self._references[id(value)]

    def _sparse(self, value: torch.Tensor) -> list[Any]:
        """Layout and size of a sparse tensor, if it is coalesced, and its parts."""
        if id(value) not in self._references:
            parts = map(self._named, sparse_parts(value))  # which are made anew at each call
            kind = [_name(value.layout), list(value.shape), _is_coalesced(value)]
            self._references[id(value)] = [*kind, *parts]
        return self._references[id(value)]

    def _named(self, value: torch.Tensor) -> list[Any]:
        """Name of a tensor, with its dtype and shape if safetensors does not know the dtype."""
        import torch

        tensor = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        rest: list[Any] = []
        if _name(value.dtype) not in DTYPES.values():
            tensor = tensor.reshape(-1).view(torch.uint8)
            rest = [_name(value.dtype), *value.shape]
        return [self._add(tensor), *rest]

    def _add(self, tensor: torch.Tensor) -> str:
        # safetensors refuses tensors that share memory: all but the first are copied.
        address = tensor.untyped_storage().data_ptr()
        name = str(len(self.tensors))
        self.tensors[name] = tensor.clone() if address in self._storages else tensor
        self._storages.add(address)
        return name


class _Unpacker:
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        import torch

        self._tensors = tensors
        self._viewed: dict[str, torch.Tensor] = {}
        self._made: dict[str, torch.Tensor] = {}
        self._makers: dict[str, Any] = {
            "$int": lambda text: int(text, 16),
            "$float": lambda text: struct.unpack(">d", bytes.fromhex(text))[0],
            "$complex": lambda parts: complex(*parts),
            "$bytes": lambda text: base64.b64decode(text, validate=True),
            "$tuple": tuple,
            "$set": set,
            "$frozenset": frozenset,
            "$dict": dict,
            "$OrderedDict": lambda parts: _mapping(OrderedDict, *parts),
            "$Counter": lambda parts: _mapping(Counter, *parts),
            "$size": torch.Size,
            "$dtype": _dtype,
            "$numpy_dtype": np.dtype,
            "$device": torch.device,
            "$known": lambda name: Reference(name=name),
            "$tensor": lambda parts: self._tensor(*parts),
            "$sparse": lambda parts: self._sparse(*parts),
            "$array": lambda parts: self._array(*parts),
            "$scalar": lambda parts: np.frombuffer(bytes.fromhex(parts[1]), parts[0])[0],
        }

    def decode(self, value: dict[str, Any]) -> Any:
        """Decode one object; the JSON reader calls this for inner objects first."""
        tag = next(iter(value), "")
        if len(value) == 1 and tag.startswith("$"):
            return self._makers[tag](value[tag])
        return value

    def _tensor(self, name: str, dtype: str | None = None, *shape: int) -> torch.Tensor:
        if dtype is None:
            return self._tensors[name]
        if name not in self._viewed:
            self._viewed[name] = self._tensors[name].view(_dtype(dtype)).reshape(shape)
        return self._viewed[name]

    def _sparse(
        self, layout: str, size: list[int], coalesced: bool, *parts: list[Any]
    ) -> torch.Tensor:
        import torch

        first = parts[0][0]  # no other tensor has this part
        if first not in self._made:
            tensors = [self._tensor(*part) for part in parts]
            self._made[first] = _of_parts(getattr(torch, layout), size, coalesced, tensors)
        return self._made[first]

    def _array(self, name: str, dtype: str, *shape: int) -> np.ndarray[Any, Any]:
        return self._tensors[name].numpy().view(dtype).reshape(shape)


def _mapping(kind: Any, items: dict[Any, Any], attributes: dict[str, Any]) -> Any:
    mapping = kind(items)
    vars(mapping).update(attributes)
    return mapping


def storable(value: Any) -> bool:
    """True for a tensor that is fully described by its values, dtype and shape."""
    import torch

    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and not (value.is_quantized or value.is_nested or value.is_meta)
    )


def is_sparse(value: Any) -> bool:
    """True for a sparse tensor that is fully described by its size and its parts."""
    import torch

    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    parts = sparse_parts(value)
    return bool(parts) and all(map(storable, parts))


def sparse_parts(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The indices and values that a sparse tensor is made of; none of another one."""
    import torch

    if value.layout is torch.sparse_coo:
        return value._indices(), value._values()  # also of one that is not coalesced
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return value.crow_indices(), value.col_indices(), value.values()
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        return value.ccol_indices(), value.row_indices(), value.values()
    return ()


def with_parts(value: torch.Tensor, replace: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The result of a function for a tensor, or a sparse tensor of its results for the parts."""
    parts = [replace(part) for part in sparse_parts(value.detach())]
    if not parts:
        return replace(value)
    return _of_parts(value.layout, value.shape, _is_coalesced(value), parts)


def _of_parts(
    layout: torch.layout, size: Iterable[int], coalesced: bool, parts: Iterable[Any]
) -> torch.Tensor:
    import torch

    parts = list(parts)
    # Else they would be put on a default device.
    options: dict[str, Any] = {
        "size": list(size),
        "check_invariants": False,
        "device": parts[0].device,
    }
    if layout is torch.sparse_coo:
        return torch.sparse_coo_tensor(*parts, is_coalesced=coalesced, **options)
    return torch.sparse_compressed_tensor(*parts, layout=layout, **options)


def _is_coalesced(value: torch.Tensor) -> bool:
    import torch

    return value.layout is torch.sparse_coo and value.is_coalesced()


def is_numpy_dtype(value: object) -> bool:
    """True for a dtype of NumPy that is fully described by its text: it has no fields."""
    return isinstance(value, np.dtype) and value.kind in f"{_KINDS}OSUMm"


def is_array(value: Any) -> bool:
    """True for an array of numbers."""
    return type(value) is np.ndarray and value.dtype.kind in _KINDS


def is_scalar(value: Any) -> bool:
    """True for a number of NumPy's."""
    kind = type(value)
    return isinstance(value, np.generic) and kind is value.dtype.type and value.dtype.kind in _KINDS


def _described(value: Any) -> str:
    import torch

    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, torch.Tensor):
        return f"{kind} ({value.layout}, {value.dtype}, {value.device})"
    return f"{kind} of {value.dtype}" if isinstance(value, np.ndarray | np.generic) else kind


def _name(kind: torch.dtype | torch.layout) -> str:
    return str(kind).removeprefix("torch.")


def _dtype(name: str) -> Any:
    import torch

    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch.")
    return dtype
