"""The values of ``run.kept``: any that can be made again of a checkpoint."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from optuna_hermes.errors import SuspendError, UnstorableError
from optuna_hermes.suspend._values._fingerprint import BUFFERS, outside
from optuna_hermes.suspend._values._generators import dict_of
from optuna_hermes.suspend._values._tree import each_once, frozen, sparse_parts

# Else imported inside of functions: a trial that keeps nothing needs none of it.
if TYPE_CHECKING:
    from optuna_hermes.suspend._values._classes import Classes
    from optuna_hermes.suspend._values._functions import FunctionName
    from optuna_hermes.suspend._values._owned import NamedTensors

_CONTAINERS = (list, tuple, dict)
SMALL_BYTES = 1 << 20
"""Most bytes that are copied of all values, or of an object's state, at each epoch's begin."""
_PLAIN_BYTES, _PART_BYTES, _ARRAY_BYTES = 8, 64, 256
"""Least sizes of a number in a plain value, of another part of a value, and of an array."""
_UNREADABLE = (SuspendError, TypeError, ValueError, RuntimeError, AttributeError)
_Tensors = Callable[[], dict[str, Any]]
"""The tensors of the named objects, which kept values may be, or be parts of."""


class KeptValues:
    """The values that a loop keeps by name, in a dictionary that is the same one at all times.

    Args:
        classes: the classes that kept objects may have; None for none.
    """

    def __init__(self, classes: Classes | None = None) -> None:
        self.values: dict[str, Any] = {}
        self._classes = classes
        self._foreign: set[str] | None = None
        self._readable: set[tuple[str | None, ...]] = set()
        self._given: dict[int, object] = {}

    def note_packages(self) -> None:
        """Note packages and functions of what is kept, right before the loop: these may be made.

        Classes of theirs that the user's code cannot name, such as an environment's of gymnasium,
        are not made of a checkpoint before: the objective makes such an object first.
        """
        self._foreign = set()
        if self._classes is not None:
            packages = {n: self._classes.others_in(each) for n, each in self.values.items()}
            functions = {n: _functions_in(each) for n, each in self.values.items()}
            self._foreign = {name for name in self.values if packages[name] or functions[name]}
            self._classes.packages.update(*packages.values())
            self._classes.functions.update(*functions.values())

    def state_dict(self, tensors: _Tensors) -> dict[str, Any]:
        """The state of all values.

        Raises:
            UnstorableError: a value could not be made again.
        """
        return {"kept": self._written(list(self.values), tensors), "kept_order": list(self.values)}

    def small_state(self) -> dict[str, Any]:
        """The state of those that are small together; those that are large are not even written."""
        small, left = [], SMALL_BYTES
        for name, value in self.values.items():
            size = size_of(value, left)
            if size <= left:
                small.append(name)
                left -= size
        written: dict[str, list[Any]] = {}
        with contextlib.suppress(UnstorableError):  # it is raised where the checkpoint is written
            # Weights in them are copied: those of the present epoch are not those of its begin.
            written = self._written(small, dict)
        return {"kept": written, "kept_order": list(self.values)}

    def load_state_dict(self, state: Mapping[str, Any], tensors: _Tensors) -> None:
        """Restore values; those without a state stay as they are if they were there.

        Raises:
            SuspendError: the state is not of these values and objects.
        """
        nodes, order = state["kept"], state["kept_order"]
        if not (nodes or self.values):
            return
        from optuna_hermes.suspend._values._custom import ValueReader
        from optuna_hermes.suspend._values._objects import UnknownClassError
        from optuna_hermes.suspend._values._owned import NamedTensors

        kept = {name: self.values[name] for name in order if name in self.values}
        reader = ValueReader(self._classes, self._given, NamedTensors(tensors))
        for name, (first, node) in nodes.items():
            try:
                kept[name] = reader.read(first, node, self.values.get(name))
            except UnknownClassError as error:
                if self._foreign is not None:  # else it is restored once the loop begins
                    raise SuspendError(
                        f"run.kept[{name!r}] is restored only where your code puts such an "
                        f"object there before the loop: {error}"
                    ) from error
        # In place: the objective may hold the dictionary.
        self.values.clear()
        self.values.update({name: kept[name] for name in order if name in kept})
        # A second call may fill these in place; other arrays may be parts of a model.
        self._given |= {id(each): each for each in reader.arrays}

    def _written(self, names: list[str], tensors: _Tensors) -> dict[str, list[Any]]:
        """The number of the first part of each value, and its tree, in the order to be read.

        They may be parts of these ``tensors`` of the named objects, which are written elsewhere.
        """
        if not names:
            return {}
        from optuna_hermes.suspend._values._custom import ValueWriter
        from optuna_hermes.suspend._values._owned import NamedTensors

        owned = NamedTensors(tensors)
        writer = ValueWriter(whole=True, owned=owned)
        nodes = {}
        # Those last that may be restored later: none is read before one that it refers to.
        for name in sorted(names, key=lambda name: name in (self._foreign or ())):
            with _named_in_errors(name):
                first = len(writer.objects)
                nodes[name] = [first, writer.write(f"run.kept[{name!r}]", self.values[name])]
        writer.refuse_overlaps()
        if not writer.unsure <= self._readable:
            self._check_readable(nodes, owned)
            self._readable |= writer.unsure  # only now: an error is caught at an epoch's begin
        return nodes

    def _check_readable(self, nodes: Mapping[str, list[Any]], owned: NamedTensors) -> None:
        """Read values once, so that one that cannot be restored fails while it is there."""
        from optuna_hermes.suspend._values._custom import ValueReader

        reader = ValueReader(self._classes, owned=owned)
        for name, (first, node) in nodes.items():
            with _named_in_errors(name):
                reader.read(first, frozen(node))


def _functions_in(value: object) -> set[FunctionName]:
    """Names of the functions of a value, which values that are read may have, too."""
    from optuna_hermes.suspend._values._functions import name_of, node_of

    # Without a ``ValueWriter``, which takes long for a large value, at each start of a process.
    nodes = (node_of(each) for each, _ in each_once(value, _inside_of_state))
    return {name for name in map(name_of, nodes) if name is not None}


def _inside_of_state(value: Any) -> Collection[Any]:
    """The parts of a value, with keys and attributes of dictionaries; none of code and the like."""
    if outside(value):
        return ()
    if issubclass(type(value), dict):
        return [*value, *value.values(), *dict_of(value).values()]
    return _items_or_attributes(value)


def can_keep(value: object) -> bool:
    """True for a value that can be stored if it is put into ``run.kept`` before the loop."""
    from optuna_hermes.suspend._values._custom import ValueWriter
    from optuna_hermes.suspend._values._functions import name_of

    try:
        node = ValueWriter(whole=True).write("", value)
    except Exception:  # also of a state_dict() of the user's: this only chooses words
        return False
    # A function that is in a variable in place of another one was not kept before the loop.
    return name_of(node) is None


@contextlib.contextmanager
def _named_in_errors(name: str) -> Iterator[None]:
    try:
        yield
    except _UNREADABLE as error:
        raise UnstorableError(
            f"run.kept[{name!r}] could not be made again: {error}. It must be made of numbers, "
            "text, arrays, tensors, random generators, containers, and objects whose attributes "
            "are such, of classes of your own or of a package of which it held objects before the "
            "loop. Make it anew in each epoch instead, from a seed, or give what holds it "
            "state_dict() and load_state_dict() and name it in suspendable()."
        ) from error


def size_of(value: object, most: int = SMALL_BYTES) -> int:
    """About the bytes of a value, or of that part of it which is more than ``most``."""
    number = _PLAIN_BYTES if type(value) in _CONTAINERS else _PART_BYTES
    size = _PART_BYTES
    for each, parts in each_once(value, _inside):
        size += _PART_BYTES + number * len(parts)
        if isinstance(each, torch.Tensor | np.ndarray):
            arrays = sparse_parts(each) if isinstance(each, torch.Tensor) else ()
            size += _ARRAY_BYTES + sum(array.nbytes for array in arrays or (each,))
        elif type(each) in BUFFERS and not each.closed:
            size += len(each.getvalue())
        if size > most:
            break
    return size


def _inside(value: Any) -> Collection[Any]:
    """The parts of a value that a tree of it would hold; those of a ``state_dict`` are unknown."""
    return () if hasattr(type(value), "state_dict") else _items_or_attributes(value)


def _items_or_attributes(value: Any) -> Collection[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset | deque):
        return value
    if isinstance(value, np.ndarray):
        return value.ravel().tolist() if value.dtype == object else ()
    return () if isinstance(value, torch.Tensor) else dict_of(value).values()
