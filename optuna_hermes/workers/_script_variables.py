"""Variables of a script that its objective changes, which the script does not get back."""

from __future__ import annotations

import contextlib
from collections.abc import MutableMapping, MutableSequence, MutableSet
from numbers import Number
from types import FunctionType
from typing import Any

from optuna_hermes.workers._preload import function_of, global_names

_CONTAINERS = (MutableSequence, MutableMapping, MutableSet)


class ScriptVariables:
    """The global variables of an objective's module, and its attributes, before it is called.

    A container has changed if it has another length, a number in an attribute if it is another one,
    and a variable of a ``global`` statement if it refers to another object. Settings that each
    trial begins with, such as ``config.lr = trial.suggest_float(...)``, are none of these.
    """

    def __init__(self, objective: Any) -> None:
        self._objective = objective
        self._before = _states(objective)

    def changed(self) -> list[str]:
        """Names of those that have changed since."""
        now, nothing = _states(self._objective), (None, 0)
        return sorted(
            name for name, each in now.items() if not _alike(self._before.get(name, nothing), each)
        )


def _states(objective: Any) -> dict[str, tuple[object, int]]:
    """What of each variable is compared: the object itself, or None, and a length, or 0."""
    function = function_of(objective)
    if function is None:
        return {}
    used, assigned = global_names(function)
    variables = function.__globals__
    found = {name: _state(variables[name], name in assigned) for name in used if name in variables}
    called = getattr(objective, "func", objective)  # of a partial
    owner = getattr(called, "__self__", called)
    if not isinstance(owner, FunctionType):
        for name, value in getattr(owner, "__dict__", {}).items():
            found[f"self.{name}"] = _state(value, issubclass(type(value), Number))
    return found


def _alike(one: tuple[object, int], other: tuple[object, int]) -> bool:
    same = one[0] is other[0] or (issubclass(type(one[0]), Number) and one[0] == other[0])
    return same and one[1] == other[1]


def _state(value: object, identity: bool) -> tuple[object, int]:
    kind, length = type(value), 0
    if issubclass(kind, _CONTAINERS) or hasattr(kind, "iloc"):  # a table of pandas
        with contextlib.suppress(Exception):  # a file that is closed, as that of h5py
            length = len(value)  # type: ignore[arg-type]
    return value if identity else None, length
