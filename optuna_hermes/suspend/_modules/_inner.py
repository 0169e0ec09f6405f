"""Modules and optimizers in lists, dictionaries and objects of attributes: they are no parts."""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from optuna_hermes.suspend._modules._inner_names import InnerNames
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
        names: those of what each process makes; anything else is named by its place.
    """

    def __init__(self, outer: Mapping[str, Attributes], names: InnerNames) -> None:
        self.attributes: dict[str, Attributes] = {}
        """Those of the modules, their parts and tensors, by such keys."""
        self.named: dict[str, object] = {}
        """The objects, their parts and tensors by such names: attributes may refer to these."""
        self.made: set[int] = set()
        """Ids of those whose names the next process has, too."""
        self._names = names
        self._places: list[tuple[str, object]] = []
        self._name_of: dict[int, str] = {}
        self._said: dict[str, list[str]] = defaultdict(list)
        self._outer = {id(each.owner) for each in outer.values()}
        self._held: dict[str, set[int]] = defaultdict(set)
        self._known: dict[int, set[int]] = {}
        waiting = deque(outer.items())
        while waiting:
            key, each = waiting.popleft()
            with contextlib.suppress(Exception):  # of a user's class: the training goes on
                for place, owner in self._owners_in(each):
                    waiting.extend(self._add(key, each, place, owner).items())
        for known in self._known.values():
            known.update(self._name_of)
        for key in self._held.keys() & self.attributes.keys():
            # What it is the first to hold is saved with it.
            self.attributes[key].known = {*self.attributes[key].known} - self._held[key]

    @property
    def clashes(self) -> list[str]:
        """Places in messages of those that would become one object in the next process."""
        found = [place for each in self._said.values() if each[1:] for place in each]
        return [each for each in found if each.rpartition(".")[0] not in found]

    def note_names(self) -> None:
        """Let all keep their names, as each process makes them at this moment."""
        for place, each in self._places:
            self._names.note(place, each)

    def _add(self, key: str, outer: Attributes, place: str, owner: Any) -> dict[str, Attributes]:
        """Add an object, its parts and tensors, and return their attributes."""
        known, said = self._known_of(outer), outer.said(place)
        own = {} if id(owner) in self._name_of else _parts_of(owner)
        new = {id(each) for each in own.values() if id(each) not in self._name_of}
        new -= self._outer | known
        begin = self._named(f"inner {key} {place}.", owner, said).rstrip(".")
        names = {
            at: self._named(f"{begin}.{at}", each, f"{said}.{at}", is_part=True)
            for at, each in own.items()
        }
        self._held[key] |= set(map(id, own.values())) - known
        if own and parts_with_metrics(owner):  # their attributes are saved with it
            return {}
        found = {
            names[at]: outer.inner(f"{place}.{at}".rstrip("."), each, _ignored_by(each), known)
            for at, each in own.items()
            if id(each) in new and issubclass(type(each), nn.Module | torch.Tensor)
        }
        self.attributes |= found
        return found

    def _named(self, place: str, value: object, said: str, *, is_part: bool = False) -> str:
        """The name of an object at a place."""
        self._places.append((place, value))
        if id(value) not in self._name_of:
            made = self._names.of(place, value, is_part=is_part)
            if made is not None:
                self.made.add(id(value))
            name = self._name_of[id(value)] = place if made is None else made
            self.named[name] = value
            self._said[name].append(said)
        return self._name_of[id(value)]

    def _known_of(self, outer: Attributes) -> set[int]:
        """The objects that the modules within know: one set for all, as they may be many."""
        if id(outer.known) not in self._known:
            known = {*outer.known}
            self._known |= {id(outer.known): known, id(known): known}
        return self._known[id(outer.known)]

    def _owners_in(self, attributes: Attributes) -> Iterator[tuple[str, Any]]:
        """The objects in the values, by place."""
        waiting: list[tuple[str, Any]] = [*reversed(attributes.watched().items())]
        left, seen = _MOST_LOOKED_AT, {*self._outer}
        while waiting and left:
            left -= 1
            place, value = waiting.pop()
            kind = type(value)
            if kind in NUMBERS or id(value) in seen or id(value) in attributes.known:
                continue
            # As values are written: nothing of what is outside, and the state of others.
            if kind is nn.Parameter or hasattr(kind, "load_state_dict"):
                if not outside(value):
                    yield place, value
            elif not (issubclass(kind, torch.Tensor | np.ndarray) or outside(value)):
                seen.add(id(value))
                waiting += ((f"{place}.{n}", each) for n, each in reversed(_inside(value)))


def _parts_of(owner: Any) -> dict[str, Any]:
    """An object, its parts and their tensors, by places in it."""
    if not issubclass(type(owner), nn.Module):
        return {"": owner}
    return dict((*owner.named_modules(), *owner.named_parameters(), *owner.named_buffers()))


def _ignored_by(owner: Any) -> Callable[[str, Any], bool]:
    """A test of the attributes of a module or tensor: True if there is no need to save one."""
    return ignored_of(owner) if issubclass(type(owner), nn.Module) else is_private


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
