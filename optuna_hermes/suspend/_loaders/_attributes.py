"""The state that a loader, its samplers and its data set hold: generators, counters, lists."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from optuna_hermes.errors import CheckpointError
from optuna_hermes.suspend._loaders._kinds import data_of, has_workers
from optuna_hermes.suspend._loaders._order import SAMPLES
from optuna_hermes.suspend._loaders._weak import by_identity
from optuna_hermes.suspend._modules._unsaved import set_by, set_in
from optuna_hermes.suspend._values._fingerprint import CODE
from optuna_hermes.suspend._values._generators import (
    GeneratorOwner,
    dict_of,
    holders_in,
    is_users_type,
    set_states,
    states_of,
)
from optuna_hermes.suspend._values._tree import NUMBERS, frozen, leaves, same

_ARRAYS = (torch.Tensor, np.ndarray)
_PLAIN = (*NUMBERS, list, tuple, set, frozenset, dict, deque, np.generic, *_ARRAYS)
"""Classes whose objects may be plain, as is seen when they are written."""
_MOST_BYTES = 1 << 27
_MOST_SMALL_BYTES = 1 << 19
"""Few, as they may be written with each batch, or hold samples."""
_MOST_PARTS = 100
"""Longer lists and dictionaries of a data set hold samples, not transforms."""
_seen: MutableMapping[Any, _PlainAttributes] = by_identity()


class LoaderAttributes:
    """Generators, counters and indices that a loader, its samplers and its data set keep.

    Of samplers, of an object that collates in this process, and of iterable data sets, all plain
    values; see ``_values._plain``. Of other data sets and their transforms, only the numbers, text
    and flags that the training sets: with worker processes they hold from its next epoch on, and
    where these persist those of the first epoch hold.
    """

    def __init__(self, loader: DataLoader[Any], sampler: Any) -> None:
        self._loader: Callable[[], Any] = lambda: loader
        # A loader may also be a list or a range, which have no weak references.
        with contextlib.suppress(TypeError):
            self._loader = weakref.ref(loader)
        self._samplers: list[Any] = []
        while sampler is not None and all(sampler is not each for each in self._samplers):
            self._samplers.append(sampler)
            inner = getattr(sampler, "batch_sampler", None)
            sampler = getattr(sampler, "sampler", inner)
        self.data = DataAttributes(getattr(loader, "dataset", None))
        self._collate: list[_PlainAttributes] = []
        collate = getattr(loader, "collate_fn", None)
        # Functions have no attributes, workers have copies, and a module is saved by itself.
        elsewhere = has_workers(loader) or isinstance(collate, nn.Module)
        if is_users_type(type(collate)) and not elsewhere:
            self._collate.append(_attributes_of(collate, _plain_in, _MOST_SMALL_BYTES))
        of_samplers = [_attributes_of(each, _plain_in) for each in self._samplers]
        self._attributes: list[_PlainAttributes | DataAttributes]
        self._attributes = [*of_samplers, self.data, *self._collate]

    def state(self) -> dict[str, Any]:
        """Their present state; of attributes, those that have ever had other than first values."""
        return {
            "generators": states_of(self._holders()),
            "attributes": [each.state() for each in self._attributes],
        }

    def collate_state(self) -> list[dict[str, Any]]:
        """The part of ``state`` that fetching a batch may change in an object that collates."""
        return [each.state() for each in self._collate]

    def load_collate_state(self, state: list[dict[str, Any]]) -> None:
        """Restore what ``collate_state`` returned."""
        for attributes, changed in zip(self._collate, state, strict=False):
            attributes.load_state(changed)

    def unwrap(self) -> None:
        """Do nothing: unlike a ``ResumableSampler`` it changes nothing in its loader."""

    def idle_state(self) -> dict[str, Any]:
        return {"own": self.state(), "seed": None, "workers": None}

    def load_idle_state(self, state: dict[str, Any]) -> None:
        self.load_state(state["own"])

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what ``state`` returned; attributes that it lacks get their first values."""
        set_states(self._holders(), state["generators"])
        for attributes, changed in zip(self._attributes, state["attributes"], strict=False):
            attributes.load_state(changed)

    def _holders(self) -> list[GeneratorOwner]:
        loader = self._loader()
        samplers = [GeneratorOwner(f"sampler {n}", each) for n, each in enumerate(self._samplers)]
        return [GeneratorOwner("loader", loader), *holders_in(*samplers, *data_of(loader))]


