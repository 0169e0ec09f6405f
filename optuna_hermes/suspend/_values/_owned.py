"""Finds kept tensors that are, or are views of, those of named objects, by their addresses."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from optuna_hermes.errors import SuspendError
from optuna_hermes.suspend._values._objects import Region, overlap, region_of
from optuna_hermes.suspend._values._tree import storable, tensors_in

_Place = tuple[Any, ...]
"""Keys that lead from the root of a tree to a tensor."""


class NamedTensors:
    """The tensors of named objects by their memory: kept values may be these, or parts of them.

    Args:
        tree: returns a tree of the objects' tensors, in dictionaries, lists and tuples.
    """

    def __init__(self, tree: Callable[[], Any]) -> None:
        self._tree = functools.cache(tree)

    def holds(self, values: Iterable[Any]) -> bool:
        """True if one of the tensors is in the memory of one of these arrays and tensors."""
        found = self._by_memory
        return bool(found) and any(memory_of(each) in found for each in values)

    def part(self, value: Any, name: str) -> list[Any] | None:
        """A node for an array or tensor that is one of these, or a part of one; else None.

        Raises:
            CheckpointError: it shares memory with one in a way that could not be made again.
        """
        near = self._by_memory.get(memory_of(value))
        is_array = isinstance(value, np.ndarray)
        if near is None or not (value.size if is_array else value.numel()):
            return None
        tensor = _tensor_of_array(value, name, near[0][0]) if is_array else value
        region = region_of(tensor)
        rest = [is_array, tensor.requires_grad and tensor.is_leaf]
        if region in self._by_region:
            place, other = self._by_region[region]
            return ["part", list(place), list(other.shape), other is value, *rest, None]
        for place, other in near:
            around = region_of(other)
            if not region.overlaps(around):
                continue
            begin, end = region.bounds
            inside = around.bounds[0] <= begin and end <= around.bounds[1]
            if not (inside and other.is_contiguous() and other.dtype == tensor.dtype):
                raise overlap(name, _said(place))
            offset = (begin - around.bounds[0]) // region.itemsize
            view = [list(tensor.shape), list(tensor.stride()), offset]
            return ["part", list(place), list(other.shape), False, *rest, view]
        return None

    def read(self, place: _Place, shape: list[int], rest: list[Any]) -> Any:
        """The value of a node that ``part`` has returned.

        Raises:
            SuspendError: the tensor is not there, or has another shape.
        """
        itself, is_array, trained, view = rest
        tensor = self._at(place)
        whole = view is None or (isinstance(tensor, torch.Tensor) and tensor.is_contiguous())
        if not (isinstance(tensor, torch.Tensor) and list(tensor.shape) == shape and whole):
            raise SuspendError(f"it holds a part of {_said(place)}, which is not as it was")
        if itself:
            return tensor
        part = tensor.detach()
        if view is not None:
            size, strides, offset = view
            part = part.as_strided(size, strides, part.storage_offset() + offset)
        if is_array:
            return part.numpy()
        return part.requires_grad_() if trained else part

    def _at(self, place: _Place) -> Any:
        tree = self._tree()
        with contextlib.suppress(KeyError, IndexError, TypeError):
            return functools.reduce(operator.getitem, place, tree)
        return None

    @functools.cached_property
    def _by_memory(self) -> dict[int | None, list[tuple[_Place, torch.Tensor]]]:
        found: dict[int | None, list[tuple[_Place, torch.Tensor]]] = defaultdict(list)
        for place, tensor in tensors_in(self._tree(), ()):
            if storable(tensor) and tensor.numel():
                found[memory_of(tensor)].append((place, tensor))
        return dict(found)

    @functools.cached_property
    def _by_region(self) -> dict[Region, tuple[_Place, torch.Tensor]]:
        found: dict[Region, tuple[_Place, torch.Tensor]] = {}
        for place, tensor in (each for some in self._by_memory.values() for each in some):
            found.setdefault(region_of(tensor), (place, tensor))
        return found


def memory_of(value: object) -> int | None:
    """The address of the memory of an array or tensor and all its views; None for others."""
    while isinstance(value, np.ndarray) and isinstance(value.base, np.ndarray | torch.Tensor):
        value = value.base
    if isinstance(value, np.ndarray):
        return int(value.__array_interface__["data"][0])
    if isinstance(value, torch.Tensor) and storable(value):
        return value.untyped_storage().data_ptr()
    return None


def _tensor_of_array(array: np.ndarray[Any, Any], name: str, place: _Place) -> torch.Tensor:
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:  # it runs backwards, or its numbers are not torch's
        raise overlap(name, _said(place)) from error


def _said(place: _Place) -> str:
    return ".".join(map(str, place))
