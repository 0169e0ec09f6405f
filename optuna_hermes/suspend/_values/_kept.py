"""The values of ``run.kept``: any that can be made again of a checkpoint."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from optuna_hermes.errors import SuspendError, UnstorableError
from optuna_hermes.suspend._state import moved, on_device
from optuna_hermes.suspend._values._fingerprint import BUFFERS, CODE, outside
from optuna_hermes.suspend._values._generators import dict_of
from optuna_hermes.suspend._values._tree import (
    NUMBERS,
    each_once,
    frozen,
    is_array,
    is_scalar,
    sparse_parts,
)

# Else imported inside of functions: a trial that keeps nothing needs none of it.
if TYPE_CHECKING:
    from optuna_hermes.suspend._values._classes import Classes
    from optuna_hermes.suspend._values._custom import ValueWriter
    from optuna_hermes.suspend._values._functions import FunctionName
    from optuna_hermes.suspend._values._owned import Memory, NamedTensors

_CONTAINERS = (list, tuple, dict)
_OF_STATE = ("state_dict", "load_state_dict")
_LEAVES = (*NUMBERS, torch.Size, torch.dtype, torch.device)
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
        self._readable: set[str] = set()
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

        later = False
        kept = {name: self.values[name] for name in order if name in self.values}
        reader = ValueReader(self._classes, self._given, NamedTensors(tensors))
        for name, (value, was_on_device, is_tree) in nodes.items():
            present = self.values.get(name)
            if not is_tree:
                if was_on_device:
                    value = moved(value, torch.accelerator.current_accelerator())
                kept[name] = reader.plain(value, present)
            elif not later:
                try:
                    kept[name] = reader.node(value, present)
                except UnknownClassError as error:
                    if self._foreign is not None:
                        raise SuspendError(
                            f"run.kept[{name!r}] is restored only where your code puts such an "
                            f"object there before the loop: {error}"
                        ) from error
                    later = True  # also of those after it, which may refer to its parts
        # In place: the objective may hold the dictionary.
        self.values.clear()
        self.values.update({name: kept[name] for name in order if name in kept})
        # A second call may fill these in place; other arrays may be parts of a model.
        self._given |= {id(each): each for each in reader.arrays}

    def _written(self, names: list[str], tensors: _Tensors) -> dict[str, list[Any]]:
        """The kept values of these names, trees in the order in which they must be read.

        They may be parts of these ``tensors`` of the named objects, which are written elsewhere.
        """
        if not names:
            return {}
        from optuna_hermes.suspend._values._custom import ValueWriter
        from optuna_hermes.suspend._values._owned import Memory, NamedTensors, memory_of

        owned = NamedTensors(tensors)
        writer = ValueWriter(whole=True, owned=owned)
        memories = ((name, _memories_of_plain(self.values[name])) for name in names)
        plain = {name: found for name, found in memories if found is not None}
        # Those last that may be restored later: none is read before one that it refers to.
        names = sorted(names, key=lambda name: name in (self._foreign or ()))
        trees = {name: self._tree(writer, name) for name in names if name not in plain}
        in_trees = {memory_of(each) for each in writer.objects}
        shared = sharing(plain, lambda memory: memory in in_trees or owned.holds(memory))
        trees |= {name: self._tree(writer, name) for name in shared}
        writer.refuse_overlaps()
        self._check_readable(trees, writer.functions, owned)
        nodes = {name: [tree, False, True] for name, tree in trees.items()}
        for name in (each for each in plain if each not in trees):
            value, has_arrays = self.values[name], Memory in map(type, plain[name])
            nodes[name] = [value, has_arrays and on_device(value), False]
        return nodes

    def _tree(self, writer: ValueWriter, name: str) -> list[Any]:
        with _named_in_errors(name):
            return writer.write(f"run.kept[{name!r}]", self.values[name])

    def _check_readable(
        self, trees: Mapping[str, list[Any]], functions: set[FunctionName], owned: NamedTensors
    ) -> None:
        """Read new values once, so that one that cannot be restored fails while it is there.

        Those with other ``functions`` than before the loop are new ones, too: a loop may put
        another function in the place of one.
        """
        known = set() if self._classes is None else self._classes.functions
        if self._readable.issuperset(trees) and functions <= known:
            return
        from optuna_hermes.suspend._values._custom import ValueReader

        reader = ValueReader(self._classes, owned=owned)
        for name, tree in trees.items():
            with _named_in_errors(name):
                reader.node(frozen(tree))
        self._readable.update(trees)  # only now: an error is caught at an epoch's begin


def _functions_in(value: object) -> set[FunctionName]:
    """Functions of a value that only one like it may have; see ``ValueWriter.functions``."""
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
    return _inside(value)


def can_keep(value: object) -> bool:
    """True for a value that can be stored if it is put into ``run.kept`` before the loop."""
    from optuna_hermes.suspend._values._custom import ValueWriter

    writer = ValueWriter(whole=True)
    try:
        writer.write("", value)
    except Exception:  # also of a state_dict() of the user's: this only chooses words
        return False
    # A function that is in a variable in place of another one was not kept before the loop.
    return not (writer.functions and issubclass(type(value), CODE))


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


def _memories_of_plain(value: object) -> list[Memory | int] | None:
    """Keys of a plain value's containers, arrays and tensors, one at each reference to them.

    None if it is not plain. Plain are scalars, arrays of numbers and tensors, also in containers:
    ``pack`` knows them.
    """
    from optuna_hermes.suspend._values._owned import memory_of

    memories: list[Memory | int] = []
    on_device: set[bool] = set()
    waiting, seen = [value], set()
    while waiting:
        each = waiting.pop()
        if type(each) in _CONTAINERS:
            if isinstance(each, dict) and not _are_plain_keys(each):
                return None
            items = each.values() if isinstance(each, dict) else cast("list[object]", each)
            others = _no_numbers(items)
            if others or type(each) is not tuple:
                memories.append(memory_of(each))  # of a tuple, too: it may hold a list
            if id(each) not in seen:
                seen.add(id(each))
                waiting += others
        elif type(each) in NUMBERS:
            continue
        elif is_array(each) or isinstance(each, torch.Tensor):
            if isinstance(each, torch.Tensor):
                on_device.add(each.device.type != "cpu")
                if each.requires_grad or len(on_device) > 1:
                    return None  # it would come back without that, or all on the device
            memories.append(memory_of(each))
        elif type(each) not in _LEAVES and not is_scalar(each):
            return None
    return memories


def _are_plain_keys(keys: Iterable[Any]) -> bool:
    return all(
        _are_plain_keys(key) if type(key) is tuple else type(key) in _LEAVES or is_scalar(key)
        for key in _no_numbers(keys)
    )


def sharing(
    memories: Mapping[str, Collection[Memory | int]], elsewhere: Callable[[Memory | int], bool]
) -> list[str]:
    """Names of values that refer to a part twice, or to one that is in another or ``elsewhere``."""
    counts = Counter(each for found in memories.values() for each in found)
    return [n for n, found in memories.items() if any(counts[m] > 1 or elsewhere(m) for m in found)]


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


def _no_numbers(items: Iterable[Any]) -> list[Any]:
    return [each for each in items if type(each) not in NUMBERS]


def _inside(value: Any) -> Collection[Any]:
    """The parts of a value that a tree of it would hold; those of a ``state_dict`` are unknown."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset | deque):
        return value
    if isinstance(value, np.ndarray):
        return value.ravel().tolist() if value.dtype == object else ()
    # With one of the methods alone it is written by its attributes.
    if isinstance(value, torch.Tensor) or all(hasattr(type(value), name) for name in _OF_STATE):
        return ()
    return getattr(value, "__dict__", {}).values()
