"""A loader that calls a function for each pass over it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

Batch = TypeVar("Batch")


class Passes(Generic[Batch]):
    """Stands in for a loader; its batches come from a function.

    Args:
        loader: provides the length and all other attributes.
        begin: returns the batches of the next pass.
    """

    def __init__(self, loader: Iterable[Batch], begin: Callable[[], Iterator[Batch]]) -> None:
        self._loader = loader
        self._begin = begin

    def __iter__(self) -> Iterator[Batch]:
        return self._begin()

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # of a loader without one, an error

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in vars(self):
            raise AttributeError(name)
        return getattr(self._loader, name)
