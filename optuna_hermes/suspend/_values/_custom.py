"""Serialisation of users' own values to trees: containers, tensors, objects of their classes.

As with ``Objects``, no code from a tree runs: a present object keeps its identity and its
attributes are restored; a missing one is only made of a class of the owner's packages, or one that
its code can name, or of a package of what was kept before the loop, without its constructor.
"""

from __future__ import annotations

import contextlib
import io
import math
import random
import struct
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from enum import Enum, Flag
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import numpy as np
import torch

from optuna_hermes.errors import CheckpointError, SuspendError
from optuna_hermes.suspend._modules._metrics import parts_with_metrics
from optuna_hermes.suspend._modules._module_state import (
    attributes_of,
    kept_groups,
    numbers_of,
    put_back,
    set_gradient,
    set_plain,
    state_of,
)
from optuna_hermes.suspend._modules._unsaved import NameTable, needed_of
from optuna_hermes.suspend._state import copied, filled, moved
from optuna_hermes.suspend._values._classes import Classes
from optuna_hermes.suspend._values._fingerprint import BUFFERS, SCALARS, is_iterator, outside
from optuna_hermes.suspend._values._functions import (
    FUNCTIONS,
    node_of,
    value_of,
)
from optuna_hermes.suspend._values._generators import (
    GENERATORS,
    dict_of,
    generator_state,
    set_generator_state,
)
from optuna_hermes.suspend._values._objects import (
    RegionKey,
    UnknownClassError,
    _Reader,
    _Writer,
    key_of,
)
from optuna_hermes.suspend._values._owned import NamedTensors
from optuna_hermes.suspend._values._stacks import CONTAINERS, LEAST, Stack, stack_or_node, unstacked
from optuna_hermes.suspend._values._tree import NUMBERS, is_numpy_dtype, is_sparse, storable

_MAPPINGS: dict[str, type] = {kind.__name__: kind for kind in (OrderedDict, Counter, defaultdict)}
_OF_LIBRARY: dict[str, Any] = {kind.__name__: kind for kind in (*SCALARS, array)}
_BUFFERS: dict[str, Any] = {kind.__name__: kind for kind in BUFFERS}
_FACTORIES = {kind.__name__: kind for kind in (list, dict, set, int, float, str)}
"""Factories of a ``defaultdict`` that every process has; most have one of these."""
_MOST_LEVELS = 80
"""Most levels of a value: ``pack`` calls itself nine times for each, and Python has a limit."""
_REUSED = {
    *("object", "stateful", "metrics", "array", "array of", "tensor"),
    *("reshaped tensor", "drawing", "buffer"),
}
"""Nodes that may become the object that is there."""
_MISSING = object()
"""In the place of a part of a value that was not read."""
_LOADED = ("stateful", "metrics")
"""Nodes of objects that must be there, as no checkpoint makes them."""
_UNSURE = {
    **dict.fromkeys(("object", "named tuple", "enum", "flag", "function", "mapping"), 3),
    **dict.fromkeys(("array of", "drawing"), 2),
    **dict.fromkeys(("deque", "part", "present"), 1),
}
"""Nodes that are perhaps not readable, each with the length of its begin that decides on it."""
_POINTER_BYTES = struct.calcsize("P")


