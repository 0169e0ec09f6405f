"""Objects and random generators that the code of a user's loop leads to.

Of the generators those of modules, of classes, and closed over; those in local variables and
in what these hold are left out: see ``Locals``.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from optuna_hermes.suspend._loop_code._locals import frames_of_user, variables
from optuna_hermes.suspend._values._generators import (
    FoundGenerators,
    GeneratorOwner,
    dict_of,
    holders_in,
    is_users_type,
    items_of,
    set_states,
)

CREATION_ORDER = sys.version_info < (3, 14)
"""True if ``gc.get_objects`` has objects in the order of their creation, after a collection."""


class Code:
    """The functions that wait for the next item of a loop, and the code that these may call."""

    def __init__(self) -> None:
        self._bound: dict[CodeType, frozenset[str]] = {}
        self._generators: defaultdict[CodeType, FoundGenerators] = defaultdict(FoundGenerators)

    def enter(self, frame: FrameType) -> None:
        """Note the variables of new functions before a loop of ``frame``.

        Those of its body are made anew by each round, and lead to nothing that has a state.
        """
        for each in frames_of_user(frame):
            if each.f_code not in self._bound:
                self._bound[each.f_code] = frozenset(variables(each))

    def states(self, frame: FrameType | None) -> list[Any]:
        """The states of the generators; see ``states_of``.

        Args:
            frame: that of a generator's caller, which waits for the next item, or one called by it.
        """
        frames = list(frames_of_user(frame))
        if not frames:
            return []
        return self._generators[frames[0].f_code].states(lambda: self._holders(frames))

    def set_states(self, frame: FrameType | None, states: Iterable[Any]) -> None:
        """Restore what ``states`` has returned for a frame of the same function."""
        set_states(self._holders(list(frames_of_user(frame))), states)

    def _holders(self, frames: list[FrameType]) -> list[GeneratorOwner]:
        # First what all processes find by the same names: the globals that the functions use.
        roots = [GeneratorOwner(f"loop {n}", _function(each)) for n, each in enumerate(frames)]
        for number, each in enumerate(frames):
            bound = self._bound.get(each.f_code, ())
            for name, value in variables(each).items():
                if issubclass(type(value), nn.Module):  # what a proxy leads to may be gone
                    roots += classes_of(value.modules())
                elif name in bound:
                    roots.append(GeneratorOwner(f"loop {number}.{name}", value))
        return [each for each in holders_in(*roots) if each.in_code]


def places(frame: FrameType | None) -> dict[int, int]:
    """The places, by ``id``, of the objects that a loop's code leads to, in each process the same.

    None where ``gc.get_objects`` has them in the order of their creation: that is the same, too.
    """
    found: dict[int, int] = {}
    if CREATION_ORDER:
        return found
    roots = [GeneratorOwner("loop", variables(each)) for each in frames_of_user(frame)]
    roots += [GeneratorOwner("loop", _function(each)) for each in frames_of_user(frame)]
    for holder in holders_in(*roots):
        for value in items_of(holder.owner).values():
            inner = dict_of(value).values() if issubclass(type(value), DataLoader) else ()
            for each in (value, *inner):  # Accelerate's loaders hold another one
                found.setdefault(id(each), len(found))
    return found


def classes_of(values: Iterable[object]) -> list[GeneratorOwner]:
    """The classes of some objects: searching the many parts of modules would take long."""
    kinds = dict.fromkeys(map(_class_of_user, values))
    return [GeneratorOwner(f"{each.__module__}.{each.__qualname__}", each) for each in kinds]


def _class_of_user(value: object) -> type:
    """The class of an object, or the first of its bases that a user has written."""
    return next(filter(is_users_type, type(value).__mro__), type(value))


def _function(frame: FrameType) -> FunctionType:
    """A function with the code and globals of a frame, but without what it closes over."""
    closure = tuple(CellType() for _ in frame.f_code.co_freevars)
    return FunctionType(frame.f_code, frame.f_globals, closure=closure)
