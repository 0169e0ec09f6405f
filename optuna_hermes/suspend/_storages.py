"""Which memory belongs to a run: every storage that its objects lead to, each once."""

from __future__ import annotations

import gc
import threading
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from optuna_hermes.suspend._base import Tier

_CLOSED = (
    # Nothing is in there.
    *(type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device),
    # These lead out of the run: into the program, to other threads, to data that is read again,
    # and to where the run itself is kept while it waits.
    *(type, types.ModuleType, types.FrameType, types.GeneratorType, types.CoroutineType),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType),
    *(threading.Thread, DataLoader, Dataset, Sampler, Tier),
)
# Likewise, by name, since they need not be installed: a trainer leads to loaders and loggers, a
# trial to the database of its study.
_CLOSED_NAMES = (
    "lightning.pytorch.trainer.trainer.Trainer",
    "pytorch_lightning.trainer.trainer.Trainer",
    "optuna.",
)


def device_of(roots: Iterable[object]) -> torch.device:
    """The device of a run: that of the first CUDA tensor found, else the CPU."""
    cpu = torch.device("cpu")
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return cpu
    with torch._C.DisableTorchFunctionSubclass():
        return next((tensor.device for tensor in _tensors(roots) if tensor.is_cuda), cpu)


def storages(roots: Iterable[object], device: torch.device) -> list[torch.UntypedStorage]:
    """Every storage on ``device`` that belongs to the run and has memory.

    On a GPU these are, besides what ``roots`` lead to, those of all tensors that Python knows: the
    current batch, and whatever else the user keeps. The process must serve one run only.
    """
    found: dict[int, torch.UntypedStorage] = {}
    with torch._C.DisableTorchFunctionSubclass():  # a subclass must not see that it is looked at
        known = _known_to_python(device) if device.type == "cuda" else []
        for tensor in _tensors([*roots, *known]):
            storage = _storage(tensor)
            if storage is not None and storage.device == device and storage.nbytes():
                found[storage._cdata] = storage
    return list(found.values())


def movable(storage: torch.UntypedStorage) -> bool:
    """Whether its memory is its own: not NumPy's, a file's, or shared with other processes."""
    return storage.resizable() and (storage.is_cuda or not storage.is_shared())


def forget(storages: Collection[torch.UntypedStorage], device: torch.device) -> None:
    """Leave every tensor over ``storages``, which have no memory any more, without elements.

    Whoever reads one of them before would crash the process.
    """
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in _tensors(_known_to_python(device)):
            if _storage(tensor) in storages:
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=device)


def held_bytes(roots: Iterable[object], device: torch.device) -> int:
    """Bytes that the run holds on its device now; on a GPU with what its allocator caches."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return sum(storage.nbytes() for storage in storages(roots, device))


def peak_bytes(roots: Iterable[object], device: torch.device) -> int:
    """The most bytes that the run has held on its device, as far as that is known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return held_bytes(roots, device)


class Gauge:
    """The most device memory a run has held, as often as it is asked.

    On a CPU that is found out by a walk, so it looks at the first, second, fourth and so on time.
    """

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self._times = 0
        self._bytes = 0

    def read(self, roots: Iterable[object]) -> int:
        """Bytes, as far as is known."""
        self._times += 1
        if self._device.type == "cuda" or self._times & (self._times - 1) == 0:
            roots = list(roots)
            self._device = device_of(roots)
            self._bytes = max(self._bytes, peak_bytes(roots, self._device))
        return self._bytes


def _tensors(roots: Iterable[object]) -> Iterator[torch.Tensor]:
    """Every tensor that ``roots`` lead to.

    What an object leads to is asked of the garbage collector, not of the object: no code of the
    user's runs, whatever its attributes do, and weak references are not followed.
    """
    seen: dict[int, object] = {}  # the objects stay alive, so that no number is used twice
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
        level = gc.get_referents(*fresh)
        for each in fresh:
            if issubclass(type(each), torch.Tensor):  # isinstance would ask the object
                yield each
                level += _parts(each)


def _is_closed(kind: type) -> bool:
    names = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
    return issubclass(kind, _CLOSED) or any(name.startswith(_CLOSED_NAMES) for name in names)


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Tensors that a tensor holds where the garbage collector does not look."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    # Others have no gradient, and warn when they are asked for it.
    if (tensor.is_leaf or tensor.retains_grad) and tensor.grad is not None:
        return [tensor.grad]
    return []


def _known_to_python(device: torch.device) -> list[torch.Tensor]:
    kinds = set(_with_subclasses(torch.Tensor))  # looked into half a million times
    return [each for each in gc.get_objects() if type(each) in kinds and each.device == device]


def _with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _with_subclasses(each)


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        storage = tensor.untyped_storage()
        storage.data_ptr()
    except RuntimeError:  # it is sparse or wraps others: it has no memory of its own
        return None
    return storage