class UnrestorableParts:
    """The parts of values that the next process neither makes by itself nor of a checkpoint.

    Args:
        there: the objects that it makes, by their places in a value; see ``needed_of``.
        classes: those that objects may be made of.
        known: ids of objects that are saved elsewhere.
        makes: see ``Attributes``.
    """

    def __init__(
        self,
        there: Mapping[tuple[str, ...], object],
        classes: Classes,
        known: Collection[int],
        *,
        makes: bool = False,
    ) -> None:
        self.found: set[str] = set()
        """Their places."""
        self._there = there
        self._classes = ValueReader(classes)
        self._known = known
        self._needed = ("present", "metrics") if makes else ("present", *_LOADED)

    def note(self, node: list[Any], value: object, place: tuple[str, ...]) -> None:
        """Note the part of a node if an object must be there that is not."""
        needed = node[0] in self._needed
        needed = needed or (node[:2] == ["mapping", "defaultdict"] and node[2] not in _FACTORIES)
        if node[0] in ("object", "named tuple", "enum", "flag"):
            needed = not self.can_make(node)
        if needed and self._there.get(place) != needed_of(value, self._known):
            self.found.add(".".join(place))

    def can_make(self, node: list[Any]) -> bool:
        """True if the object of a node needs none to be there, by its class."""
        return self._classes.can_make(node[1], node[2])


