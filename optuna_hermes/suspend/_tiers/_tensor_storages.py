"""The memory of a trial: every storage that its objects lead to, each once."""

from __future__ import annotations

import gc
import threading
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from optuna_hermes import _heap
from optuna_hermes._versions import require
from optuna_hermes.suspend._tiers._accelerators import accelerator_of, used_accelerator
from optuna_hermes.suspend._values._tree import sparse_parts

# Here, as all public modules that need torch import this one.
require("torch", torch.__version__)

_CLOSED = (
    # These lead to nothing.
    *(type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device),
    # These lead out of the trial: into the program, to other threads, to data that is read again.
    *(type, types.ModuleType, types.FrameType, types.GeneratorType, types.CoroutineType),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType),
    *(threading.Thread, DataLoader, Dataset, Sampler),
)
# Likewise, by name, since they need not be installed, or import this module: a trainer leads to
# loaders and loggers, a trial to the database of its study, and a tier holds the trial itself.
_CLOSED_NAMES = (
    "lightning.pytorch.trainer.trainer.Trainer",
    "pytorch_lightning.trainer.trainer.Trainer",
    "optuna.",
    "optuna_hermes.suspend._tiers._host.HostTier",
)


def device_of(roots: Iterable[object]) -> torch.device:
    """The device of a trial: that of the first tensor on an accelerator, else the CPU."""
    cpu = torch.device("cpu")
    accelerator = used_accelerator()
    if accelerator is None:
        return cpu
    with torch._C.DisableTorchFunctionSubclass():
        devices = (tensor.device for tensor in _tensors(roots))
        return next((each for each in devices if each.type == accelerator.kind), cpu)


def settled(roots: Iterable[object]) -> torch.device:
    """The device of a trial, once all work of this process is done, on any device and stream."""
    device = device_of(roots)
    accelerator = accelerator_of(device)
    if accelerator is not None:
        accelerator.synchronize_all()
    return device


def storages(roots: Iterable[object], device: torch.device) -> list[torch.UntypedStorage]:
    """Every storage on ``device`` that belongs to the trial and has memory.

    On an accelerator the process must serve one trial only.
    """
    found: dict[int, torch.UntypedStorage] = {}
    with torch._C.DisableTorchFunctionSubclass():  # run no code of tensor subclasses
        # ``roots`` do not lead to the current batch, nor to what the user keeps elsewhere.
        known = _known_to_python(device) if device.type != "cpu" else []
        for tensor in _tensors([*roots, *known]):
            storage = _storage(tensor)
            if storage is not None and storage.device == device and storage.nbytes():
                found[storage._cdata] = storage
    return list(found.values())


def movable(storage: torch.UntypedStorage) -> bool:
    """True if a storage owns its memory: not NumPy's, a file's, or shared with other processes."""
    return storage.resizable() and (storage.device.type != "cpu" or not storage.is_shared())


def forget(storages: Collection[torch.UntypedStorage], device: torch.device) -> None:
    """Empty every tensor over ``storages``, which have no memory any more."""
    # Reading such a tensor would crash the process.
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in _tensors(_known_to_python(device)):
            if _storage(tensor) in storages:
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=device)


def held_bytes(roots: Iterable[object], device: torch.device) -> int:
    """Bytes that the trial holds on its device; on an accelerator, with its allocator's cache."""
    accelerator = accelerator_of(device)
    if accelerator is not None:
        return accelerator.reserved_bytes(device)
    return sum(storage.nbytes() for storage in storages(roots, device))


def peak_bytes(roots: Iterable[object], device: torch.device) -> int:
    """The most bytes that the trial has held on its device, as far as that is known."""
    accelerator = accelerator_of(device)
    if accelerator is not None:
        return accelerator.peak_bytes(device)
    return held_bytes(roots, device)


class Gauge:
    """Measures the most device memory that a trial has held.

    On a CPU this takes a walk over all objects, so only reads 1, 2, 4, 8 and so on measure it.
    """

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self._times = 0
        self._bytes = 0

    def read(self, roots: Iterable[object]) -> int:
        """Return the most bytes until now, as far as that is known."""
        self._times += 1
        if self._device.type != "cpu" or self._times & (self._times - 1) == 0:
            roots = list(roots)
            self._device = device_of(roots)
            self._bytes = max(self._bytes, peak_bytes(roots, self._device))
        return self._bytes


def _tensors(roots: Iterable[object]) -> Iterator[torch.Tensor]:
    """Every tensor that ``roots`` lead to."""
    seen: dict[int, object] = {}  # keeps objects alive, so that no id is reused
    closed: dict[type, bool] = {}
    level = list(roots)
    while level:
        fresh: list[Any] = []
        for each in level:
            kind = type(each)
            if kind not in closed:
                closed[kind] = _is_closed(kind)
            if not closed[kind] and id(each) not in seen:
                seen[id(each)] = each
                fresh.append(each)
        # The garbage collector follows no weak references, and runs no code of the user's objects.
        level = gc.get_referents(*fresh)
        for each in fresh:
            if issubclass(type(each), torch.Tensor):  # isinstance may run the object's code
                yield each
                level += _parts(each)


def _is_closed(kind: type) -> bool:
    names = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
    return issubclass(kind, _CLOSED) or any(name.startswith(_CLOSED_NAMES) for name in names)


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Tensors held by a tensor that the garbage collector does not see."""
    parts = sparse_parts(tensor)
    if parts:
        return list(parts)
    # Only these have a gradient; reading ``grad`` of others logs a warning.
    if (tensor.is_leaf or tensor.retains_grad) and tensor.grad is not None:
        return [tensor.grad]
    return []


def _known_to_python(device: torch.device) -> list[torch.Tensor]:
    return [each for each in _heap.objects(torch.Tensor) if each.device == device]


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        storage = tensor.untyped_storage()
        storage.data_ptr()
    except RuntimeError:  # sparse tensors and wrappers of others have no memory of their own
        return None
    return storage
