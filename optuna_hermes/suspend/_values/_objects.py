"""Serialisation of plain Python objects to trees of plain values, without pickle.

No code from a checkpoint runs: the classes that it names are only looked up in imported modules of
the packages of the root object's class and its bases.
"""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from optuna_hermes.errors import SuspendError, UnstorableError
from optuna_hermes.suspend._values._generators import (
    GENERATORS,
    GLOBALS,
    generator_state,
    kind_of,
    restored,
)
from optuna_hermes.suspend._values._tree import NUMBERS

_NUMBERS = "biufc"  # NumPy's kinds
_CODE = (type, types.FunctionType, types.BuiltinFunctionType, np.ufunc)
OF_PYTHON = {"builtins", "abc", "typing"}
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE in ``__flags__``: a class that Python code defines
_CONTAINERS: dict[str, Any] = {kind.__name__: kind for kind in (list, set, dict)}
_MOST_WORK = 10_000
"""Most steps to find out whether two regions overlap, which is a hard problem in theory."""
_UNREAD = object()

RegionKey = tuple[int, int, str]
"""Addresses of the first byte of a region and of the byte after its last one, and its dtype."""


class UnknownClassError(SuspendError):
    """An object's class is not among those that may be made."""


class Objects:
    """An object, and all that it leads to, with ``state_dict`` and ``load_state_dict``.

    Args:
        name: the object's name in messages.
        root: its attributes are replaced by ``load_state_dict``; its identity stays.
    """

    def __init__(self, name: str, root: Any) -> None:
        self._name = name
        self.root = root
        """The object itself."""
        self._packages = {package_of(kind) for kind in type(root).__mro__} - OF_PYTHON

    def state_dict(self) -> dict[str, Any]:
        """The state as a tree of arrays and plain values.

        Raises:
            UnstorableError: it leads to something that cannot be restored.
        """
        writer = _Writer(self._packages)
        tree = {"object": writer.node(self.root, (self._name,))}
        writer.refuse_overlaps()
        return tree

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the attributes."""
        _Reader(self._packages).node(state["object"], self.root)


@dataclass(frozen=True, kw_only=True)
class Region:
    """The memory of an array or tensor.

    Args:
        address: of its first element.
        strides: in bytes.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str

    @property
    def bounds(self) -> tuple[int, int]:
        """Addresses of the first byte, and of the byte after the last one."""
        steps = [stride * (n - 1) for n, stride in zip(self.shape, self.strides, strict=True)]
        begin = self.address + sum(step for step in steps if step < 0)
        return begin, self.address + self.itemsize + sum(step for step in steps if step > 0)

    @property
    def key(self) -> RegionKey:
        return (*self.bounds, self.dtype)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """An array for ``np.shares_memory``, which reads no memory: it may be a device's."""
        return {
            "version": 3,
            "data": (self.address, True),
            "shape": self.shape,
            "strides": self.strides,
            "typestr": f"|V{self.itemsize}",
        }

    def overlaps(self, other: Region) -> bool:
        """True if the two have bytes in common; columns of one table have none."""
        most_work: Any = _MOST_WORK  # NumPy's types know -1 and 0 only
        try:
            return np.shares_memory(np.asarray(self), np.asarray(other), most_work)
        except RuntimeError:  # it would take too long
            return True