class ValueWriter(_Writer):
    """Writer of one or more values: what is shared between them is written once.

    Args:
        known: ids of objects that are saved elsewhere.
        whole: True if nothing may be left out of the tree.
        made: arrays and tensors by ``id`` that the next process makes anew, perhaps as parts of
            others: they are restored in place.
        owned: tensors that are saved elsewhere, and that values may be parts of.
        unmade: notes the parts that could not be restored.
        named: those of the ``known`` that are referred to by name.
        most: parts that all values together may have.
    """

    def __init__(
        self,
        known: Collection[int] = (),
        *,
        whole: bool = False,
        made: Mapping[int, object] | None = None,
        owned: NamedTensors | None = None,
        unmade: UnrestorableParts | None = None,
        named: NameTable | None = None,
        most: float = math.inf,
    ) -> None:
        super().__init__(())
        self.unsure: set[tuple[str | None, ...]] = set()
        """A value's name, and the begin of a node, for all nodes that are perhaps not readable."""
        self._names = {} if named is None else named.names
        self._held = () if named is None else named.made
        self._unmade = unmade
        self._known = known
        self._whole = whole
        self._made = made or {}
        self._owned = owned
        self._most, self._parts = most, 0

    def write(self, name: str, value: object) -> list[Any]:
        """Convert a value to a tree; after the last one, ``refuse_overlaps`` must be called.

        Raises:
            CheckpointError: it leads to something that cannot be restored.
        """
        try:
            return self.node(value, (name,))
        except RecursionError as error:
            raise CheckpointError(f"{name} is nested too deeply") from error

    def write_only(self, name: str, value: object) -> list[Any]:
        """Convert the only value to a tree; see ``write``."""
        tree = self.write(name, value)
        self.refuse_overlaps()
        return tree

    def node(self, value: Any, place: tuple[str, ...]) -> list[Any]:
        node = self._node(value, place)
        if id(value) in self._held and node[0] not in ("known", "same", "present"):
            # The next process may have another one at this place.
            return ["into", self._names[id(value)], node]
        if self._whole and node[0] in _LOADED:
            kind = type(value)
            raise CheckpointError(f"{'.'.join(place)} is a {kind.__module__}.{kind.__qualname__}")
        if node[0] in _UNSURE:
            self.unsure.add((place[0], *node[: _UNSURE[node[0]]]))
        if self._unmade is not None:
            self._unmade.note(node, value, place)
        return node

    def _node(self, value: Any, place: tuple[str, ...]) -> list[Any]:
        self._count(1, place)
        if len(place) > _MOST_LEVELS:
            raise CheckpointError(f"{place[0]} is nested too deeply")
        # There is one of these for all who have one: to be known says nothing of its owner.
        of_all = value is None or (type(value) is tuple and not value)
        known = id(value) in self._known and not of_all
        function = self._function(value) if self._whole else None
        if function is not None:
            return function
        if known and id(value) in self._names:
            return ["known", self._names[id(value)]]
        if known or (outside(value) and not is_iterator(value)):
            if self._whole:
                raise CheckpointError(f"{'.'.join(place)} is of {type(value).__name__}")
            return ["present"]
        if type(value) in (torch.Size, torch.dtype, torch.device) or is_numpy_dtype(value):
            return ["plain", value]  # which is not numbered
        return super().node(value, place)

    def _function(self, value: Any) -> list[Any] | None:
        """The node of a function that has a name; None for what is none."""
        return node_of(value)

    def _count(self, parts: int, place: tuple[str, ...]) -> None:
        self._refuse_more(parts, place)
        self._parts += parts

    def _refuse_more(self, parts: int, place: tuple[str, ...]) -> None:
        if self._parts + parts > self._most:
            raise CheckpointError(f"{place[0]} has more than {self._most} parts")

    def _items(
        self, items: Iterable[Any], place: tuple[str, ...], names: Iterable[Any] | None = None
    ) -> list[Any]:
        found = list(items)
        if not (found and NUMBERS.issuperset(map(type, found))):
            return self._stacked(found, place) or super()._items(found, place, names)
        self._count(len(found), place)
        return ["numbers", found]

    def _stacked(self, items: list[Any], place: tuple[str, ...]) -> list[Any] | None:
        """Many like items together; None for others, which have a node each."""
        row = _row_of(items) if len(items) >= LEAST else None
        if row is None or not self._are_new(row, items):
            return None
        columns = list(zip(*items, strict=True)) if row else [items]
        filled = (each for column in columns for each in column if type(each) in CONTAINERS)
        n_parts = len(items) * (1 + len(items[0]) if row else 1)
        n_parts += sum({id(each): len(each) for each in filled}.values())
        self._refuse_more(n_parts, place)  # before the work, which each save would do in vain
        parts = [stack_or_node(each) for each in columns]
        if None in parts:
            return None
        pairs = zip(parts, columns, strict=True)
        stacks = [(part, column) for part, column in pairs if isinstance(part, Stack)]
        keys = self._new_keys(each for _, column in stacks for each in column)
        if keys is None:
            return None
        self._count(n_parts, place)
        if row[1:]:
            self.unsure.add((place[0], *row))
        name = ".".join(place)
        # In the order in which a node for each item would be read.
        for n, item in enumerate(items):
            if row[1:]:
                self._number(item)
            for stack, column in stacks:
                self._add(stack, column[n], keys, f"{name}.{n}")
        nodes = [each.node() if isinstance(each, Stack) else each for each in parts]
        return ["stacked", row, nodes]

    def _are_new(self, row: list[Any], items: list[Any]) -> bool:
        """True unless one of the tuples is referred to twice, or needs one that is there."""
        if not row[1:]:
            return True
        if outside(items[0]) or not (self._unmade is None or self._unmade.can_make(row)):
            return False
        ids = set(map(id, items))
        return len(ids) == len(items) and ids.isdisjoint(self._seen)

    def _new_keys(self, values: Iterable[Any]) -> dict[int, RegionKey] | None:
        """The keys of arrays without a node by ``id``; None if memory is shared, or is known."""
        new = {id(each): each for each in values if each is not None}
        if any(key in self._known or key in self._held for key in new):
            return None
        new = {key: each for key, each in new.items() if key not in self._seen}
        if self._owned is not None and self._owned.holds(new.values()):
            return None
        arrays = {key: each for key, each in new.items() if type(each) not in CONTAINERS}
        keys = {key: key_of(each) for key, each in arrays.items()}
        found = set(keys.values())
        return keys if len(found) == len(keys) and found.isdisjoint(self._regions) else None

    def _add(self, stack: Stack, value: Any, keys: Mapping[int, RegionKey], name: str) -> None:
        number = None if value is None else self._seen.get(id(value))
        if value is None or number is not None:
            stack.refer(number)
            return
        stack.add(value, in_place=self._made.get(id(value)) is value)
        number = self._number(value)
        if id(value) in keys:
            self._regions[keys[id(value)]] = number, name, value

    def _object(self, value: Any, place: tuple[str, ...]) -> list[Any]:
        if not isinstance(value, np.ndarray | torch.Tensor):
            return self._other(value, place)
        part = self._owned.part(value, ".".join(place)) if self._owned is not None else None
        node = part or self._other(value, place)
        in_place = node[0] in ("array", "tensor") and self._made.get(id(value)) is value
        return ["in place", node] if in_place else node

    def _other(self, value: Any, place: tuple[str, ...]) -> list[Any]:
        kind = type(value)
        own = self._of_library(value, place)
        if own is not None:
            return own
        if kind is np.ndarray or kind in GENERATORS or isinstance(value, np.random.RandomState):
            return super()._object(value, place)
        name = [kind.__module__, kind.__qualname__]
        if isinstance(value, Flag):
            return ["flag", *name, value.value]  # a combination of members has no name
        if isinstance(value, Enum):
            return ["enum", *name, value.name]
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return ["named tuple", *name, self._items(value, place)]
        if callable(getattr(kind, "state_dict", None)) and hasattr(kind, "load_state_dict"):
            state = self.node(_state_of(value), place)
            with_metrics = parts_with_metrics(value)
            if with_metrics:  # which keep what is not in their states, such as the best of them
                parts = [self._part(*each, place) for each in with_metrics]
                return ["metrics", *name, state, parts]
            numbers = numbers_of(value) if isinstance(value, torch.nn.Module) else {}
            return ["stateful", *name, state, numbers]
        # Slots and fields of C are beside the attributes, and would be lost without a word.
        if is_iterator(value) or not _has_attributes_only(kind):
            raise CheckpointError(f"{'.'.join(place)} is a {kind.__module__}.{kind.__qualname__}")
        parts = [[n, self.node(v, (*place, n))] for n, v in vars(value).items()]
        return ["object", *name, parts]

    def _part(self, at: str, part: torch.nn.Module, place: tuple[str, ...]) -> list[Any]:
        """A part of a module that has metrics: its place there, and its attributes."""
        # The module must be there, and with it all that these hold and that is not stored.
        before, self._unmade = self._unmade, None
        own = [[n, self.node(v, (*place, n))] for n, v in attributes_of(part).items()]
        self._unmade = before
        return [at, own]

    def _of_library(self, value: Any, place: tuple[str, ...]) -> list[Any] | None:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            trained = value.requires_grad and value.is_leaf
            sparse = is_sparse(value) and not trained
            if not (sparse or storable(value)):
                raise CheckpointError(f"{'.'.join(place)} is a tensor of {kind.__qualname__}")
            gradient = [self.node(value.grad, (*place, "grad"))] if trained else []
            number = None
            if not sparse and value.numel():
                number = self._shared(value, ".".join(place))
            if number is not None:
                if not self.objects[number].is_contiguous():  # it will be, and strides will differ
                    raise CheckpointError(f"{'.'.join(place)} shares the memory of its transpose")
                view = [number, list(value.shape), list(value.stride())]
                return ["reshaped tensor", *view, trained, *gradient]
            return ["tensor", value, value.device.type != "cpu", trained, *gradient]
        if kind is deque:
            return ["deque", self._items(value, place), value.maxlen]
        if kind in _MAPPINGS.values():
            made = getattr(getattr(value, "default_factory", None), "__name__", None)
            pairs = self._pairs(value, place)
            # A module's state_dict has the versions of its parts in one.
            return ["mapping", kind.__name__, made, pairs, self._pairs(dict_of(value), place)]
        if kind not in GENERATORS and isinstance(value, torch.Generator | random.Random):
            name = [kind.__module__, kind.__qualname__]
            return ["stateful", *name, self.node(generator_state(value), place)]
        if isinstance(value, PurePath):
            return ["path", str(value)]
        if kind in BUFFERS:
            content, *rest, _ = value.__getstate__()
            if kind is io.BytesIO:
                content = np.frombuffer(content, np.uint8)  # else it would be text in a checkpoint
            return ["buffer", kind.__name__, content, rest]
        if kind in _OF_LIBRARY.values():
            return ["made of", kind.__name__, self.node(_arguments(value), place)]
        return None


