"""Modules and optimizers in lists, dictionaries and objects of attributes: they are no parts."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import nn

from optuna_hermes.suspend._modules._metrics import parts_with_metrics
from optuna_hermes.suspend._modules._module_state import ignored_of
from optuna_hermes.suspend._modules._unsaved import Attributes, is_private
from optuna_hermes.suspend._values._fingerprint import outside
from optuna_hermes.suspend._values._generators import dict_of
from optuna_hermes.suspend._values._tree import NUMBERS

_MOST_ITEMS = 500
"""Most items of a container that is looked into: longer ones are mostly of data."""
_MOST_LOOKED_AT = 20_000


class InnerModules:
    """The objects with a state that attributes hold, and those of modules among these, and so on.

    Their states are saved by what holds them, but few of their attributes are.

    Args:
        outer: the attributes, by keys that are the same in the trial's next process.
        first: the names of those that each process makes, by ``id``; else each is named by its
            present place.
    """

    def __init__(
        self, outer: Mapping[str, Attributes], first: Mapping[int, str] | None = None
    ) -> None:
        self.attributes: dict[str, Attributes] = {}
        """Those of the modules and their parts, by such keys."""
        self.named: dict[str, object] = {}
        """The objects, their parts and parameters by such names: attributes may refer to these."""
        self.ids: set[int] = set()
        """Ids of all of them."""
        self.places: dict[tuple[str, str], int] = {}
        """Ids of what is at each place of a key: one may be at several."""
        self._first = first or {}
        self._seen = {id(each.owner) for each in outer.values()}
        self._held: dict[str, dict[str, set[int]]] = {}
        """Ids of those that are saved with an attribute, by the key and the name of it."""
        self._known: dict[int, set[int]] = {}
        waiting = deque(outer.items())
        while waiting:
            key, each = waiting.popleft()
            with contextlib.suppress(Exception):  # of a user's class: the training goes on
                for name, place, owner in self._owners_in(key, each):
                    waiting.extend(self._add(key, each, name, place, owner).items())
        for key, each in outer.items():
            # By places, one that moves would be another for what refers to it.
            self._let_know(key, each) if first else each.know(each.known, {})
        for key, each in self.attributes.items():
            self._let_know(key, each)

    def _let_know(self, key: str, attributes: Attributes) -> None:
        """Let attributes refer to the objects, but for those that they are the first to hold."""
        attributes.know(self._known_of(attributes), self._held.get(key, {}))

    def _add(
        self, key: str, outer: Attributes, name: str, place: str, owner: Any
    ) -> dict[str, Attributes]:
        """Add an object and its parts, and return their attributes."""
        begin = f"inner {key} {place}."
        known = outer.known
        parts = dict(owner.named_modules()) if isinstance(owner, nn.Module) else {}
        own = {**parts, **dict(owner.named_parameters())} if parts else {"": owner}
        if parts_with_metrics(owner):  # their attributes are saved with it
            parts = {}
        names = {at: self._first.get(id(each), begin + at) for at, each in own.items()}
        new = {
            names[at]: outer.inner(f"{place}.{at}".rstrip("."), part, _ignored_by(part), known)
            for at, part in parts.items()
            if id(part) not in self._seen and id(part) not in known
        }
        new |= {
            f"{names[at]} {n}": outer.inner(f"{place}.{at}.{n}", each, is_private, known)
            for at, part in parts.items()
            if names[at] in new
            for n, each in _tensors_of(part).items()
        }
        ids = set(map(id, own.values()))
        held = self._held.setdefault(key, {}).setdefault(name, set())
        held |= ids.difference(self._seen, known)
        self._seen |= ids
        self.ids |= ids
        self.named |= {names[at]: each for at, each in own.items()}
        self.attributes |= new
        return new

    def _known_of(self, attributes: Attributes) -> set[int]:
        """All that they may know: one set for all, as it may be large."""
        known = attributes.known
        if id(known) not in self._known:
            self._known[id(known)] = {*known, *self.ids}
        return self._known[id(known)]

    def _owners_in(self, key: str, attributes: Attributes) -> Iterator[tuple[str, str, Any]]:
        """The objects in the values that were not seen before, by attribute and place."""
        waiting: list[tuple[str, str, Any]] = [
            (name, name, value) for name, value in reversed(attributes.watched().items())
        ]
        left = _MOST_LOOKED_AT
        while waiting and left:
            left -= 1
            name, place, value = waiting.pop()
            kind = type(value)
            if kind in NUMBERS or id(value) in attributes.known:
                continue
            # As values are written: nothing of what is outside, and the state of others.
            if kind is nn.Parameter or hasattr(kind, "load_state_dict"):
                if not outside(value) and kind.__weakrefoffset__:
                    self.places[key, attributes.said(place)] = id(value)
                    if id(value) not in self._seen:
                        yield name, place, value
            elif id(value) in self._seen or issubclass(kind, torch.Tensor | np.ndarray):
                continue
            elif not outside(value):
                self._seen.add(id(value))
                inside = reversed(_inside(value))
                waiting += ((name, f"{place}.{n}", each) for n, each in inside)


def _ignored_by(part: nn.Module) -> Callable[[str, Any], bool]:
    """The test of ``ignored_of``, which does not hold the module."""
    now = ref(part)

    def ignores(name: str, value: Any) -> bool:
        part = now()
        return part is None or ignored_of(part)(name, value)

    return ignores


def _tensors_of(part: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a module itself, not of its parts."""
    return {**dict(part.named_parameters(recurse=False)), **dict(part.named_buffers(recurse=False))}


def _inside(value: Any) -> list[tuple[Any, Any]]:
    """The items and attributes of a value, with names that are the same in each process."""
    kind, items = type(value), []
    if issubclass(kind, list | tuple | deque | dict) and len(value) <= _MOST_ITEMS:
        if issubclass(kind, dict):
            pairs = enumerate(value.items())
            items = [(key if type(key) in NUMBERS else n, each) for n, (key, each) in pairs]
        else:
            items = list(enumerate(value))
    return [*items, *dict_of(value).items()]
