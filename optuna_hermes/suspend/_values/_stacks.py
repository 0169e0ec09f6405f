"""Many like items of a container as few arrays or lists: of a replay buffer, for example.

A node for each of its thousands of arrays would take longer than training a unit. What is written
here is taken apart again into the nodes that a writer makes of each item, before it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from optuna_hermes.suspend._values._tree import NUMBERS, is_array, is_scalar

LEAST = 16
"""Least items that are written together."""
_MOST_BYTES = 1 << 12
"""Most bytes of an array that is copied into a larger one: of others the copy would cost more."""
_DTYPES = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
CONTAINERS = (list, dict)
"""Classes of the containers of numbers and text that a stack may hold."""
_NEW, _IN_PLACE, _NONE = -1, -2, -3
"""In the place of an item's number: it is the next of the stack, or is None."""


class Stack:
    """Like arrays or tensors, or lists or dictionaries of numbers; some several times, and None."""

    def __init__(self) -> None:
        self._new: list[Any] = []
        self._numbers: list[int] = []

    def add(self, value: Any, *, in_place: bool) -> None:
        """Add the next item, of which there is no node so far."""
        self._new.append(value)
        self._numbers.append(_IN_PLACE if in_place else _NEW)

    def refer(self, number: int | None) -> None:
        """Add an item that has this number; None for an item that is None."""
        self._numbers.append(_NONE if number is None else number)

    def node(self) -> list[Any]:
        stack: Any = None
        if self._new and isinstance(self._new[0], torch.Tensor):
            stack = torch.stack(self._new)
        elif self._new and type(self._new[0]) in CONTAINERS:
            stack = [each.copy() for each in self._new]
        elif self._new:
            stack = _joined(self._new).reshape(-1, *self._new[0].shape)
        return ["stack", stack, np.array(self._numbers)]


def stack_or_node(items: Sequence[Any]) -> Stack | list[Any] | None:
    """A stack to be filled with like arrays, a node of numbers and text, or None for others.

    Args:
        items: one or more.
    """
    examples = {type(each): each for each in items}
    others = [each for kind, each in examples.items() if kind not in NUMBERS]
    if all(map(is_scalar, others)):
        if len(examples) > 1 or not others:
            return ["plain", list(items)]
        return ["scalars", _joined(items)]
    arrays = [each for each in items if each is not None]
    alike = len(others) == 1 and {type(None), type(others[0])} >= examples.keys()
    return Stack() if alike and _are_alike(arrays) else None


def _are_alike(arrays: list[Any]) -> bool:
    """True for small arrays or tensors of one class that a stack holds in full."""
    first, looks = arrays[0], set[tuple[Any, ...]]()
    if type(first) in CONTAINERS:
        items = (each.values() for each in arrays) if type(first) is dict else ()
        return NUMBERS.issuperset(map(type, chain.from_iterable((*arrays, *items))))
    if is_array(first):
        looks = {(each.dtype, each.shape, each.flags.c_contiguous) for each in arrays}
        alike = first.flags.c_contiguous
    elif type(first) is torch.Tensor and not any(each.is_nested for each in arrays):
        looks = {(each.dtype, each.shape, each.layout, each.device) for each in arrays}
        alike = first.layout is torch.strided and first.device.type == "cpu"
        alike = alike and first.dtype in _DTYPES
        alike = alike and not any(each.requires_grad for each in arrays)
        alike = alike and all(each.is_contiguous() for each in arrays)
    return len(looks) == 1 and alike and 0 < first.nbytes <= _MOST_BYTES


def _joined(items: Sequence[Any]) -> Any:
    """Arrays or numbers of one dtype as one array, also if that has another order of bytes."""
    octets = b"".join(each.tobytes() for each in items)
    return np.frombuffer(octets, items[0].dtype)


def unstacked(row: list[Any], columns: Iterable[list[Any]]) -> list[list[Any]]:
    """The nodes of a container's items.

    Args:
        row: the begin of the node of each tuple; empty if the items are none.
        columns: nodes of the items, or of those of tuples: one for each place in these.
    """
    nodes = map(_nodes, columns)
    return [[*row, list(each)] for each in zip(*nodes, strict=True)] if row else next(nodes)


def _nodes(column: list[Any]) -> list[list[Any]]:
    kind, items, *rest = column
    if kind in ("plain", "scalars"):
        return [["plain", each] for each in items]
    if isinstance(items, list):
        new = iter(items)
    else:  # also of one number each: as arrays
        new = (items[index, ...] for index in range(0 if items is None else len(items)))
    return [_of_stack(number, new) for number in rest[0].tolist()]


def _of_stack(number: int, new: Iterator[Any]) -> list[Any]:
    if number == _NONE:
        return ["plain", None]
    if number >= 0:
        return ["same", number]
    value = next(new)
    if isinstance(value, torch.Tensor):
        node = ["tensor", value.clone(), False, False]  # which owns its memory
    elif type(value) is list:
        node = ["list", ["numbers", value]]
    elif type(value) is dict:
        node = ["dict", [["numbers", [*value]], ["numbers", [*value.values()]]]]
    else:
        node = ["array", "C", value]
    return ["in place", node] if number == _IN_PLACE else node
