"""Host memory that holds the bytes of a suspended trial."""

from __future__ import annotations

import contextlib
import logging
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from optuna_hermes.suspend._tiers._accelerators import accelerator_of

log = logging.getLogger(__name__)

_ALIGNMENT_BYTES = 512
_SMALLEST_BYTES = 1 << 20


class Arena:
    """Blocks of host memory that storages are copied into one after another.

    Args:
        device: where the storages are; on an accelerator the blocks are pinned if that is possible.
        block_bytes: size of a block, a power of two; the last block may be smaller.
    """

    def __init__(self, device: torch.device, block_bytes: int = 64 << 20) -> None:
        self.device = device
        self._block_bytes = block_bytes
        self._accelerator = accelerator_of(device)
        self._pins = self._accelerator is not None
        self._stream: Any = None
        self._blocks: list[torch.Tensor] = []
        self._starts: list[int] = []
        self._places: list[tuple[int, int]] = []

    @property
    def size_bytes(self) -> int:
        """Size of all blocks."""
        return sum(block.numel() for block in self._blocks)

    @torch.inference_mode(False)  # its blocks outlive the mode in which they were made
    def keep(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Copy the bytes of storages here, in place of what was here before.

        Raises:
            RuntimeError: there is no host memory for them, or they cannot be read.
        """
        self._places, end = [], 0
        for storage in storages:
            self._places.append((end, storage.nbytes()))
            end += aligned(storage.nbytes())
        self._grow(end)
        with self._queue():
            for there, here in self._pairs(storages):
                here.copy_(there, non_blocking=True)

    @torch.inference_mode(False)
    def put_back(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Copy what ``keep`` was given back to the same storages, which have their sizes again."""
        with self._queue():
            for there, here in self._pairs(storages):
                there.copy_(here, non_blocking=True)

    def view(self, index: int) -> torch.Tensor:
        """The bytes of one storage, as they lie here where they lie in one block, else copied.

        The tensor has a storage of its own, as long as the one that was kept.
        """
        pieces = self._pieces(*self._places[index])
        if len(pieces) > 1:
            return torch.cat(pieces)
        return torch.from_numpy(pieces[0].numpy())

    def free(self) -> None:
        """Give all host memory back."""
        if not self._blocks:
            return
        self._blocks, self._starts, self._places = [], [], []
        if self._accelerator is not None:
            self._accelerator.free_pinned()

    def _grow(self, wanted: int) -> None:
        # It never shrinks: pinning memory costs more than copying into it.
        while (missing := wanted - self.size_bytes) > 0:
            # The allocator of pinned memory rounds up to powers of two.
            size = max(_SMALLEST_BYTES, 1 << (missing - 1).bit_length())
            block = host_block(min(size, self._block_bytes), pin=self._pins)
            self._pins = self._pins and block.is_pinned()
            self._starts.append(self.size_bytes)
            self._blocks.append(block)

    @contextlib.contextmanager
    def _queue(self) -> Iterator[None]:
        """Use a stream of its own, after the device's pending work and before any later work."""
        accelerator = self._accelerator
        if accelerator is None:
            yield
            return
        if self._stream is None:
            self._stream = accelerator.stream(self.device)
        # Kernels on any other stream may still write to the storages.
        accelerator.synchronize(self.device)
        try:
            with accelerator.on(self._stream):
                yield
        finally:
            self._stream.synchronize()

    def _pairs(
        self, storages: Sequence[torch.UntypedStorage]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parts of the storages, and the parts of blocks where they are kept."""
        for storage, place in zip(storages, self._places, strict=True):
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            done = 0
            for piece in self._pieces(*place):
                yield whole[done : done + piece.numel()], piece
                done += piece.numel()

    def _pieces(self, start: int, size: int) -> list[torch.Tensor]:
        """The parts of blocks that hold ``size`` bytes from ``start`` on."""
        pieces: list[torch.Tensor] = []
        index = bisect_right(self._starts, start) - 1
        while size > 0:
            begin = start - self._starts[index]
            pieces.append(self._blocks[index][begin : begin + size])
            start += pieces[-1].numel()
            size -= pieces[-1].numel()
            index += 1
        return pieces


def aligned(size: int) -> int:
    """Bytes that so many take in a block: views of any dtype must be aligned there."""
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def host_block(size: int, *, pin: bool) -> torch.Tensor:
    """Host memory of this size, pinned if it shall be and can be."""
    if pin:
        try:
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            log.info("Host memory cannot be pinned, copies will be slower: %s", error)
    return torch.empty(size, dtype=torch.uint8, device="cpu")
