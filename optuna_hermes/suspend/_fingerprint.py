"""Fingerprints of values, to detect changes between two moments.

The surroundings of a training are left out: loaders and data sets, loggers, progress bars, open
files; of code, only which it is. A small change within something large may be missed.
"""

from __future__ import annotations

import itertools
import marshal
import mmap
import random
import struct
import sys
import types
import zlib
from array import array
from collections import deque
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import PurePath
from typing import Any
from uuid import UUID

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from optuna_hermes.suspend._generators import GENERATORS, generator_state

CODE = (
    type,
    partial,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
)
DATA = (DataLoader, Dataset, Sampler)
SCALARS = (date, datetime, time, timedelta, timezone, Decimal, Fraction, UUID)
"""Classes of the standard library whose objects never change."""
_LOOKED_INTO = {
    *("argparse", "array", "builtins", "collections", "datetime", "decimal", "fractions"),
    *("itertools", "pathlib", "queue", "random", "statistics", "types", "uuid", "zoneinfo"),
}
"""Packages of the standard library whose objects are values; others are files, clocks, threads."""
_SHOWING = {
    *("accelerate", "aim", "clearml", "comet_ml", "lightning", "lightning_fabric"),
    *("lightning_utilities", "matplotlib", "mlflow", "neptune", "optuna", "optuna_hermes"),
    *("_pytest", "pytorch_lightning", "rich"),
    *("tensorboard", "tensorboardX", "tqdm", "wandb"),
}
"""Libraries that show or log, or that look after their own state."""
_OF_TORCH = ("torch.utils.data", "torch.utils.tensorboard", "torch.profiler", "torch.distributed")
_PLAIN = {bool, int, float, complex, str, bytes, type(None)}
_OF_PROCESS = (random._inst, np.random.mtrand._rand, torch.default_generator)
"""The global generators, which are saved with each training."""
# A fingerprint has to cost milliseconds for any value: these bound it.
_SHORT = 8
_LONG = 500
_SAMPLES = 32
_MOST_PARTS = 20_000
_CRC_BYTES = 1 << 16
_WHOLE_BYTES = 1 << 25
_PAGE_WORDS = 509
"""Step in words of eight bytes; odd, so that a table's columns are sampled in turn."""
_MOST_WORDS = 1 << 16
_unlike_all = itertools.count(1)


def outside(value: object) -> bool:
    """True if a value belongs to the surroundings of a training, not to its state."""
    if isinstance(value, (*CODE, *DATA)):
        return True
    module = type(value).__module__
    package = module.partition(".")[0]
    if package in sys.stdlib_module_names:
        return package.lstrip("_") not in _LOOKED_INTO
    return package in _SHOWING or module.startswith(_OF_TORCH)


def is_referred_to(value: object, known: Collection[int]) -> bool:
    """True if it counts which object a value is: it is data, or saved by itself as ``known``."""
    if isinstance(value, DATA):
        return True
    has_state = isinstance(value, torch.Tensor) or hasattr(type(value), "load_state_dict")
    return has_state and id(value) in known


def bound_to(code: object) -> object:
    """The object whose method code is, also if that is given to ``partial``; None for others."""
    method = code.func if isinstance(code, partial) else code
    if not isinstance(method, types.MethodType | types.BuiltinFunctionType):
        return None
    return None if isinstance(method.__self__, CODE) else method.__self__


def is_iterator(value: object) -> bool:
    """True if a value is an iterator, whose position can neither be read nor set."""
    if isinstance(value, types.GeneratorType):
        return "optuna_hermes" not in value.gi_code.co_filename
    kind = type(value)
    return hasattr(kind, "__next__") and (
        not outside(value) or kind.__module__.startswith("torch.utils.data")
    )


def fingerprint(value: object, known: Collection[int] = ()) -> int:
    """A hash of a value, which very likely differs once the value has changed.

    Args:
        known: ids of objects that are not looked into.
    """
    return hash(tuple(_Walk(known).parts(value)))


