"""Classes that the objects of a checkpoint may be made of."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from types import FrameType, FunctionType, ModuleType
from typing import Any

from optuna_hermes.suspend._modules._unsaved import reachable
from optuna_hermes.suspend._values._fingerprint import outside
from optuna_hermes.suspend._values._functions import FunctionName
from optuna_hermes.suspend._values._objects import OF_PYTHON, package_of

_NO_USERS = {"torch", "lightning", "pytorch_lightning", *OF_PYTHON}
"""Packages whose classes a user's class is derived from, but that no user's values are of."""


class Classes:
    """The classes that objects may be made of: those that the user's own code can name.

    Args:
        names: namespaces in which classes are looked up.
        packages: names of the user's own packages.
        modules: imported modules, which the code can name with all that is below them.
    """

    def __init__(
        self,
        names: Iterable[Mapping[str, Any]],
        packages: Iterable[str],
        modules: Collection[ModuleType] = (),
    ) -> None:
        self.packages = set(packages) - OF_PYTHON
        self.functions: set[FunctionName] = set()
        """Functions that objects may have because there were any before the loop that did."""
        self._names = [*names, *map(vars, modules)]
        self._above = tuple({f"{each.__name__}." for each in modules})

    @classmethod
    def of(cls, owner: object) -> Classes:
        """The classes that the code of an object's class can name."""
        kinds = [kind for kind in type(owner).__mro__ if package_of(kind) not in _NO_USERS]
        values = (each for kind in kinds for each in vars(kind).values())
        names = {id(each): each for each in map(_globals_of, values) if type(each) is dict}
        modules = [each for g in names.values() for each in _modules(g)]
        return cls(names.values(), map(package_of, kinds), modules)

    @classmethod
    def of_functions(cls, functions: Iterable[FunctionType]) -> Classes:
        """The classes that some functions can name."""
        names = {id(each.__globals__): each.__globals__ for each in functions}.values()
        packages = (str(each.get("__name__", "")).partition(".")[0] for each in names)
        return cls(names, packages, [each for g in names for each in _modules(g)])

    @classmethod
    def of_frames(cls, frames: Iterable[FrameType]) -> Classes:
        """The classes that running functions can name, also as attributes of modules."""
        names: list[Mapping[str, Any]] = []
        modules: list[ModuleType] = []
        packages = set()
        for frame in frames:
            values = frame.f_locals.items()  # a proxy among them may raise for ``isinstance``
            local = {name: each for name, each in values if issubclass(type(each), type)}
            modules += _modules(frame.f_globals)
            names += [local, frame.f_globals]
            packages.add(str(frame.f_globals.get("__name__", "")).partition(".")[0])
        return cls(names, packages, modules)

    def others_in(self, value: object) -> set[str]:
        """Names of other packages, of whose classes there are objects in a value."""
        parts = (each for each in reachable([value]).values() if not outside(each))
        kinds = {kind for each in parts for kind in type(each).__mro__}
        known = sys.stdlib_module_names | _NO_USERS | {"numpy"} | self.packages
        return set(map(package_of, kinds)) - known

    def find(self, module: str, name: str) -> type | None:
        """Find a class by its module and name; None if the owner's code cannot name it."""
        is_below = module in sys.modules and module.startswith(self._above)
        below = vars(sys.modules[module]) if is_below else {}
        for names in (*self._names, below):
            found = names.get(name)
            if isinstance(found, type) and (found.__module__, found.__qualname__) == (module, name):
                # Of libraries' own parts none that would run code at its end.
                return None if names is below and hasattr(found, "__del__") else found
        return None


def _globals_of(value: object) -> object:
    """The namespace of a function, or of one behind an object that stands in for it."""
    try:
        return getattr(value, "__globals__", None)
    except Exception:  # of the __getattr__ of a value that is no method
        return None


def _modules(names: Mapping[str, Any]) -> list[ModuleType]:
    return [each for each in names.values() if issubclass(type(each), ModuleType)]
