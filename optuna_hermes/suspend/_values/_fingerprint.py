"""Fingerprints of values, to detect changes between two moments.

The surroundings of a training are left out: loaders and data sets, loggers, progress bars, open
files; of code, only which it is. A small change within something large may be missed.

The class of a value is asked by ``type``: ``isinstance`` believes a proxy, which may raise.
"""

from __future__ import annotations

import ctypes
import io
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
from functools import cached_property, partial
from multiprocessing.connection import Connection
from pathlib import PurePath
from subprocess import Popen
from typing import Any
from uuid import UUID
from weakref import ref

import numpy as np
import torch
from torch.distributions.utils import lazy_property
from torch.utils.data import DataLoader, Dataset, Sampler

from optuna_hermes.suspend._values._generators import GENERATORS, dict_of, generator_state, slots_in

CODE = (
    type,
    partial,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
)
DATA = (DataLoader, Dataset, Sampler)
BUFFERS = (io.BytesIO, io.StringIO)
"""Classes of files in main memory, whose content is a value like others."""
SCALARS = (date, datetime, time, timedelta, timezone, Decimal, Fraction, UUID)
"""Classes of the standard library whose objects never change."""
_LOOKED_INTO = {
    *("argparse", "array", "builtins", "collections", "datetime", "decimal", "fractions"),
    *("itertools", "pathlib", "queue", "random", "statistics", "types", "uuid", "zoneinfo"),
}
"""Packages of the standard library whose objects are values; others are files, clocks, threads."""
_SHOWING = {
    *("accelerate", "aim", "clearml", "comet_ml", "dvclive", "lightning", "lightning_fabric"),
    *("lightning_utilities", "matplotlib", "mlflow", "neptune", "optuna", "optuna_hermes"),
    *("_pytest", "pytorch_lightning", "rich", "sacred", "swanlab"),
    *("tensorboard", "tensorboardX", "tqdm", "trackio", "wandb"),
}
"""Libraries that show or log, or that look after their own state."""
_TABLES = {"pandas", "polars", "pyarrow"}
"""Libraries of tables, whose content shows in how it is copied and in no attribute."""
_OF_TORCH = ("torch.utils.data", "torch.utils.tensorboard", "torch.profiler", "torch.distributed")
_PLAIN = {bool, int, float, complex, str, bytes, type(None)}
_MODES = (
    *(torch.autocast, torch.inference_mode),
    *(torch.no_grad, torch.enable_grad, torch.set_grad_enabled),
)
_UNTIL_EXIT = ("prev", "_inference_mode_context")
"""Begins of the names of attributes in which these keep what they set back at their exit."""
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
_numbers = itertools.count(1)
_identities: dict[int, tuple[ref[Any], int]] = {}


def outside(value: object) -> bool:
    """True if a value belongs to the surroundings of a training, not to its state."""
    if issubclass(type(value), (*CODE, *DATA)):
        return True
    if type(value) in BUFFERS:
        return False
    module = type(value).__module__
    package = module.partition(".")[0]
    if package in sys.stdlib_module_names:
        return package.lstrip("_") not in _LOOKED_INTO
    return package in _SHOWING or module.startswith(_OF_TORCH)


def is_referred_to(value: object, known: Collection[int]) -> bool:
    """True if it counts which object a value is: it is data, or saved by itself as ``known``."""
    if issubclass(type(value), DATA):
        return True
    has_state = issubclass(type(value), torch.Tensor) or hasattr(type(value), "load_state_dict")
    return has_state and id(value) in known


def identity_of(value: object) -> int:
    """A number that no other object gets, as it may the ``id`` of one that is gone by then."""
    if not type(value).__weakrefoffset__:
        return id(value)
    known, number = _identities.get(id(value), (None, 0))
    if known is None or known() is not value:
        number = next(_numbers)
        _identities[id(value)] = ref(value), number
    return number


def bound_to(code: Any) -> object:
    """The object whose method code is, also if that is given to ``partial``; None for others."""
    method = code.func if issubclass(type(code), partial) else code
    if type(method) not in (types.MethodType, types.BuiltinFunctionType):
        return None
    return None if issubclass(type(method.__self__), CODE) else method.__self__


