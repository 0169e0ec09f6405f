"""Trees of plain values: numbers and text, arrays and tensors, and containers of these."""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from optuna_hermes.errors import CheckpointError, SuspendError
from optuna_hermes.suspend._loaders._order import joined
from optuna_hermes.suspend._values._custom import ValueReader, ValueWriter
from optuna_hermes.suspend._values._tree import NUMBERS, frozen, storable

_PLAIN = (np.ndarray, torch.Tensor, deque, Counter, OrderedDict, defaultdict)
"""Classes beside Python's own; without their subclasses."""
_PART_BYTES = 1 << 11
"""Bytes for which each part counts, but the numbers of a list: it takes time, too."""


def written(name: str, value: object, made: Mapping[int, object], most_bytes: int) -> list[Any]:
    """Convert a plain value to a tree.

    Args:
        name: its name in messages.
        value: any value.
        made: see ``ValueWriter``.
        most_bytes: memory that it may take, by a rough count.

    Raises:
        CheckpointError: it is not plain, or takes more.
    """
    return _PlainWriter(whole=True, made=made, most=most_bytes).write_only(name, value)


def read(tree: list[Any], present: Any) -> Any:
    """The value of a tree, in the containers of ``present`` and those of its arrays that are made.

    ``present`` itself if the tree needs more of it: what makes the values of a ``defaultdict``.
    """
    with contextlib.suppress(SuspendError):
        return _PlainReader(None).node(frozen(tree), present)
    return present


class _PlainWriter(ValueWriter):
    def _function(self, value: Any) -> list[Any] | None:
        return None  # it is code, and so refused

    def _count(self, parts: int, place: tuple[str, ...]) -> None:
        super()._count(parts * _PART_BYTES, place)

    def _items(
        self, items: Iterable[Any], place: tuple[str, ...], names: Iterable[Any] | None = None
    ) -> list[Any]:
        found = list(items)
        if NUMBERS.issuperset(map(type, found)):
            super()._count((8 if names is None else _PART_BYTES) * len(found), place)
            return ["numbers", found]
        numbers = joined(found) if names is None else None  # others may hold those of a mapping
        if numbers is None:
            return super()._items(found, place, names)
        super()._count(numbers.nbytes, place)
        return ["joined", numbers]

    def _stacked(self, items: list[Any], place: tuple[str, ...]) -> list[Any] | None:
        return None  # each part is checked and counted by itself

    def _other(self, value: Any, place: tuple[str, ...]) -> list[Any]:
        whole = not isinstance(value, torch.Tensor) or storable(value)  # a sparse one is not
        if type(value) not in _PLAIN or not whole:
            raise CheckpointError(f"{'.'.join(place)} is a {type(value).__qualname__}")
        super()._count(getattr(value, "nbytes", 0), place)
        return super()._other(value, place)


class _PlainReader(ValueReader):
    def _items(self, nodes: list[Any], present: Any) -> list[Any]:
        return list(nodes[1]) if nodes[:1] == ["joined"] else super()._items(nodes, present)
