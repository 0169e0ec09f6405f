"""The state that a loader, its samplers and its data set hold: generators, counters, lists."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from optuna_hermes.suspend._generators import (
    GeneratorOwner,
    holders_in,
    is_users_type,
    set_states,
    states_of,
)
from optuna_hermes.suspend._loader_kinds import data_of
from optuna_hermes.suspend._state import copied
from optuna_hermes.suspend._tree import each_once
from optuna_hermes.suspend._unsaved import set_in

_ARRAYS = (torch.Tensor, np.ndarray)
_seen: weakref.WeakKeyDictionary[Any, _PlainAttributes] = weakref.WeakKeyDictionary()


class LoaderAttributes:
    """Generators, counters and index lists that a loader, its samplers and its data set keep.

    Of data sets, only the numbers, text and flags that the training sets: with worker processes
    they hold from its next epoch on, and where these persist those of the first epoch hold.
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
        self._attributes = [_attributes_of(each, _order_attributes) for each in self._samplers]
        self._data: list[_PlainAttributes] = []
        for each in _data_sets(getattr(loader, "dataset", None)):
            reads, together = _set_by_reading(type(each)), _set_together(type(each))
            find = functools.partial(_set_by_training, reads=reads, together=together)
            self._data.append(_attributes_of(each, find))
        self._attributes += self._data

    def state(self) -> dict[str, Any]:
        """Their present state; of attributes, those that have ever had other than first values."""
        return {
            "generators": states_of(self._holders()),
            "attributes": [each.state() for each in self._attributes],
            # These are filled when they are restored: the objective may hold them, too.
            "in_place": [each.in_place() for each in self._attributes],
        }

    def data_values(self) -> list[dict[str, Any]]:
        """The values of the data sets' attributes, also those that were never changed."""
        return [each.values() for each in self._data]

    def set_data_values(self, values: list[dict[str, Any]]) -> None:
        """Restore what ``data_values`` returned."""
        for attributes, own in zip(self._data, values, strict=False):
            attributes.set(own)

    def unwrap(self) -> None:
        """Do nothing: unlike a ``ResumableSampler`` it changes nothing in its loader."""

    def idle_state(self) -> dict[str, Any]:
        return {"own": self.state(), "seed": None, "workers": None}

    def load_idle_state(self, state: dict[str, Any]) -> None:
        self.load_state(state["own"])

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what ``state`` returned; attributes that it lacks get their first values."""
        set_states(self._holders(), state["generators"])
        parts = zip(self._attributes, state["attributes"], state["in_place"], strict=False)
        for attributes, changed, filled in parts:
            attributes.load_state(changed, filled)

    def _holders(self) -> list[GeneratorOwner]:
        loader = self._loader()
        samplers = [GeneratorOwner(f"sampler {n}", each) for n, each in enumerate(self._samplers)]
        return [GeneratorOwner("loader", loader), *holders_in(*samplers, *data_of(loader))]


class _PlainAttributes:
    """The plain attributes of a sampler or data set: first values in this process, and changes."""

    def __init__(self, owner: Any, find: Callable[[Any], dict[str, Any]]) -> None:
        self._owner: Callable[[], Any] = lambda: owner
        with contextlib.suppress(TypeError):
            self._owner = weakref.ref(owner)
        self._find = find
        first = find(owner)
        self._first = {name: _copy(value) for name, value in first.items()}
        self._made = weakref.WeakValueDictionary(  # weak, as those that are replaced may go
            {name: value for name, value in first.items() if isinstance(value, _ARRAYS)}
        )
        # Saved from then on: the next process may have other first values.
        self._changed: set[str] = set()

    def state(self) -> dict[str, Any]:
        now = self._find(self._owner())
        self._changed |= {n for n, value in now.items() if not _same(value, self._first.get(n))}
        return {name: _copy(value) for name, value in now.items() if name in self._changed}

    def values(self) -> dict[str, Any]:
        return {name: _copy(value) for name, value in self._find(self._owner()).items()}

    def set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            _set_attribute(self._owner(), name, value, in_place=False)

    def in_place(self) -> list[str]:
        """Names of the arrays that are those of the beginning."""
        now = self._find(self._owner())
        return [name for name, value in now.items() if self._made.get(name) is value]

    def load_state(self, state: dict[str, Any], in_place: Collection[str]) -> None:
        self._changed |= state.keys()
        now = self._find(self._owner())  # a value of another kind than first is left as it is
        first = {name: value for name, value in self._first.items() if name in now}
        for name, value in {**first, **state}.items():
            _set_attribute(self._owner(), name, value, in_place=name in in_place)


def _attributes_of(owner: Any, find: Callable[[Any], dict[str, Any]]) -> _PlainAttributes:
    """The attributes of a sampler or data set as they were when any loader with it was first seen.

    Args:
        find: returns those that may be kept.
    """
    # Later loaders with it would take values that the training has changed for its first ones.
    try:
        if owner not in _seen:
            _seen[owner] = _PlainAttributes(owner, find)
        return _seen[owner]
    except TypeError:  # it has no weak references or no hash
        return _PlainAttributes(owner, find)


def _order_attributes(sampler: Any) -> dict[str, Any]:
    """Attributes of a sampler that hold plain values, or lists and arrays of numbers."""
    return {
        name: value
        for name, value in getattr(sampler, "__dict__", {}).items()
        if type(value) in (bool, int, float, str, type(None), torch.Tensor)
        or (type(value) is list and all(type(each) in (int, float) for each in value))
        or (type(value) is np.ndarray and value.dtype.kind in "biuf")
    }


def _data_sets(data: Any) -> list[Any]:
    """The data sets of the user's classes among a data set and those that it wraps."""

    def inside(each: Any) -> list[Any]:
        if not isinstance(each, Dataset):
            return []
        own = getattr(each, "__dict__", {})  # as of ``Subset`` and ``ConcatDataset``
        several = own.get("datasets")
        return [own.get("dataset"), *(several if isinstance(several, list) else ())]

    every = [each for each, _ in each_once(data, inside) if hasattr(type(each), "__getitem__")]
    return [each for each in every if is_users_type(type(each))]


def _set_by_training(
    data: Any, *, reads: Collection[str], together: Collection[frozenset[str]]
) -> dict[str, Any]:
    """The numbers, text and flags in a data set, but for those that belong to what is not kept.

    Args:
        data: the data set.
        reads: names of attributes that reading sets, such as that of the part that was read last.
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
    waiting = ["__getitem__", "__getitems__", "__iter__", "__next__"]
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
        function: Any = inspect.unwrap(vars(each).get(name))  # type: ignore[arg-type]
        function = getattr(function, "fget", getattr(function, "func", function))
        codes = [function.__code__] if isinstance(function, types.FunctionType) else []
        for code in codes:
            yield code
            codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return value.copy() if isinstance(value, list | np.ndarray) else value


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)


def _set_attribute(owner: Any, name: str, value: Any, *, in_place: bool) -> None:
    present = vars(owner).get(name)
    if _same(value, present):
        return
    if type(present) is list and type(value) is list:
        present[:] = value  # the objective may hold it
    elif not (in_place and copied(present, value) is present):
        vars(owner)[name] = _copy(value)