def _has_attributes_only(kind: Any) -> bool:
    """True for a class whose objects have a ``__dict__``, and neither slots nor fields of C."""
    # Both of these pointers may be in front of the object instead, as of Python 3.12.
    within = [each for each in (kind.__dictoffset__, kind.__weakrefoffset__) if each > 0]
    size = object.__basicsize__ + len(within) * _POINTER_BYTES
    return bool(kind.__dictoffset__) and kind.__basicsize__ == size and not kind.__itemsize__


def _new(kind: type) -> object:
    """An object of a class, without its attributes."""
    # One of the classes of C that have attributes alone, which ``object`` makes no object of.
    made_by = SimpleNamespace if issubclass(kind, SimpleNamespace) else object
    return made_by.__new__(kind)


class ValueReader(_Reader):
    """Reader of what one ``ValueWriter`` has written, in the same order.

    Args:
        given: arrays and tensors by ``id`` that are filled in place: others may hold them.
        owned: the tensors that values may be parts of.
        named: known objects that may be referred to by name.
    """

    def __init__(
        self,
        classes: Classes | None,
        given: Mapping[int, object] | None = None,
        owned: NamedTensors | None = None,
        named: NameTable | None = None,
    ) -> None:
        self._named = {} if named is None else named.objects
        self._classes = classes or Classes((), ())
        super().__init__(self._classes.packages)
        self._given = dict(given or {})
        self._owned = owned or NamedTensors(dict)
        self._taken: dict[int, object] = {}
        self._parts: set[int] = set()

    @property
    def arrays(self) -> list[Any]:
        """The arrays and tensors that were read, without those of named objects."""
        read = (each for each in self._seen if isinstance(each, np.ndarray | torch.Tensor))
        return [each for each in read if id(each) not in self._parts]

    def read(self, first: int, node: list[Any], present: Any = None) -> Any:
        """Read one of several values, of which those before it may not have been read.

        Args:
            first: number of its first part.

        Raises:
            UnknownClassError: it needs a class that is not known, or a part of such a value.
        """
        self._seen += [_MISSING] * (first - len(self._seen))
        try:
            return self.node(node, present)
        except UnknownClassError:
            del self._seen[first:]
            raise

    def node(self, node: list[Any], present: Any = None) -> Any:
        kind = node[0]
        if kind == "same" and self._seen[node[1]] is _MISSING:
            raise UnknownClassError("it refers to a part of another value, which cannot be read")
        if kind == "in place":
            if isinstance(present, np.ndarray | torch.Tensor):
                self._given[id(present)] = present
            return self.node(node[1], present)
        if kind in ("known", "into"):
            if node[1] not in self._named:
                raise SuspendError(f"it refers to {node[1]}, which is not there")
            there = self._named[node[1]]
            return there if kind == "known" else self.node(node[2], there)
        if kind in FUNCTIONS:
            return value_of(node, self._classes.functions)
        if kind in _REUSED and not self._take(present):
            present = None  # two values must not become one object
        return super().node(node, present)

    def _reused(self, kind: Any, present: Any) -> Any:
        return present if type(present) is kind and self._take(present) else kind()

    def _without(self, kind: str, rest: list[Any], present: Any) -> Any:
        if kind == "array" and id(present) in self._given and copied(present, rest[1]) is present:
            return present
        if kind == "array of":
            made = super()._without(kind, rest, present)
            return copied(present, made) if id(present) in self._given else made
        if kind == "part":
            part = self._owned.read(tuple(rest[0]), rest[1], rest[2:])
            self._parts.add(id(part))
            return part
        if kind == "tensor":
            value, was_on_device, trained, *gradient = rest
            if not (id(present) in self._given and copied(present, value) is present):
                present = _tensor(value, was_on_device, trained, present)
            return self._with_gradient(present, gradient)
        if kind == "reshaped tensor":
            number, shape, strides, trained, *gradient = rest
            view = self._seen[number].detach().as_strided(shape, strides)
            return self._with_gradient(_tensor(view, False, trained, present), gradient)
        if kind == "deque":
            ring = deque(self._items(rest[0], present), rest[1])
            same = type(present) is deque and present.maxlen == rest[1]
            return filled(present, deque, ring) if same else ring
        if kind == "mapping":
            name, factory, pairs, own = rest
            same = type(present) is _MAPPINGS[name]
            if not same and name == "defaultdict" and factory not in _FACTORIES:
                raise SuspendError("it holds a defaultdict, and what makes its values is not known")
            there = present if same else _MAPPINGS[name]()
            if name == "defaultdict" and factory in _FACTORIES:
                there.default_factory = _FACTORIES[factory]
            filled(there, type(there), self._pairs(pairs, there))
            filled(dict_of(there), dict, self._pairs(own, dict_of(there)))
            return there
        if kind == "made of":
            made = _OF_LIBRARY[rest[0]](*self.node(rest[1]))
            return self._in_array(made, present) if type(made) is array else made
        if kind == "buffer":
            return _buffer(rest, present)
        if kind == "path":
            return type(present)(rest[0]) if isinstance(present, PurePath) else PurePath(rest[0])
        if kind == "named tuple":
            items = self._items(rest[2], present)
            return tuple.__new__(self._class(*rest[:2]), items)
        if kind in ("enum", "flag"):
            return self._member(kind, rest, present)
        if kind in _LOADED:
            if not _is_a(present, *rest[:2]):
                raise SuspendError(f"it holds a {rest[0]}.{rest[1]}, and there is none to load")
            _set_state(present, self.node(rest[2]))
            if kind == "metrics":
                self._load_parts(rest[3], present)
            elif isinstance(present, torch.nn.Module):
                set_plain(dict(present.named_modules()), rest[3])
            return present
        return super()._without(kind, rest, present)

    def _with_gradient(self, tensor: torch.Tensor, nodes: list[Any]) -> torch.Tensor:
        for each in nodes:  # none of one that is not trained
            set_gradient(tensor, self.node(each))
        return tensor

    def _in_array(self, made: array[Any], present: Any) -> array[Any]:
        """An array of the standard library, in the one that is there if it fits."""
        same = type(present) is array and present.typecode == made.typecode
        if same and self._take(present):
            with contextlib.suppress(BufferError):  # others hold its memory
                present[:] = made
                made = present
        return made

    def _load_parts(self, nodes_of: list[Any], present: torch.nn.Module) -> None:
        """Restore what ``_part`` has written of the parts of a module that has metrics."""
        parts = dict(present.named_modules())
        for at, nodes in nodes_of:
            own: Any = vars(parts[at]) if at in parts else {}
            own.update({name: self.node(each, own.get(name)) for name, each in nodes})

    def _member(self, kind: str, rest: list[Any], present: Any) -> Any:
        module, name, told = rest
        there = _is_a(present, module, name)
        members: Any = type(present) if there else self._class(module, name)
        try:
            if kind == "flag" and issubclass(members, Flag):
                return members(told)
            if kind == "enum" and issubclass(members, Enum):
                return members.__members__[told]
        except (KeyError, ValueError) as error:
            raise SuspendError(f"it holds {told!r} of {module}.{name}, which has none") from error
        raise SuspendError(f"it holds an enumeration {module}.{name}, which is none now")

    def _instance(self, module: str, name: str, present: Any) -> Any:
        # A present object needs no class that can be named: its class may be local to a function.
        there = _is_a(present, module, name)
        return present if there else _new(self._class(module, name))

    def _class(self, module: str, name: str) -> type:
        found = self._classes.find(module, name)
        return found if found is not None else super()._class(module, name)

    def can_make(self, module: str, name: str) -> bool:
        """True if an object of this class needs none to be there."""
        with contextlib.suppress(SuspendError):
            self._class(module, name)
            return True
        return False

    def _take(self, present: object) -> bool:
        if present is None or id(present) in self._taken:
            return False
        self._taken[id(present)] = present
        return True

    def _items(self, nodes: list[Any], present: Any) -> list[Any]:
        if nodes[:1] == ["numbers"]:
            return nodes[1]  # type: ignore[no-any-return]
        if nodes[:1] == ["stacked"]:
            nodes = unstacked(*nodes[1:])
        there = _as_long(present, nodes)
        return [self.node(node, each) for node, each in zip(nodes, there, strict=True)]


