"""Copies of a trial's state in main memory, from which it is written while the trial goes on."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import psutil
import torch

from optuna_hermes.suspend._tiers._accelerators import Accelerator, accelerator_of, used_accelerator
from optuna_hermes.suspend._tiers._arena import aligned, host_block
from optuna_hermes.suspend._values._tree import frozen, leaves, storable

_BLOCK_BYTES = 64 << 20
_PINNED_SHARE = 0.4
"""Most of the available memory that one buffer pins: what is pinned cannot be swapped."""


class Copy:
    """A copy of a state.

    Args:
        tree: the state, in main memory.
        buffer: what holds the tensors that were on an accelerator; None if none was.
    """

    def __init__(self, tree: Any, buffer: _Buffer | None = None) -> None:
        self.tree = tree
        self._buffer = buffer

    def release(self) -> None:
        """Let the next copy take this one's memory; the tree must not be used any more."""
        self.tree = None
        if self._buffer is not None:
            self._buffer.release()


class Copies:
    """Copies the states of one trial, from accelerators into pinned buffers.

    There are two buffers at most: one is filled while the other one is written.
    """

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []

    def of_device(self, tree: Any) -> bool:
        """True if a state has tensors on accelerators."""
        return bool(_on_accelerators(tree))

    def copy(self, tree: Any) -> Copy:
        """Copy a state; when this returns, its tensors may be changed on any stream."""
        tensors = _on_accelerators(tree)
        if not tensors:
            return Copy(frozen(tree))
        buffer = next((each for each in self._buffers if not each.used), None)
        if buffer is None:
            buffer = _Buffer()
            self._buffers.append(buffer)
        copies = buffer.fill(tensors)
        return Copy(frozen(tree, dict(zip(map(id, tensors), copies, strict=True))), buffer)

    def free(self) -> None:
        """Give back the memory: that of a copy which is being written once it is released."""
        buffers, self._buffers = self._buffers, []
        for buffer in buffers:
            buffer.leave()


class _Buffer:
    """Host memory for the tensors of one state, pinned if that is possible."""

    def __init__(self) -> None:
        self.used = False
        self._leaves = False
        self._lock = threading.Lock()
        self._sizes: list[int] = []
        self._places: list[torch.Tensor] = []
        self._streams: dict[torch.device, Any] = {}
        self._accelerator: Accelerator | None = None

    @torch.inference_mode(False)  # it outlives the mode in which it was made
    def fill(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors here, in place of what was here before; return the copies."""
        self.used = True
        self._fit([tensor.nbytes for tensor in tensors])
        copies = []
        by_device = defaultdict(list)
        for tensor, place in zip(tensors, self._places, strict=True):
            copies.append(place.view(tensor.dtype).view(tensor.shape))
            by_device[tensor.device].append((copies[-1], tensor.detach()))
        # All are queued before one is waited for: devices copy at the same time.
        for device, pairs in by_device.items():
            self._queue(device, pairs)
        for device in by_device:
            # Not only on the training's own stream: the next kernel may write on any other.
            self._streams[device].synchronize()
        return copies

    def release(self) -> None:
        """Note that the copies are not used any more."""
        with self._lock:
            self.used = False
            if self._leaves:
                self._free()

    def leave(self) -> None:
        """Give back the memory, once the copies are not used any more."""
        with self._lock:
            self._leaves = True
            if not self.used:
                self._free()

    def _free(self) -> None:
        self._sizes, self._places = [], []
        if self._accelerator is not None:
            self._accelerator.free_pinned()

    def _queue(
        self, device: torch.device, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        accelerator = self._accelerator = accelerator_of(device)
        assert accelerator is not None
        if device not in self._streams:
            self._streams[device] = accelerator.stream(device)
        # Kernels on any other stream may still write to the tensors.
        accelerator.synchronize(device)
        with accelerator.on(self._streams[device]):
            for here, there in pairs:
                here.copy_(there, non_blocking=True)

    def _fit(self, sizes: list[int]) -> None:
        """Make room; states of one trial mostly have the same sizes."""
        if sizes == self._sizes:
            return
        self._free()
        for group in _groups(sizes):
            ends = list(accumulate(map(aligned, group)))
            pin = sum(sizes) <= _PINNED_SHARE * psutil.virtual_memory().available
            block = host_block(ends[-1], pin=pin)
            for end, size in zip(ends, group, strict=True):
                start = end - aligned(size)
                # A storage for each: tensors that share one are copied again when written.
                self._places.append(torch.from_numpy(block[start : start + size].numpy()))
        self._sizes = sizes


def _on_accelerators(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree that have memory on accelerators, each once."""
    if used_accelerator() is None:
        return []
    tensors = filter(storable, leaves(tree))
    return [each for each in tensors if each.device.type != "cpu" and each.numel()]


def _groups(sizes: Sequence[int]) -> list[list[int]]:
    """Neighbours that share a block of memory: pinning each alone would take milliseconds."""
    groups: list[list[int]] = []
    filled = _BLOCK_BYTES
    for size in sizes:
        filled += aligned(size)
        if filled > _BLOCK_BYTES:
            groups.append([])
            filled = aligned(size)
        groups[-1].append(size)
    return groups