class _Writer:
    def __init__(self, packages: Collection[str]) -> None:
        self._packages = packages
        self._seen: dict[int, int] = {}
        self.objects: list[Any] = []  # all that are numbered; kept alive, so that no id is reused
        self._regions: dict[RegionKey, tuple[int, str, Any]] = {}

    def node(self, value: Any, place: tuple[str, ...]) -> list[Any]:
        kind = type(value)
        if kind in NUMBERS or (isinstance(value, np.generic) and value.dtype.kind in _NUMBERS):
            return ["plain", value]
        if isinstance(value, _CODE):
            return ["present"]  # it stays as the objective has made it
        if id(value) in self._seen:
            return ["same", self._seen[id(value)]]
        if kind in (tuple, frozenset):
            return [kind.__name__, self._items(value, place)]
        self._number(value)
        if kind in (list, set):
            return [kind.__name__, self._items(value, place)]
        if kind is dict:
            return ["dict", self._pairs(value, place)]
        return self._object(value, place)

    def _number(self, value: Any) -> int:
        """Number a value: there may be other references to it, also within it."""
        number = self._seen[id(value)] = len(self._seen)
        self.objects.append(value)
        return number

    def _items(
        self, items: Iterable[Any], place: tuple[str, ...], names: Iterable[Any] | None = None
    ) -> list[Any]:
        named = zip(itertools.count() if names is None else names, items, strict=False)
        return [self.node(item, (*place, str(name))) for name, item in named]

    def _pairs(self, value: Mapping[Any, Any], place: tuple[str, ...]) -> list[Any]:
        """The keys of a mapping, and its items."""
        return [self._items(value, place), self._items(value.values(), place, value)]

    def _object(self, value: Any, place: tuple[str, ...]) -> list[Any]:
        kind = type(value)
        if kind is np.ndarray and value.dtype.kind != "V":  # which has fields
            if value.dtype.kind in _NUMBERS:
                order = "C" if value.flags.c_contiguous else "F"
                number = self._shared(value, ".".join(place)) if value.size else None
                if number is not None:
                    return ["reshaped", number, order, *value.shape]
                return ["array", order, value]
            items = [self.node(item, place) for item in value.ravel().tolist()]
            return ["array of", value.dtype.str, list(value.shape), items]
        if kind in GENERATORS or isinstance(value, np.random.RandomState):
            which = kind_of(value)
            if GLOBALS.get(which) is value:
                return ["global", which]
            return ["drawing", which, generator_state(value)]
        if package_of(kind) in self._packages:
            name = [kind.__module__, kind.__qualname__]
            if hasattr(value, "__dict__"):
                parts = [[n, self.node(v, (*place, n))] for n, v in vars(value).items()]
                return ["object", *name, parts]
            # Extension types (Cython) without attributes: their constructors only take numbers.
            # Those of classes of Python are code, which no checkpoint may call.
            made = value.__reduce__()
            if made[0] is kind and len(made) == 2 and not kind.__flags__ & _HEAP_TYPE:
                return ["made", *name, self.node(made[1], place)]
        raise UnstorableError(
            f"{'.'.join(place)} must be an array, a plain value or an object with attributes of "
            f"{' or '.join(sorted(self._packages))}, to be stored, but is a {kind.__module__}."
            f"{kind.__qualname__}: leave it out, or use another one."
        )

    def _shared(self, value: Any, name: str) -> int | None:
        """Number of what has the same numbers in another shape; None if nothing has."""
        own = self._seen[id(value)], name, value
        number, other, before = self._regions.setdefault(key_of(value), own)
        if before is value:
            return None
        if not (_is_whole(value) and _is_whole(before)):
            raise overlap(name, other)
        return number

    def refuse_overlaps(self) -> None:
        """Refuse arrays that overlap in memory: they would be separate once restored."""
        open_: list[tuple[int, str, Any]] = []
        for (begin, end, _), (_, name, value) in sorted(
            self._regions.items(), key=lambda each: each[0]
        ):
            open_ = [each for each in open_ if each[0] > begin]
            for _, other, before in open_:
                if region_of(value).overlaps(region_of(before)):
                    raise overlap(name, other)
            open_.append((end, name, value))