def _row_of(items: list[Any]) -> list[Any] | None:
    """The begin of the node of each item if all are like tuples, empty if none is; else None."""
    kinds = set(map(type, items))
    if not any(issubclass(kind, tuple) for kind in kinds):
        return []
    kind = kinds.pop()
    if kinds or len(set(map(len, items))) > 1 or not items[0]:
        return None
    if kind is tuple:
        return ["tuple"]
    return ["named tuple", kind.__module__, kind.__qualname__] if hasattr(kind, "_fields") else None


def _as_long(present: Any, items: Collection[Any]) -> list[Any]:
    """The present items for new ones, by their places; None where there are none.

    Containers mostly grow at their ends, so that what is first stays first.
    """
    there = list(present)[: len(items)] if isinstance(present, list | tuple | deque) else []
    return there + [None] * (len(items) - len(there))


def _arguments(value: Any) -> tuple[Any, ...]:
    """The arguments by which an object of the standard library can be made."""
    if isinstance(value, array):
        return value.typecode, value.tobytes()
    if isinstance(value, UUID):
        return (value.hex,)
    made: tuple[Any, ...] = value.__reduce_ex__(4)[1]
    return made


def _buffer(rest: list[Any], present: Any) -> Any:
    """A file in memory: the one that is there, or a new one."""
    name, content, others = rest
    there = type(present) is _BUFFERS[name] and not present.closed
    buffer = present if there else _BUFFERS[name]()
    octets = content.tobytes() if isinstance(content, np.ndarray) else content
    buffer.__setstate__((octets, *others, None))  # to write text could change the ends of its lines
    return buffer


