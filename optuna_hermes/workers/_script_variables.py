"""Variables of a script that its objective changes, which the script does not get back."""

from __future__ import annotations

from collections import deque
from numbers import Number
from types import FunctionType
from typing import Any, NamedTuple

from optuna_hermes.workers._preload import function_of, global_names

_CONTAINERS = (list, dict, set, deque)


class _Variable(NamedTuple):
    value: object
    length: int
    """Of a list, a dictionary, a set or a table, else 0."""
    rebound: bool
    """True if another object in its place is a change."""


class ScriptVariables:
    """The global variables of an objective's module, and its attributes, before it is called.

    A container has changed if it has another length, a number in an attribute if it is another one,
    and a variable of a ``global`` statement if it refers to another object. Settings that each
    trial begins with are none of these: attributes, variables and keys that it sets for the first
    time, and numbers in place of None.
    """

    def __init__(self, objective: Any) -> None:
        self._objective = objective
        self._before = _variables(objective)

    def changed(self) -> list[str]:
        """Names of those that have changed since."""
        now = _variables(self._objective)
        before = self._before.items()
        return sorted(name for name, each in before if name in now and _differ(each, now[name]))


def _variables(objective: Any) -> dict[str, _Variable]:
    function = function_of(objective)
    if function is None:
        return {}
    used, assigned = global_names(function)
    variables = function.__globals__
    found = {name: _seen(variables[name], name in assigned) for name in used if name in variables}
    called = getattr(objective, "func", objective)  # of a partial
    owner = getattr(called, "__self__", called)
    if not isinstance(owner, FunctionType):
        for name, value in getattr(owner, "__dict__", {}).items():
            found[f"self.{name}"] = _seen(value, _is_number(value))
    return found


def _seen(value: object, rebound: bool) -> _Variable:
    # Not isinstance: it reads __class__, which runs the code of proxies. And not every class with a
    # length: that of a store in a bucket lists it, that of a lazy table computes it.
    kind = type(value)
    measured = issubclass(kind, _CONTAINERS) or _is_of_pandas(kind)
    return _Variable(value, len(value) if measured else 0, rebound)  # type: ignore[arg-type]


def _is_of_pandas(kind: type) -> bool:
    return hasattr(kind, "iloc") and any(e.__module__.startswith("pandas") for e in kind.__mro__)


def _differ(before: _Variable, now: _Variable) -> bool:
    if before.value is now.value:
        # A dictionary that is not empty at first holds settings.
        return before.length != now.length and not (type(now.value) is dict and before.length)
    if _is_number(before.value) and _is_number(now.value):
        return before.rebound and before.value != now.value
    return before.rebound and now.rebound


def _is_number(value: object) -> bool:
    return issubclass(type(value), Number)
