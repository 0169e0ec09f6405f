"""Serialisation of plain Python objects to trees of plain values, without pickle.

No code from a checkpoint runs: the classes that it names are only looked up in imported modules of
the packages of the root object's class and its bases.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Collection
from typing import Any

import numpy as np

from optuna_hermes.errors import CheckpointError, SuspendError

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_NUMBERS = "biufc"  # NumPy's kinds
_CODE = (type, types.FunctionType, types.BuiltinFunctionType, np.ufunc)
_GLOBAL: Any = np.random.mtrand._rand
_OF_PYTHON = {"builtins", "abc", "typing"}
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE in ``__flags__``: a class that Python code defines


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
        self._packages = {_package(kind) for kind in type(root).__mro__} - _OF_PYTHON

    def state_dict(self) -> dict[str, Any]:
        """The state as a tree of arrays and plain values.

        Raises:
            CheckpointError: it leads to something that cannot be restored.
        """
        writer = _Writer(self._packages)
        tree = {"object": writer.node(self.root, (self._name,))}
        writer.refuse_overlaps()
        return tree

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the attributes."""
        _Reader(self._packages).node(state["object"], self.root)


class _Writer:
    def __init__(self, packages: Collection[str]) -> None:
        self._packages = packages
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # keeps objects alive, so that no id is reused
        self._regions: dict[tuple[int, int, str], tuple[int, str]] = {}

    def node(self, value: Any, place: tuple[str, ...]) -> list[Any]:
        kind = type(value)
        if kind in _PLAIN or (isinstance(value, np.generic) and value.dtype.kind in _NUMBERS):
            return ["plain", value]
        if isinstance(value, _CODE):
            return ["present"]  # it stays as the objective has made it
        if id(value) in self._seen:
            return ["same", self._seen[id(value)]]
        if kind in (list, tuple, set, frozenset):
            items = [self.node(item, (*place, str(n))) for n, item in enumerate(value)]
            return [kind.__name__, items]
        if kind is dict:
            pairs = [
                [self.node(key, place), self.node(item, (*place, str(key)))]
                for key, item in value.items()
            ]
            return ["dict", pairs]
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        return self._object(value, place)

    def _object(self, value: Any, place: tuple[str, ...]) -> list[Any]:
        kind = type(value)
        if kind is np.ndarray and value.dtype.kind != "V":  # which has fields
            if value.dtype.kind in _NUMBERS:
                return self._array(value, ".".join(place))
            items = [self.node(item, place) for item in value.ravel().tolist()]
            return ["array of", value.dtype.str, list(value.shape), items]
        if isinstance(value, np.random.RandomState):
            if value is _GLOBAL:
                return ["global"]
            return ["generator", "RandomState", self.node(value.get_state(legacy=False), place)]
        if kind is np.random.Generator:
            bits = value.bit_generator
            return ["generator", type(bits).__name__, self.node(bits.state, place)]
        if _package(kind) in self._packages:
            name = [kind.__module__, kind.__qualname__]
            if hasattr(value, "__dict__"):
                parts = [[n, self.node(v, (*place, n))] for n, v in vars(value).items()]
                return ["object", *name, parts]
            # Extension types (Cython) without attributes: their constructors only take numbers.
            # Those of classes of Python are code, which no checkpoint may call.
            made = value.__reduce__()
            if made[0] is kind and len(made) == 2 and not kind.__flags__ & _HEAP_TYPE:
                return ["made", *name, self.node(made[1], place)]
        raise CheckpointError(
            f"{'.'.join(place)} must be an array, a plain value or an object with attributes of "
            f"{' or '.join(sorted(self._packages))}, to be stored, but is a {kind.__module__}."
            f"{kind.__qualname__}: leave it out, or use another one."
        )

    def _array(self, value: np.ndarray[Any, Any], name: str) -> list[Any]:
        begin, end = _bounds(value)
        region = (begin, end, value.dtype.str)
        order = "C" if value.flags.c_contiguous else "F"
        whole = value.flags.forc and value.nbytes == end - begin
        # The same numbers in another shape: the two must share their memory again.
        if whole and region in self._regions:
            return ["reshaped", self._regions[region][0], order, *value.shape]
        if value.size:
            self._regions[region] = self._seen[id(value)], name
        return ["array", order, value]

    def refuse_overlaps(self) -> None:
        """Refuse arrays that overlap in memory: they would be separate once restored."""
        before, last = 0, ""
        for (begin, end, _), (_, name) in sorted(self._regions.items()):
            if begin < before:
                raise CheckpointError(
                    f"{name} must have memory of its own, to be stored, but shares it with {last}: "
                    "use another estimator."
                )
            if end > before:
                before, last = end, name


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
            return self._seen[rest[0]]
        if kind == "present":
            return present
        if kind in ("list", "tuple", "set", "frozenset"):
            items = [self.node(item) for item in rest[0]]
            return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](items)
        if kind == "dict":
            return {self.node(key): self.node(item) for key, item in rest[0]}
        # Numbered before its parts are read, as the writer does: they may refer to it.
        number = len(self._seen)
        self._seen.append(None)
        if kind == "object":
            return self._with_attributes(rest, present, number)
        value = self._seen[number] = self._without(kind, rest, present)
        return value

    def _without(self, kind: str, rest: list[Any], present: Any) -> Any:
        if kind == "array":
            return np.array(rest[1], order=rest[0])
        if kind == "reshaped":
            return self._seen[rest[0]].reshape(rest[2:], order=rest[1])
        if kind == "array of":
            dtype, shape, items = rest
            values = np.empty(len(items), dtype)
            for index, item in enumerate(items):  # not at once: NumPy would look into tuples
                values[index] = self.node(item)
            return values.reshape(shape)
        if kind == "global":
            return _GLOBAL
        if kind == "generator":
            return _generator(rest[0], self.node(rest[1]), present)
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
        if not isinstance(found, type) or _package(found) not in self._packages:
            raise SuspendError(f"it holds a {module}.{name}, and not only classes of this package")
        if (found.__module__, found.__qualname__) != (module, name):
            raise SuspendError(f"it holds a {module}.{name}, which is another class now")
        return found


def _bounds(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    """Addresses of the first byte of an array's memory, and of the byte after its last."""
    begin = end = array.__array_interface__["data"][0]
    for count, stride in zip(array.shape, array.strides, strict=True):
        begin += min(0, stride * (count - 1))
        end += max(0, stride * (count - 1))
    return begin, end + array.itemsize


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _generator(name: str, state: Any, present: Any) -> Any:
    """Return a generator with this state: ``present``, if it is of the same kind."""
    if name == "RandomState":
        own = isinstance(present, np.random.RandomState) and present is not _GLOBAL
        old = present if own else np.random.RandomState()
        old.set_state(state)
        return old
    bits = getattr(np.random, name)
    if not (isinstance(bits, type) and issubclass(bits, np.random.BitGenerator)):
        raise SuspendError(f"it holds a {name}, which is no generator of NumPy")
    same = type(present) is np.random.Generator and type(present.bit_generator) is bits
    generator = present if same else np.random.Generator(bits())
    generator.bit_generator.state = state
    return generator