class _Reader:
    def __init__(self, packages: Collection[str]) -> None:
        self._packages = packages
        self._seen: list[Any] = []

    def node(self, node: list[Any], present: Any = None) -> Any:
        """Return the value of a node; ``present``, the value there now, is reused if possible."""
        kind, *rest = node
        if kind == "plain":
            return rest[0]
        if kind == "same":
            if self._seen[rest[0]] is _UNREAD:
                raise SuspendError("it holds something that holds itself")
            return self._seen[rest[0]]
        if kind == "present":
            if present is None:  # in place of a function, a file or another part of the training
                raise SuspendError("it holds something that no checkpoint does, and none is there")
            return present
        if kind in ("tuple", "frozenset"):
            return {"tuple": tuple, "frozenset": frozenset}[kind](self._items(rest[0], present))
        if kind in _CONTAINERS:
            return self._container(_CONTAINERS[kind], rest[0], present)
        # Numbered before its parts are read, as the writer does: they may refer to it.
        number = len(self._seen)
        self._seen.append(_UNREAD)
        if kind == "object":
            return self._with_attributes(rest, present, number)
        value = self._seen[number] = self._without(kind, rest, present)
        return value

    def _container(self, kind: Any, nodes: list[Any], present: Any) -> Any:
        value = self._reused(kind, present)
        self._seen.append(value)
        read = self._pairs(nodes, present) if kind is dict else self._items(nodes, present)
        value.clear()  # only now: its former items are used for the new ones
        (value.extend if kind is list else value.update)(read)
        return value

    def _reused(self, kind: Any, present: Any) -> Any:
        """The container to be filled: a new one, or ``present``."""
        return kind()

    def _items(self, nodes: list[Any], present: Any) -> list[Any]:
        return [self.node(node) for node in nodes]

    def _pairs(self, pairs: list[Any], present: Any) -> dict[Any, Any]:
        there = present if isinstance(present, Mapping) else {}
        keys = self._items(pairs[0], None)
        items = self._items(pairs[1], [there.get(key) for key in keys])
        return dict(zip(keys, items, strict=True))

    def _without(self, kind: str, rest: list[Any], present: Any) -> Any:
        if kind == "array":
            return np.array(rest[1], order=rest[0])
        if kind == "reshaped":  # in the order of memory
            return self._seen[rest[0]].ravel("K").reshape(rest[2:], order=rest[1])
        if kind == "array of":
            dtype, shape, items = rest
            values = np.empty(len(items), dtype)
            for index, item in enumerate(items):  # not at once: NumPy would look into tuples
                values[index] = self.node(item)
            return values.reshape(shape)
        if kind == "global":
            return GLOBALS[rest[0]]
        if kind == "drawing":
            return restored(present, *rest)
        if kind == "made":
            made = self._class(*rest[:2])
            if made.__flags__ & _HEAP_TYPE:
                raise SuspendError(f"it would call {made.__module__}.{made.__qualname__}")
            return made(*self.node(rest[2]))
        raise SuspendError(f"it holds a {kind!r}, which this version does not know")

    def _with_attributes(self, rest: list[Any], present: Any, number: int) -> Any:
        module, name, parts = rest
        value = self._seen[number] = self._instance(module, name, present)
        before = vars(value)
        read = {attribute: self.node(node, before.get(attribute)) for attribute, node in parts}
        before.clear()  # only now: what cannot be read leaves the object as it is
        before.update(read)
        return value

    def _instance(self, module: str, name: str, present: Any) -> Any:
        """Return ``present``, if it is of this class, or a new object without a constructor."""
        made = self._class(module, name)
        return present if type(present) is made else object.__new__(made)

    def _class(self, module: str, name: str) -> type:
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if not isinstance(found, type) or package_of(found) not in self._packages:
            raise UnknownClassError(
                f"it holds a {module}.{name}, and not only classes of this package"
            )
        if (found.__module__, found.__qualname__) != (module, name):
            raise SuspendError(f"it holds a {module}.{name}, which is another class now")
        return found


def key_of(value: Any) -> RegionKey:
    """The key of the region of an array or tensor, which is found at once if it has no gaps."""
    is_array = isinstance(value, np.ndarray)
    if not (value.flags.forc if is_array else value.is_contiguous()):
        return region_of(value).key
    begin = value.__array_interface__["data"][0] if is_array else value.data_ptr()
    return begin, begin + value.nbytes, value.dtype.str if is_array else str(value.dtype)


def region_of(value: Any) -> Region:
    """The region of an array or tensor, of which mostly the key is enough."""
    if isinstance(value, np.ndarray):
        address, strides = value.__array_interface__["data"][0], value.strides
        dtype = value.dtype.str
    else:
        address, strides = value.data_ptr(), tuple(n * value.itemsize for n in value.stride())
        dtype = str(value.dtype)
    shape, itemsize = tuple(value.shape), value.itemsize
    return Region(address=address, shape=shape, strides=strides, itemsize=itemsize, dtype=dtype)


def _is_whole(value: Any) -> bool:
    """True for an array or tensor in the order of C or Fortran, without gaps."""
    flags = np.asarray(region_of(value)).flags
    return flags.c_contiguous or flags.f_contiguous


def overlap(name: str, other: str) -> UnstorableError:
    return UnstorableError(
        f"{name} must have memory of its own, to be stored, but shares it with {other}: "
        "make it a copy, or use another object."
    )


def package_of(kind: type) -> str:
    return kind.__module__.partition(".")[0]
