"""Fingerprints of values, to see whether something has changed between two moments.

What belongs to the surroundings of a training is not looked into: loaders and data sets, loggers,
progress bars, open files, code. Long containers and large arrays are sampled, so that a look costs
little; what is missed then is a change in the midst of something large, with its length the same.
"""

from __future__ import annotations

import itertools
import struct
import sys
import types
import zlib
from collections import deque
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from optuna_hermes.suspend._generators import GENERATORS, generator_state

_CODE = (
    type,
    partial,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
)
_DATA = (DataLoader, Dataset, Sampler)
_LOOKED_INTO = {"builtins", "collections", "itertools", "pathlib", "random"}
"""Packages of the standard library whose objects are values; others are files, clocks, threads."""
_SHOWING = {
    *("accelerate", "aim", "clearml", "comet_ml", "lightning", "lightning_fabric"),
    *("lightning_utilities", "matplotlib", "mlflow", "neptune", "optuna", "optuna_hermes"),
    *("pytorch_lightning", "rich"),
    *("tensorboard", "tensorboardX", "torchmetrics", "tqdm", "wandb"),
}
"""Libraries that show or log, or that look after their own state."""
_OF_TORCH = ("torch.utils.data", "torch.utils.tensorboard", "torch.profiler", "torch.distributed")
_LONG = 2000
_LARGE_BYTES = 1 << 24
_MOST_PARTS = 200_000
_unlike_all = itertools.count(1)


def outside(value: object) -> bool:
    """Whether a value is of the surroundings of a training, and none of its own."""
    if isinstance(value, (*_CODE, *_DATA)):
        return True
    module = type(value).__module__
    package = module.partition(".")[0]
    if package in sys.stdlib_module_names:
        return package.lstrip("_") not in _LOOKED_INTO
    return package in _SHOWING or module.startswith(_OF_TORCH)


def is_iterator(value: object) -> bool:
    """Whether a value is a position in something, which nobody can see or set."""
    if isinstance(value, types.GeneratorType):
        return "optuna_hermes" not in value.gi_code.co_filename
    kind = type(value)
    return hasattr(kind, "__next__") and (
        not outside(value) or kind.__module__.startswith("torch.utils.data")
    )


def fingerprint(value: object, known: Collection[int] = ()) -> int:
    """A number that is very likely another one once the value has changed.

    Args:
        value: anything.
        known: what is not looked into, by ``id``.
    """
    return hash(tuple(_Walk(known).parts(value)))


class _Walk:
    def __init__(self, known: Collection[int]) -> None:
        self._known = known
        self._seen: dict[int, object] = {}  # kept, so that no number is used twice
        self._left = _MOST_PARTS

    def parts(self, root: object) -> Iterator[Hashable]:
        waiting = [root]
        while waiting and self._left > 0:
            self._left -= 1
            value = waiting.pop()
            yield type(value).__qualname__
            leaf = _of_leaf(value)
            if leaf is not None:
                yield leaf
            elif id(value) not in self._known and id(value) not in self._seen:
                self._seen[id(value)] = value
                if is_iterator(value):
                    yield ("unlike all", next(_unlike_all))
                elif not outside(value):
                    inside = _inside(value)
                    yield len(inside)
                    waiting += _sampled(inside)


def _of_leaf(value: Any) -> Hashable:
    """What a value that leads to no others is; None of one that does."""
    kind = type(value)
    if kind is float:
        return struct.pack("d", value)  # a NaN is no other one
    if value is None or kind in (bool, int, str, bytes, complex):
        return (value,)
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, np.ndarray) and value.dtype.kind != "O":
        return (value.shape, value.dtype.str, _checksum(value))
    if isinstance(value, np.generic):
        return value.tobytes()
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, GENERATORS):
        return fingerprint(generator_state(value))
    if isinstance(value, np.random.RandomState):
        return fingerprint(value.get_state(legacy=False))
    return None


def _of_tensor(tensor: torch.Tensor) -> Hashable:
    try:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        total = _checksum(data.numpy()) if data.device.type == "cpu" else int(data.sum())
    except (RuntimeError, NotImplementedError):  # sparse, quantized or without data
        total = tensor._version
    return (tuple(tensor.shape), str(tensor.dtype), total)


def _checksum(array: np.ndarray[Any, Any]) -> int:
    octets: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if len(octets) <= _LARGE_BYTES:
        return zlib.crc32(octets)
    whole = octets[: len(octets) // 8 * 8].view(np.uint64)
    ends = zlib.crc32(octets[-(_LARGE_BYTES // 4) :], zlib.crc32(octets[: _LARGE_BYTES // 4]))
    return hash((int(whole.sum(dtype=np.uint64)), zlib.crc32(octets[::4099].copy()), ends))


def _inside(value: Any) -> Sequence[Any]:
    """What a value is made of."""
    if isinstance(value, Mapping):
        parts = [*value.keys(), *value.values()] if len(value) <= _LONG else _of_large(value)
        return [*parts, *vars(value).values()] if hasattr(value, "__dict__") else parts
    if isinstance(value, set | frozenset):
        return [hash(value if isinstance(value, frozenset) else frozenset(value))]
    if isinstance(value, np.ndarray):
        return list(value.ravel())
    parts = list(value) if isinstance(value, list | tuple | deque) else []
    parts += vars(value).values() if hasattr(value, "__dict__") else []
    return [*parts, *(getattr(value, name, None) for name in slots_of(type(value)))]


def _of_large(value: Mapping[Any, Any]) -> Sequence[Any]:
    keys = list(value)
    return [len(keys), *keys[:_LONG], *keys[-_LONG:], *map(value.get, keys[-_LONG:])]


def slots_of(kind: type) -> list[str]:
    """The names of attributes that objects of a class keep outside of their ``__dict__``."""
    found: list[str] = []
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        found += [slots] if isinstance(slots, str) else slots
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def _sampled(items: Sequence[Any]) -> Sequence[Any]:
    if len(items) <= _LONG:
        return items
    step = len(items) // _LONG + 1
    return [*items[: _LONG // 2], *items[::step], *items[-_LONG // 2 :]]
