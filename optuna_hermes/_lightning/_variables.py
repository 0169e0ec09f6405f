"""Variables that functions of a fit's objects close over, and objects that methods are bound to.

A callback's class within the objective may append to a list of the objective, and a
``LambdaCallback`` may have a function with ``nonlocal``, or a method of another object.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from types import CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from optuna_hermes.suspend._modules._unsaved import Attributes, reachable
from optuna_hermes.suspend._values._fingerprint import DATA, outside
from optuna_hermes.suspend._values._generators import (
    GENERATORS,
    cells_of,
    content_of,
    dict_of,
    is_users_function,
    is_users_type,
)

if TYPE_CHECKING:
    from optuna_hermes.suspend._values._classes import Classes

_MOST_ITEMS = 500
"""Longer containers hold data, not functions."""
_MOST_LOOKED_AT = 50_000


class Variables:
    """The variables of one fit, which are looked for once."""

    def __init__(self) -> None:
        self._found: _Found | None = None

    @property
    def bound(self) -> Collection[int]:
        """Ids of the objects that only methods lead to; their attributes are among the others."""
        return () if self._found is None else self._found.bound

    def attributes(
        self, owners: Iterable[object], others: Mapping[str, Attributes], known: Collection[int]
    ) -> dict[str, Attributes]:
        """The variables as attributes of the functions that have them, by keys.

        Args:
            owners: objects that may have functions: callbacks, modules and the like.
            others: attributes that are saved by themselves.
            known: ids of objects that are saved elsewhere.
        """
        if self._found is None:
            self._found = _Found(owners, others, known)
        found = self._found
        return {
            f"variables {name}": _Closed(name, cells, found, known)
            for name, cells in found.cells.items()
        }


class _Found:
    """The variables that functions of some objects close over: see ``Variables.attributes``."""

    def __init__(
        self, owners: Iterable[object], others: Mapping[str, Attributes], known: Collection[int]
    ) -> None:
        self.cells: dict[str, dict[str, CellType]] = defaultdict(dict)
        """By the names of the functions around, and of the variables."""
        self.functions: list[FunctionType] = []
        self.bound: set[int] = set()
        """Ids of the objects that only methods lead to."""
        values = (value for each in others.values() for value in each.watched().values())
        saved = reachable((each for each in values if not outside(each)), known=known)
        elsewhere = {*saved, *known}
        self._seen: set[int] = set()
        waiting = deque((each, True) for each in owners)
        while waiting and len(self._seen) < _MOST_LOOKED_AT:
            each, is_owner = waiting.popleft()
            if id(each) in self._seen or (id(each) in known and not is_owner):
                continue
            self._seen.add(id(each))
            if type(each) is FunctionType and is_users_function(each):
                self._add_cells(each)
            elif type(each) is MethodType and self._is_hidden(each.__self__, elsewhere):
                # No variable leads to it here. That is no loss: it stays the same object.
                self.bound.add(id(each.__self__))
                self._add(type(each.__self__).__qualname__, "self", CellType(each.__self__))
            waiting += ((part, False) for part in _parts(each, whole=is_owner))
        self.shared = {
            id(cell): id(content_of(cell))
            for some in self.cells.values()
            for cell in some.values()
            if id(content_of(cell)) in saved
        }
        """Those whose values are saved with what else has them, with the ids of these values."""

    def _is_hidden(self, value: object, elsewhere: Collection[int]) -> bool:
        """True for an object of a user's class that nothing else has, as far as is known."""
        is_new = id(value) not in elsewhere and id(value) not in self.bound
        return is_new and is_users_type(type(value)) and not outside(value)

    def _add_cells(self, function: FunctionType) -> None:
        self.functions.append(function)
        around = function.__qualname__.rpartition(".<locals>.")[0]
        for name, cell in cells_of(function).items():
            if id(cell) not in self._seen:
                self._seen.add(id(cell))
                self._add(around, name, cell)

    def _add(self, around: str, name: str, cell: CellType) -> None:
        cells = self.cells[around]
        same = sum(each.partition("#")[0] == name for each in cells)
        cells[f"{name}#{same + 1}" if same else name] = cell


class _Closed(Attributes):
    """The variables of one function that others within it close over."""

    def __init__(
        self, name: str, cells: dict[str, CellType], found: _Found, known: Collection[int]
    ) -> None:
        super().__init__(name, _Contents(cells), known=known)
        self._cells, self._found = cells, found

    def note(self, there: dict[tuple[str, ...], object]) -> None:
        """Do nothing: what cannot be stored of variables is named, and keeps no trial in memory."""

    def find_unmade(self) -> set[str]:
        return set()

    def watched(self) -> dict[str, Any]:
        return {name: value for name, value in self._all().items() if self._is_own(name, value)}

    def _is_own(self, name: str, value: Any) -> bool:
        """True for what is neither saved elsewhere nor surroundings of the training."""
        cell = self._cells[name]
        elsewhere = id(value) in self.known or self._found.shared.get(id(cell)) == id(value)
        return not (elsewhere or outside(value) or issubclass(type(value), GENERATORS))

    def _all(self) -> Any:
        return self.owner

    def _nameable(self) -> Classes:
        from optuna_hermes.suspend._values._classes import Classes

        return Classes.of_functions(self._found.functions)


class _Contents(MutableMapping[str, Any]):
    """The contents of cells by the names of the variables, of those that are set."""

    def __init__(self, cells: dict[str, CellType]) -> None:
        self._cells = cells

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cells[name].cell_contents
        except ValueError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._cells:  # else the objective has no such variable any more
            self._cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self._cells[name].cell_contents

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._cells if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _parts(value: Any, *, whole: bool) -> Iterable[Any]:
    """The parts that may lead to further functions: of code, containers, and users' objects.

    If ``whole`` is True, a value of whatever class is looked into.
    """
    kind = type(value)
    if kind is FunctionType:
        return [*map(content_of, cells_of(value).values()), *vars(value).values()]
    if kind is MethodType:
        return [value.__self__, value.__func__]
    if issubclass(kind, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if issubclass(kind, staticmethod | classmethod):
        return [value.__func__]
    if issubclass(kind, property):
        return [value.fget]
    if issubclass(kind, type):
        return list(vars(value).values()) if is_users_type(value) else ()
    if issubclass(kind, list | tuple | dict):
        if len(value) > _MOST_ITEMS:
            return ()
        return list(dict.values(value)) if issubclass(kind, dict) else value
    if not whole and (not is_users_type(kind) or issubclass(kind, DATA)):
        return ()
    return [*dict_of(value).values(), *(each for each in kind.__mro__ if is_users_type(each))]