class _PlainAttributes:
    """The plain attributes of an object: first values in this process, and changes, as trees.

    Args:
        owner: a sampler, a data set, or an object that collates.
        find: returns the attributes that may be kept, if they are plain.
        most_bytes: see ``written``.
    """

    def __init__(self, owner: Any, find: Callable[[Any], dict[str, Any]], most_bytes: int) -> None:
        self._owner: Callable[[], Any] = lambda: owner
        with contextlib.suppress(TypeError):
            self._owner = weakref.ref(owner)
        self._find, self._most_bytes = find, most_bytes
        self._others: set[str] = set()
        # The arrays of the beginning are filled when they are restored: the objective may hold
        # them, too. Weak, as those that are replaced may go.
        self._made: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        first = [each for each in leaves(self.values()) if isinstance(each, _ARRAYS)]
        self._made.update((id(each), each) for each in first)
        self._first = frozen(self.values())
        # Saved from then on: the next process may have other first values.
        self._changed: set[str] = set()

    def values(self) -> dict[str, Any]:
        """The present values."""
        found: dict[str, Any] = {}
        for name, value in self._find(self._owner()).items():
            if type(value) in NUMBERS:
                found[name] = ["plain", value]
            elif name not in self._others:
                # Loaded on first use: most samplers have numbers only.
                from optuna_hermes.suspend._values._plain import written

                try:
                    found[name] = written(name, value, self._made, self._most_bytes)
                except CheckpointError:
                    self._others.add(name)
        return found

    def set(self, values: dict[str, Any]) -> None:
        """Restore what ``values`` returned."""
        own, now = getattr(self._owner(), "__dict__", {}), self.values()
        for name, tree in values.items():
            if same(tree, now.get(name)):
                continue
            if tree[0] == "plain":
                own[name] = tree[1]
            else:
                from optuna_hermes.suspend._values._plain import read

                own[name] = read(tree, own.get(name))

    def state(self) -> dict[str, Any]:
        now = self.values()
        self._changed |= {n for n, tree in now.items() if not same(tree, self._first.get(n))}
        changed: dict[str, Any] = frozen({n: now[n] for n in now if n in self._changed})
        return changed

    def load_state(self, state: dict[str, Any]) -> None:
        self._changed |= state.keys()
        now = self.values()  # a value of another kind than first is left as it is
        first = {name: tree for name, tree in self._first.items() if name in now}
        self.set({**first, **state})


class DataAttributes:
    """The numbers, text and flags that the training sets in data sets and their transforms.

    Of iterable ones all plain values of some size.

    Args:
        data: the data set of a loader.
    """

    def __init__(self, data: Any) -> None:
        # By place, as the next process may have other transforms.
        self._parts: dict[str, _PlainAttributes] = {}
        for place, each in _users_data(data).items():
            kind: Any = type(each)
            if issubclass(kind, IterableDataset):  # a pass may begin by what the one before set
                self._parts[place] = _attributes_of(each, _plain_in, _MOST_SMALL_BYTES)
                continue
            reads = _set_by_reading(kind) | set_by(kind, ("torch.",))
            together = _set_together(kind)
            find = functools.partial(_set_by_training, reads=reads, together=together)
            self._parts[place] = _attributes_of(each, find)

    def values(self) -> dict[str, dict[str, Any]]:
        """The present values, also those that were never changed."""
        return {place: each.values() for place, each in self._parts.items()}

    def set(self, values: dict[str, dict[str, Any]]) -> None:
        """Restore what ``values`` returned."""
        for place, each in self._parts.items():
            each.set(values.get(place, {}))

    def state(self) -> dict[str, Any]:
        """See ``_PlainAttributes``; empty if nothing has changed."""
        states = {place: each.state() for place, each in self._parts.items()}
        return {place: state for place, state in states.items() if state}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what ``state`` returned."""
        for place, each in self._parts.items():
            each.load_state(state.get(place, {}))


def _attributes_of(
    owner: Any, find: Callable[[Any], dict[str, Any]], most_bytes: int = _MOST_BYTES
) -> _PlainAttributes:
    """The attributes of an object as they were when any loader with it was first seen."""
    # Later loaders with it would take values that the training has changed for its first ones.
    made = _seen[owner] if owner in _seen else _PlainAttributes(owner, find, most_bytes)
    with contextlib.suppress(TypeError):  # it may have no weak references
        _seen[owner] = made
    return made


def _plain_in(owner: Any) -> dict[str, Any]:
    """The attributes of a sampler, or of an object that collates, that may be plain values."""
    own = getattr(owner, "__dict__", {})
    return {
        name: value
        for name, value in own.items()
        if name not in SAMPLES and issubclass(type(value), _PLAIN)
    }


def _users_data(data: Any) -> dict[str, Any]:
    """The data sets and transforms of the user's classes in a data set, by place and class."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    waiting = deque([("dataset", data)])
    while waiting:
        place, each = waiting.popleft()
        kind = type(each)
        if id(each) in seen or issubclass(kind, CODE):
            continue
        seen.add(id(each))
        is_data = (each is data or issubclass(kind, Dataset)) and hasattr(kind, "__getitem__")
        if is_users_type(kind) and (is_data or _is_transform(each)):
            found[f"{place} {kind.__qualname__}"] = each
        waiting += ((f"{place}.{name}", part) for name, part in _inside(each))
    return found