def is_iterator(value: Any) -> bool:
    """True if a value is an iterator, whose position can neither be read nor set."""
    kind = type(value)
    if kind is types.GeneratorType:
        return "optuna_hermes" not in value.gi_code.co_filename
    return (
        hasattr(kind, "__next__")
        and kind not in BUFFERS
        and (not outside(value) or kind.__module__.startswith("torch.utils.data"))
    )


def fingerprint(value: object, known: Collection[int] = (), *, with_processes: bool = False) -> int:
    """A hash of a value, which very likely differs once the value has changed.

    That of a value which cannot be looked at is unlike all.

    Args:
        known: ids of objects that are not looked into.
        with_processes: also take what has a pipe to a process, such as an environment, for changed.
    """
    try:
        return hash(tuple(_Walk(known, with_processes=with_processes).parts(value)))
    except Exception:  # code of a user's class: looking must not end the training
        return hash(_unlike_all())


class _Walk:
    def __init__(self, known: Collection[int], *, with_processes: bool) -> None:
        self._known = known
        self._with_processes = with_processes
        self._seen: dict[int, object] = {}  # keeps objects alive, so that no id is reused
        self._left = _MOST_PARTS
        self._bytes = _WHOLE_BYTES

    def parts(self, root: Any) -> Iterator[Hashable]:
        waiting: list[Any] = [root]
        while waiting and self._left > 0:
            self._left -= 1
            value = waiting.pop()
            yield type(value).__qualname__
            if is_referred_to(value, self._known):
                yield identity_of(value)  # a list of a model's parameters changes if it has others
                continue
            leaf = self._of_leaf(value)
            if leaf is not None:
                yield leaf
            elif id(value) not in self._known and id(value) not in self._seen:
                self._seen[id(value)] = value
                if is_iterator(value) or (self._with_processes and _is_pipe(value)):
                    yield _unlike_all()
                elif issubclass(type(value), CODE):
                    yield _of_code(value)
                    waiting.append(bound_to(value))
                    if issubclass(type(value), partial):
                        # What else it is given may change, and is restored, by itself.
                        given = [value.func, *value.args, *value.keywords.values()]
                        yield (*value.keywords, *map(type, given))
                        looked_at = (*_PLAIN, *CODE)
                        waiting += [each for each in given if issubclass(type(each), looked_at)]
                elif not outside(value):
                    for inside in _inside(value):
                        yield len(inside)
                        told, left = _at_once(inside)
                        yield told
                        waiting += left

    def _of_leaf(self, value: Any) -> Hashable:
        """Content of a value that leads to no others; None for one that does."""
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            return self._of_tensor(value)
        if kind in (np.ndarray, np.memmap) and not value.dtype.hasobject:
            return (value.shape, value.dtype.str, self._checksum(value))
        if kind in BUFFERS:
            return self._of_buffer(value)
        return _of_small(value)

    def _of_buffer(self, buffer: Any) -> Hashable:
        """Content of a file in memory; to read in it is no change."""
        content = "" if buffer.closed else buffer.getvalue()
        if isinstance(content, str):
            return content
        return (len(content), self._checksum(np.frombuffer(content, np.uint8)))

    def _of_tensor(self, tensor: torch.Tensor) -> Hashable:
        version = 0
        try:
            version = 0 if tensor.is_inference() else tensor._version
            size = tensor.numel() * tensor.element_size()
            # The version misses writes through a NumPy view: the checksum of words may show those.
            told = size > _CRC_BYTES and version
            data = tensor.detach()
            if size <= _CRC_BYTES or data.device.type == "cpu":
                data = data.cpu().contiguous().reshape(-1).view(torch.uint8)
                total = self._checksum(_octets(data), words_only=bool(size > _CRC_BYTES))
            else:
                total = int(data.contiguous().reshape(-1).view(torch.uint8).sum())
            return (tuple(tensor.shape), str(tensor.dtype), told, total)
        except Exception:  # sparse, nested, or without data: of such it counts which it is
            return (id(tensor), version)

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