class _Walk:
    def __init__(self, known: Collection[int]) -> None:
        self._known = known
        self._seen: dict[int, object] = {}  # keeps objects alive, so that no id is reused
        self._left = _MOST_PARTS
        self._bytes = _WHOLE_BYTES

    def parts(self, root: object) -> Iterator[Hashable]:
        waiting = [root]
        while waiting and self._left > 0:
            self._left -= 1
            value = waiting.pop()
            yield type(value).__qualname__
            if is_referred_to(value, self._known):
                yield id(value)  # a list of a model's parameters changes if it has others
                continue
            leaf = self._of_leaf(value)
            if leaf is not None:
                yield leaf
            elif id(value) not in self._known and id(value) not in self._seen:
                self._seen[id(value)] = value
                if is_iterator(value):
                    yield ("unlike all", next(_unlike_all))
                elif isinstance(value, CODE):
                    yield _of_code(value)
                    waiting.append(bound_to(value))
                    if isinstance(value, partial):
                        # What else it is given may change, and is restored, by itself.
                        given = [value.func, *value.args, *value.keywords.values()]
                        yield (*value.keywords, *map(type, given))
                        waiting += [x for x in given if type(x) in _PLAIN or isinstance(x, CODE)]
                elif not outside(value):
                    for inside in _inside(value):
                        yield len(inside)
                        told, left = _at_once(inside)
                        yield told
                        waiting += left

    def _of_leaf(self, value: Any) -> Hashable:
        """Content of a value that leads to no others; None for one that does."""
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if isinstance(value, np.ndarray) and value.dtype.kind != "O":
            return (value.shape, value.dtype.str, self._checksum(value))
        return _of_small(value)

    def _of_tensor(self, tensor: torch.Tensor) -> Hashable:
        size = tensor.numel() * tensor.element_size()
        version = 0 if tensor.is_inference() else tensor._version
        # The version misses writes through a NumPy view: the checksum of words may show those.
        told = size > _CRC_BYTES and version
        try:
            data = tensor.detach()
            if size <= _CRC_BYTES or data.device.type == "cpu":
                octets = data.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                total = self._checksum(octets, words_only=bool(size > _CRC_BYTES))
            else:
                total = int(data.contiguous().reshape(-1).view(torch.uint8).sum())
        except (RuntimeError, NotImplementedError, TypeError):  # sparse, or without data
            told, total = version, 0
        return (tuple(tensor.shape), str(tensor.dtype), told, total)

    def _checksum(self, array: np.ndarray[Any, Any], *, words_only: bool = False) -> int:
        if _is_of_file(array):
            return 0
        octets: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if len(octets) <= _CRC_BYTES and len(octets) <= self._bytes:
            self._bytes -= len(octets)
            return zlib.crc32(octets)
        # Too large to be hashed whole: one word of each page.
        words = octets[: len(octets) // 8 * 8].view(np.uint64)
        step = max(_PAGE_WORDS, len(words) // _MOST_WORDS | 1)
        found = zlib.crc32(octets[-4096:], zlib.crc32(words[::step].copy()))
        if words_only or len(octets) > self._bytes:
            return found
        self._bytes -= len(octets)
        return hash((int(words.sum(dtype=np.uint64)), found))


def _is_of_file(array: np.ndarray[Any, Any]) -> bool:
    """True for an array over a memory-mapped file: its content is no state of the training."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, mmap.mmap)


def _of_small(value: Any) -> Hashable:
    kind = type(value)
    if kind is float:
        return struct.pack("d", value)  # a NaN does not equal itself
    if value is None or kind in _PLAIN:
        return (value, kind is int and value < -1)  # -1 and -2 have the same hash
    if isinstance(value, np.generic):
        return value.tobytes()
    if isinstance(value, bytearray | array):
        return bytes(value)
    if isinstance(value, PurePath):
        return str(value)
    if kind in SCALARS:
        return repr(value)
    if isinstance(value, GENERATORS):
        own = not any(value is each for each in _OF_PROCESS)
        return fingerprint(generator_state(value)) if own else 0
    return None


def _of_code(value: Any) -> Hashable:
    """Identity of code: of a function the same each time that its ``def`` is executed."""
    if isinstance(value, types.ModuleType):  # others' attributes may be made on demand
        return value.__name__
    if isinstance(value, types.MethodType):
        value = value.__func__
    if isinstance(value, types.FunctionType):
        return id(value.__code__)
    return (getattr(value, "__module__", None), getattr(value, "__qualname__", None))


def _inside(value: Any) -> Iterator[Sequence[Any]]:
    """Yield the parts of a value, as sequences."""
    if isinstance(value, Mapping):
        yield list(value.keys())
        if isinstance(value, dict):
            yield list(value.values())
        else:  # reading a value of another mapping may be slow
            yield [value[key] for key in _sampled(list(value))]
    elif isinstance(value, set | frozenset):
        yield [hash(value if isinstance(value, frozenset) else frozenset(value))]
    elif isinstance(value, list | tuple | deque):
        yield list(value)
    elif isinstance(value, np.ndarray):
        yield value.ravel().tolist()
    if hasattr(value, "__dict__"):
        yield list(vars(value).values())
    slots = slots_of(type(value))
    if slots:
        yield [getattr(value, name, None) for name in slots]


def _at_once(items: Sequence[Any]) -> tuple[Hashable, Sequence[Any]]:
    """Return a hash of many items without looking into each, and the items to be looked into."""
    if len(items) <= _SHORT:
        return None, items
    kinds = set(map(type, items)) if type(items[0]) in _PLAIN else set()
    if kinds and kinds <= _PLAIN:
        if len(items) <= _LONG:
            return zlib.crc32(marshal.dumps(list(items), 2)), ()  # 2: without reference flags
        return hash((tuple(items), frozenset(kinds))), ()
    if len(items) <= _LONG:
        return None, items
    # Of others the identities count, and the content of a sample of them.
    return hash(tuple(map(id, items))), _sampled(items)


def slots_of(kind: type) -> list[str]:
    """Names of the attributes that objects of a class keep outside of their ``__dict__``."""
    found: list[str] = []
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        found += [slots] if isinstance(slots, str) else slots
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def _sampled(items: Sequence[Any]) -> Sequence[Any]:
    step = len(items) // _SAMPLES + 1
    return [*items[:_SAMPLES], *items[::step], *items[-_SAMPLES:]]
