"""The tier in host memory."""

from __future__ import annotations

import logging
from typing import Any

import torch

from optuna_hermes.errors import SuspendError
from optuna_hermes.suspend._base import CleanPoint, Footprint
from optuna_hermes.suspend._tiers._accelerators import accelerator_of
from optuna_hermes.suspend._tiers._arena import Arena
from optuna_hermes.suspend._tiers._tensor_storages import device_of, forget, movable, storages
from optuna_hermes.suspend._values._tree import is_sparse, mapped, with_parts

log = logging.getLogger(__name__)


class HostTier:
    """The host tier: the tensors wait in host memory, the device is free, the process stays.

    One object serves one trial, any number of times; ``suspend`` and ``resume`` alternate. The
    caller keeps the random states around the two.
    """

    def __init__(self) -> None:
        self._arena = Arena(torch.device("cpu"))
        self._trial = "no trial"
        self._sizes: dict[torch.UntypedStorage, int] = {}
        self._tree: dict[str, Any] | None = None
        self._logged = False

    def suspend(self, state: CleanPoint) -> Footprint:
        """Put the trial here, and return what it still takes.

        Raises:
            SuspendError: it cannot be put here; it is as it was.
        """
        if not state.can_offload:
            raise SuspendError(
                f"{state.name.capitalize()} cannot wait in host memory, for its tensors must keep "
                "their addresses (a captured graph has them): leave it on its device or "
                "store it on disk."
            )
        # Before the storages are emptied: ``dump`` may read scalars from tensors.
        tree = state.dump() if state.can_store else None
        roots = list(state.roots())
        device = device_of(roots)
        found = storages(roots, device)
        sizes = {storage: storage.nbytes() for storage in found if movable(storage)}
        self._keep(sizes, device, state.name)
        # All copies are made: only now may anything be emptied.
        self._trial, self._sizes, self._tree = state.name, sizes, tree
        self._empty()
        left = self._left([storage for storage in found if storage not in sizes])
        return Footprint(device_bytes=left, host_bytes=self.size_bytes)

    def resume(self) -> None:
        """Bring the trial back: every tensor is where it was, with the same values.

        Raises:
            SuspendError: it cannot be brought back; it waits here, and may be resumed again.
        """
        try:
            for storage, size in self._sizes.items():
                storage.resize_(size)
            self._arena.put_back(list(self._sizes))
        except RuntimeError as error:
            self._empty()
            raise SuspendError(
                f"{self._trial.capitalize()} must have {sum(self._sizes.values())} bytes on "
                f"{self._arena.device} to come back: {error}. It stays in host memory; bring it "
                "back when there is room."
            ) from error
        self._sizes, self._tree = {}, None

    @torch.inference_mode(False)
    def tree(self) -> dict[str, Any]:
        """The tree that ``dump`` gave, with its tensors in host memory; valid until ``resume``.

        Raises:
            SuspendError: nothing waits here that can be stored.
        """
        if self._tree is None:
            raise SuspendError(
                "Only a trial that waits in host memory, and could be stored when it came there, "
                f"goes on to disk: {self._trial} does not."
            )
        places = {storage._cdata: index for index, storage in enumerate(self._sizes)}
        views: dict[int, torch.UntypedStorage] = {}
        replaced: dict[int, torch.Tensor] = {}

        def over_view(value: torch.Tensor) -> torch.Tensor:
            address = value.untyped_storage()._cdata
            if address not in places:
                return value
            if address not in views:
                views[address] = self._arena.view(places[address]).untyped_storage()
            return _over(views[address], value)

        def here(value: Any) -> Any:
            kinds = (torch.Tensor, torch.nn.Parameter)
            dense = type(value) in kinds and value.layout is torch.strided
            if not (dense or is_sparse(value)):
                return value
            if id(value) not in replaced:  # a tensor that occurs twice stays one object
                replaced[id(value)] = with_parts(value, over_view)
            return replaced[id(value)]

        tree: dict[str, Any] = mapped(self._tree, here)
        return tree

    def abandon(self) -> None:
        """Give up a trial that is resumed elsewhere, before its process unwinds."""
        # Code that reads its tensors while unwinding must not crash.
        forget(self._sizes, self._arena.device)
        self._sizes, self._tree = {}, None
        self.free()

    @property
    def size_bytes(self) -> int:
        """Host memory it has: after ``resume`` it is kept for the next time."""
        return self._arena.size_bytes

    def free(self) -> None:
        """Give its memory back; nothing may wait here."""
        self._arena.free()

    def _keep(
        self, sizes: dict[torch.UntypedStorage, int], device: torch.device, trial: str
    ) -> None:
        if self._arena.device != device:
            self._arena = Arena(device)
        try:
            self._arena.keep(list(sizes))
        except RuntimeError as error:
            self._arena.free()
            raise SuspendError(
                f"{trial.capitalize()} must have {sum(sizes.values())} bytes of host memory to "
                f"wait there: {error}. It is as it was; leave it on its device or store it on disk."
            ) from error

    def _empty(self) -> None:
        # The storages, not the tensors over them: references to these stay valid.
        for storage in self._sizes:
            storage.resize_(0)
        accelerator = accelerator_of(self._arena.device)
        if accelerator is not None:
            accelerator.free_unused()

    def _left(self, stayed: list[torch.UntypedStorage]) -> int:
        """Bytes still taken on the device; storages that could not be moved are logged once."""
        device = self._arena.device
        held = size = sum(storage.nbytes() for storage in stayed)
        blocks = len(stayed)
        accelerator = accelerator_of(device)
        if accelerator is not None:
            held = accelerator.reserved_bytes(device)
            size, blocks = accelerator.live(device)
        if blocks and not self._logged:
            self._logged = True
            trial = self._trial.capitalize()
            log.info("%s leaves %d bytes in %d blocks on %s.", trial, size, blocks, device)
        return held


def _over(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """A tensor in main memory that views ``storage`` as ``like`` views its own."""
    tensor = torch.empty(0, dtype=like.dtype, device="cpu")
    tensor.set_(storage, like.storage_offset(), like.size(), like.stride())
    tensor = tensor.conj() if like.is_conj() else tensor
    return torch._neg_view(tensor) if like.is_neg() else tensor