def _octets(data: torch.Tensor) -> np.ndarray[Any, Any]:
    """The bytes in a tensor of bytes, which must outlive them."""
    # Not data.numpy(): torch cannot resize a storage that was shared with an array, as observers
    # of quantisation do with their buffers.
    if not data.numel():
        return np.empty(0, np.uint8)
    address, last = data.data_ptr(), data.storage_offset() + data.numel()
    # Of a class whose values are elsewhere, or a view of a storage that was freed, as FSDP does.
    if not address or last > data.untyped_storage().nbytes():
        raise ValueError(f"{type(data).__name__} has no memory")
    octets = (ctypes.c_char * data.numel()).from_address(address)
    return np.frombuffer(memoryview(octets).cast("B"), np.uint8)


def _is_pipe(value: Any) -> bool:
    """True for an open pipe to a process, whose state nobody sees."""
    if issubclass(type(value), Connection):
        return not value.closed
    if issubclass(type(value), Popen):
        # One that nobody writes to works by itself, as a server of logs does.
        return value.stdin is not None and value.returncode is None
    return False


def _unlike_all() -> Hashable:
    return ("unlike all", next(_numbers))


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
    if issubclass(kind, np.generic):
        return bytes(value.tobytes())
    if issubclass(kind, bytearray | array):
        return bytes(value)
    if issubclass(kind, PurePath):
        return str(value)
    if kind in SCALARS:
        return repr(value)
    if issubclass(kind, GENERATORS):
        own = not any(value is each for each in _OF_PROCESS)
        return fingerprint(generator_state(value)) if own else 0
    return None


def _of_code(value: Any) -> Hashable:
    """Identity of code: of a function the same each time that its ``def`` is executed."""
    if issubclass(type(value), types.ModuleType):  # others' attributes may be made on demand
        return str(value.__name__)
    if type(value) is types.MethodType:
        value = value.__func__
    if type(value) is types.FunctionType:
        return id(value.__code__)
    return (getattr(value, "__module__", None), getattr(value, "__qualname__", None))


def _inside(value: Any) -> Iterator[Sequence[Any]]:
    """Yield the parts of a value, as sequences."""
    kind = type(value)
    if kind.__module__.partition(".")[0] in _TABLES:
        yield value.__reduce_ex__(2)
        return
    if issubclass(kind, Mapping):
        yield list(value.keys())
        if issubclass(kind, dict):
            yield list(value.values())
        else:  # reading a value of another mapping may be slow
            yield [value[key] for key in _sampled(list(value))]
    elif issubclass(kind, set | frozenset):
        yield [hash(frozenset(value))]
    elif issubclass(kind, list | tuple | deque):
        yield list(value)
    elif issubclass(kind, np.ndarray):
        yield value.shape
        yield _inside_of_array(value)
    own = dict_of(value)
    if kind.__module__.startswith("torch._dynamo"):  # beside the compiled module there are caches
        yield [own.get("_modules")]
    # By name, as nobody may have imported its module.
    elif not (kind.__module__.startswith("numpy.ma") and kind.__qualname__ == "MaskedArray"):
        yield [each for name, each in own.items() if not _is_no_state(kind, name, each)]
    if slots := slots_in(value):
        yield list(slots.values())


def _inside_of_array(value: np.ndarray[Any, Any]) -> Sequence[Any]:
    """Parts of an array of objects, of text, with fields, with a mask or of a user's class."""
    if type(value) is not np.ndarray:
        return [np.asarray(value), np.ma.getmask(value)]
    if value.dtype.names:
        return [value[name] for name in value.dtype.names]
    step = 1 if value.dtype.kind == "O" else value.size // _MOST_PARTS + 1  # text is made anew
    items: list[Any] = value.ravel()[::step].tolist()
    return items


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


def _is_no_state(kind: type, name: str, value: object) -> bool:
    """True for an attribute that any process makes again.

    A property's value that was kept at its first use and never changes, or what a ``with``
    statement has left in a mode of torch's.
    """
    if issubclass(kind, _MODES) and name.startswith(_UNTIL_EXIT):
        return True
    made = next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)
    fixed = type(value) in (*_PLAIN, *SCALARS) or issubclass(type(value), CODE)
    return type(made) is lazy_property or (type(made) is cached_property and fixed)


def _sampled(items: Sequence[Any]) -> Sequence[Any]:
    step = len(items) // _SAMPLES + 1
    return [*items[:_SAMPLES], *items[::step], *items[-_SAMPLES:]]
