"""Names of objects in lists, which may be elsewhere by the time that a checkpoint is made."""

from __future__ import annotations

from typing import Any
from weakref import ref


class InnerNames:
    """Names of the objects that each process makes: these keep them wherever they are put.

    Parts of modules are named by their places there, by which these load their states.
    """

    def __init__(self) -> None:
        self._own: dict[int, tuple[ref[Any], str]] = {}
        self._at: dict[str, tuple[type, str]] = {}

    def note(self, place: str, value: Any) -> None:
        """Note that each process makes this object, at a place."""
        kind = type(value)
        if kind.__weakrefoffset__:
            name = self.of(place, value) or place
            self._own[id(value)] = ref(value), name
            self._at.setdefault(place, (kind, name))

    def of(self, place: str, value: object, *, is_part: bool = False) -> str | None:
        """The name of an object: its own, else of the one of its class that was at its place."""
        made, name = self._own.get(id(value), (None, ""))
        if made is not None and made() is value and not is_part:
            return name
        kind, name = self._at.get(place, (None, ""))
        return name if kind is type(value) else None