def _state_of(value: Any) -> dict[str, Any]:
    """The state of an object that has a ``state_dict``."""
    if isinstance(value, torch.optim.Optimizer):
        return state_of(value)
    if not isinstance(value, torch.nn.Module):
        return dict(value.state_dict())
    state = state_of(value)
    # Detached: one that is saved elsewhere, too, would be written as a reference to it.
    buffers = {n: each if each is None else each.detach() for n, each in state["buffers"].items()}
    return {**state, "buffers": buffers}


def _set_state(present: Any, state: Any) -> None:
    """Restore what ``_state_of`` returned, or the state of a generator."""
    if isinstance(present, GENERATORS):
        set_generator_state(present, state)
    elif isinstance(present, torch.nn.Module | torch.optim.Optimizer):
        with kept_groups([present]):
            put_back(present, state)
    else:
        present.load_state_dict(state)


def _is_a(value: object, module: str, name: str) -> bool:
    return (type(value).__module__, type(value).__qualname__) == (module, name)


def _tensor(
    value: torch.Tensor, was_on_device: bool, requires_grad: bool, present: Any
) -> torch.Tensor:
    # A trained one stays the same object, as its optimizer holds it.
    trained = isinstance(present, torch.Tensor) and present.requires_grad
    if (trained or isinstance(present, torch.nn.Parameter)) and copied(present, value) is present:
        return present  # type: ignore[no-any-return]
    if was_on_device:
        value = moved(value, torch.accelerator.current_accelerator())
    result: torch.Tensor = value.requires_grad_() if requires_grad else value
    return result
