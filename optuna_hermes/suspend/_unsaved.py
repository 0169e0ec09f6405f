"""What changes while a run trains and is in no ``state_dict``: saved where it can be, or named.

Only what differs from the first batch is looked at: what the objective makes anew is no loss.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any

from optuna_hermes.errors import CheckpointError
from optuna_hermes.suspend._fingerprint import fingerprint
from optuna_hermes.suspend._values import Classes, read_value, write_value

log = logging.getLogger(__name__)

_LEAVES = (bool, int, float, complex, str, bytes, type, types.FunctionType, types.ModuleType)
_MOST_REACHED = 20_000


class Attributes:
    """The attributes of one object that change while it trains.

    Args:
        name: as a message names the object.
        owner: the object.
        ignores: whether an attribute, by name and value, is nobody's business or saved elsewhere.
        known: what is saved elsewhere, by ``id``.
    """

    def __init__(
        self,
        name: str,
        owner: object,
        ignores: Callable[[str, Any], bool] = lambda name, value: False,
        known: Collection[int] = (),
    ) -> None:
        self.lost: set[str] = set()
        """Those that have changed and cannot be saved."""
        self._name = name
        self._owner = owner
        self._ignores = ignores
        self._known = known
        self._before: dict[str, int] = {}
        self._changed: set[str] = set()

    def begin(self) -> None:
        """The first batch of this process comes next."""
        self._before = {name: fingerprint(each, self._known) for name, each in self._all().items()}

    def state_dict(self) -> dict[str, Any]:
        """Those that have changed, as trees."""
        state = {}
        for name, value in self._all().items():
            if name not in self._changed:
                if self._before.get(name) == fingerprint(value, self._known):
                    continue
                self._changed.add(name)  # and need not be looked at again
            try:
                state[name] = write_value(name, value, self._known)
            except (CheckpointError, TypeError, ValueError, RuntimeError, AttributeError) as error:
                log.debug("%s.%s: %s", self._name, name, error)
                self.lost.add(f"{self._name}.{name}")
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put them back; to be called before ``begin``."""
        classes = Classes.of(self._owner)
        attributes = vars(self._owner)
        for name, node in state.items():
            self._changed.add(name)
            try:
                attributes[name] = read_value(node, attributes.get(name), classes)
            except Exception as error:  # whatever it is: the rest of the run is as it was
                log.debug("%s.%s: %s", self._name, name, error)
                self.lost.add(f"{self._name}.{name}")

    def _all(self) -> dict[str, Any]:
        every = vars(self._owner).items()
        return {name: value for name, value in every if not self._ignores(name, value)}


def reachable(roots: Iterable[object]) -> set[int]:
    """The objects that others lead to by attributes, items and keys, by ``id``."""
    found: dict[int, object] = {}
    waiting = list(roots)
    while waiting and len(found) < _MOST_REACHED:
        each = waiting.pop()
        if id(each) in found or isinstance(each, _LEAVES):
            continue
        found[id(each)] = each
        if isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, list | tuple | set):
            waiting += each
        waiting += getattr(each, "__dict__", {}).values()
    return set(found)


class Unsaved:
    """Such attributes of several objects.

    Args:
        parts: by a key that is the same in the run's next process.
    """

    def __init__(self, parts: dict[str, Attributes]) -> None:
        self._parts = parts

    @property
    def lost(self) -> list[str]:
        """The names of those that have changed and are in no checkpoint."""
        return sorted(name for part in self._parts.values() for name in part.lost)

    def begin(self) -> None:
        """The first batch of this process comes next."""
        for part in self._parts.values():
            part.begin()

    def state_dict(self) -> dict[str, Any]:
        """What has changed, as trees."""
        states = {key: part.state_dict() for key, part in self._parts.items()}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put it back; to be called before ``begin``."""
        for key, saved in state.items():
            if key in self._parts:
                self._parts[key].load_state_dict(saved)