def _inside(each: Any) -> Iterable[tuple[Any, Any]]:
    """The parts by which a data set, a transform or a container may hold others, by name."""
    kind = type(each)
    if issubclass(kind, list | tuple | dict):
        if len(each) > _MOST_PARTS:
            return ()
        return dict.items(each) if issubclass(kind, dict) else enumerate(each)
    own = dict_of(each)
    names: Iterable[str] = ()
    if issubclass(kind, Dataset):
        names = own if hasattr(kind, "__getitem__") else ("dataset", "datasets")
    elif _is_transform(each):
        names = own if is_users_type(kind) else ("transforms", "_modules")  # as of ``Compose``
    return [(name, own.get(name)) for name in names]


def _is_transform(each: Any) -> bool:
    """True for what is called, but for a module with weights: that is saved by itself."""
    if not any("__call__" in vars(kind) for kind in type(each).__mro__):
        return False
    return not (issubclass(type(each), nn.Module) and any(True for _ in each.parameters()))


def _set_by_training(
    data: Any, *, reads: Collection[str], together: Collection[frozenset[str]]
) -> dict[str, Any]:
    """The numbers, text and flags in a data set, but for those that belong to what is not kept.

    Args:
        data: the data set.
        reads: names of attributes that reading or torch sets, such as the part that was read last.
        together: names of attributes that one method sets, for each method: it would find a size
            set, say, and leave the transform of the first size.
    """
    own = getattr(data, "__dict__", {})
    kinds = (bool, int, float, str, type(None))
    values = {name: value for name, value in own.items() if type(value) in kinds}
    partly = {
        name for names in together if not names & own.keys() <= values.keys() for name in names
    }
    return {
        name: value for name, value in values.items() if name not in reads and name not in partly
    }


def _set_together(kind: type) -> list[frozenset[str]]:
    """Names of the attributes that one method sets, for each method but ``__init__``."""
    names = {name for each in kind.__mro__ for name in vars(each)} - {"__init__"}
    return [set_in(code) for name in names for code in _codes_of(kind, name)]


def _set_by_reading(kind: type) -> frozenset[str]:
    """Names of the attributes that methods which give samples set, and those that they call."""
    found: set[str] = set()
    seen: set[str] = set()
    waiting = ["__getitem__", "__getitems__", "__iter__", "__next__", "__call__"]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for code in _codes_of(kind, name):
            waiting += code.co_names
            found |= set_in(code)
    return frozenset(found)


def _codes_of(kind: type, name: str) -> Iterator[types.CodeType]:
    """The code of a method or property in a class and its bases, and of functions within."""
    for each in kind.__mro__:
        function: Any = vars(each).get(name)
        try:
            function = inspect.unwrap(function)
            function = getattr(function, "fget", getattr(function, "func", function))
            codes = [function.__code__] if isinstance(function, types.FunctionType) else []
        except Exception:  # of the __getattr__ of a value that is no method
            continue
        for code in codes:
            yield code
            codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
