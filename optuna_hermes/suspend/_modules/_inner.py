"""Modules in lists, dictionaries and objects, which attributes hold: they are no one's parts."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from optuna_hermes.suspend._modules._metrics import parts_with_metrics
from optuna_hermes.suspend._modules._module_state import ignored_of
from optuna_hermes.suspend._modules._unsaved import Attributes
from optuna_hermes.suspend._values._fingerprint import outside
from optuna_hermes.suspend._values._generators import dict_of
from optuna_hermes.suspend._values._tree import NUMBERS

_MOST_ITEMS = 500
"""Most items of a container that is looked into: longer ones are mostly of data."""
_MOST_LOOKED_AT = 20_000


class InnerModules:
    """The modules that attributes hold, and those that attributes of these hold, and so on.

    Their states are saved by what holds them, but few of their attributes are.

    Args:
        outer: the attributes, by keys that are the same in the trial's next process.
    """

    def __init__(self, outer: Mapping[str, Attributes]) -> None:
        self.attributes: dict[str, Attributes] = {}
        """Those of the modules and their parts, by such keys."""
        self.named: dict[str, object] = {}
        """The modules, their parts and parameters by such names: attributes may refer to these."""
        self._seen = {id(each.owner) for each in outer.values()}
        self._held: dict[str, set[int]] = {}
        self._known: dict[int, set[int]] = {}
        waiting = deque(outer.items())
        while waiting:
            key, each = waiting.popleft()
            with contextlib.suppress(Exception):  # of a user's class: the training goes on
                for place, module in self._modules_in(each):
                    waiting.extend(self._add(key, each, place, module).items())
        for known in self._known.values():
            known.update(map(id, self.named.values()))
        for key in self._held.keys() & self.attributes.keys():
            # What it is the first to hold is saved with it.
            self.attributes[key].known = {*self.attributes[key].known} - self._held[key]

    def _add(
        self, key: str, outer: Attributes, place: str, module: nn.Module
    ) -> dict[str, Attributes]:
        """Add a module and its parts, and return their attributes."""
        begin = f"inner {key} {place}."
        parts, known = dict(module.named_modules()), self._known_of(outer)
        new = {
            begin + at: outer.inner(f"{place}.{at}".rstrip("."), part, ignored_of(part), known)
            for at, part in parts.items()
            if id(part) not in self._seen and id(part) not in known
        }
        own = {**parts, **dict(module.named_parameters())}
        ids = set(map(id, own.values()))
        self._seen |= ids
        self._held.setdefault(key, set()).update(ids - known)
        self.named |= {begin + at: each for at, each in own.items()}
        self.attributes |= new
        return new

    def _known_of(self, outer: Attributes) -> set[int]:
        """The objects that the modules within know: one set for all, as they may be many."""
        if id(outer.known) not in self._known:
            known = {*outer.known}
            self._known |= {id(outer.known): known, id(known): known}
        return self._known[id(outer.known)]

    def _modules_in(self, attributes: Attributes) -> Iterator[tuple[str, nn.Module]]:
        """The modules in the values that were not seen before, by place."""
        waiting: list[tuple[str, Any]] = [*reversed(attributes.watched().items())]
        left = _MOST_LOOKED_AT
        while waiting and left:
            left -= 1
            place, value = waiting.pop()
            kind = type(value)
            if kind in NUMBERS or id(value) in self._seen or id(value) in attributes.known:
                continue
            # As values are written: nothing of what is outside, and the state of others.
            if issubclass(kind, torch.Tensor | np.ndarray) or outside(value):
                continue
            if issubclass(kind, nn.Module):
                if not parts_with_metrics(value):  # else their attributes are saved with it
                    yield place, value
            elif not hasattr(kind, "load_state_dict"):
                self._seen.add(id(value))
                waiting += ((f"{place}.{n}", each) for n, each in reversed(_inside(value)))


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
