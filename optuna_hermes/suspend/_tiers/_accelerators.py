"""The accelerator of this process, of whatever make: CUDA, ROCm, XPU, or a backend of others.

All makes are asked through the module that PyTorch has for them (``torch.cuda``, ``torch.xpu``);
what only one of them has is in a class of its own. Import it only where torch is imported already.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from optuna_hermes import _heap


class Accelerator:
    """A make of accelerator.

    Args:
        kind: its name in torch: ``cuda`` (also for ROCm), ``xpu``, ...
    """

    graph: str | None = None
    """Name of the class of captured graphs in its module, None if it has none."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.module: Any = torch.get_device_module(kind)

    # -- the process ---------------------------------------------------------------------------

    @property
    def used(self) -> bool:
        """True if this process has used it; asking does not wake it up."""
        asked = getattr(self.module, "is_initialized", self.module.is_available)
        return bool(asked())

    @property
    def lost_by_fork(self) -> bool:
        """True if this process cannot use it, as a process that it was forked from has."""
        return bool(getattr(self.module, "_is_in_bad_fork", bool)())

    def captured_graphs(self) -> bool:
        """True if this process has captured graphs: they hold addresses, so nothing may move."""
        kind = getattr(self.module, self.graph, None) if self.graph else None
        return kind is not None and bool(_captured(kind))

    def inexact(self, roots: Iterable[object]) -> dict[str, str]:
        """Reasons why a training in the next process may differ from this one, by name.

        Args:
            roots: objects of the trial, with all its modules.
        """
        return {}

    # -- random numbers ------------------------------------------------------------------------

    def rng_states(self) -> list[torch.Tensor]:
        """The states of the devices' default generators."""
        return [self.module.get_rng_state(index) for index in range(self.module.device_count())]

    def set_rng_states(self, states: list[torch.Tensor]) -> None:
        """Put back what ``rng_states`` returned, as far as there are as many devices."""
        for index, state in enumerate(states[: self.module.device_count()]):
            # Whoever sets it, if only to what it is, has cuDNN seed its dropout anew.
            if not torch.equal(self.module.get_rng_state(index), state):
                self.module.set_rng_state(state, index)

    def seed(self, seed: int) -> None:
        """Seed the devices' default generators."""
        self.module.manual_seed_all(seed)

    # -- memory --------------------------------------------------------------------------------

    def reserved_bytes(self, device: torch.device) -> int:
        """Bytes that the process holds on a device, with the cache of its allocator."""
        return int(self.module.memory_reserved(device))

    def peak_bytes(self, device: torch.device) -> int:
        """The most bytes that the process has held there."""
        return int(self.module.max_memory_reserved(device))

    def live(self, device: torch.device) -> tuple[int, int]:
        """Bytes in use on a device, and the number of their blocks."""
        blocks = self.module.memory_stats(device).get("allocation.all.current", 0)
        return int(self.module.memory_allocated(device)), int(blocks)

    def free_unused(self) -> None:
        """Give back what no tensor needs."""
        self._free_workspaces()
        self.module.empty_cache()

    def free_pinned(self) -> None:
        """Give back pinned host memory that no tensor needs."""
        # Torch caches it; before torch.accelerator had it, only torch._C could free it.
        old = getattr(torch._C, "_host_emptyCache", lambda: None)
        getattr(torch.accelerator, "empty_host_cache", old)()

    def _free_workspaces(self) -> None:
        """Free what libraries of kernels keep allocated; most have nothing."""

    # -- streams -------------------------------------------------------------------------------

    def synchronize(self, device: torch.device) -> None:
        """Wait until all work on a device, in any stream, is done."""
        self.module.synchronize(device)

    def synchronize_all(self) -> None:
        """Wait until all work on all devices that this process has memory on is done."""
        for index in range(self.module.device_count()):
            device = torch.device(self.kind, index)
            if self.reserved_bytes(device):  # waiting for others would make contexts there
                self.synchronize(device)

    def stream(self, device: torch.device) -> Any:
        """A new stream."""
        return self.module.Stream(device)

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Queue the work of a block on a stream."""
        entered: contextlib.AbstractContextManager[Any] = self.module.stream(stream)
        return entered


class _Cuda(Accelerator):
    """CUDA and ROCm."""

    graph = "CUDAGraph"

    def inexact(self, roots: Iterable[object]) -> dict[str, str]:
        cudnn = torch.backends.cudnn  # for ROCm it is MIOpen, which does the same
        if not (cudnn.is_available() and cudnn.enabled):  # type: ignore[no-untyped-call]
            return {}
        found = {}
        # Its state is kept in a static variable of torch's, which cannot be read or set.
        if any(self._drops_within(each) for each in _modules(roots)):
            found["cudnn dropout"] = (
                "dropout=... of nn.LSTM, nn.GRU and nn.RNN draws from a generator of cuDNN's that "
                "no checkpoint holds. Put nn.Dropout between layers of their own, or set "
                "torch.backends.cudnn.enabled = False."
            )
        if cudnn.benchmark:
            found["cudnn benchmark"] = (
                "torch.backends.cudnn.benchmark chooses kernels by timing them, in each process "
                "anew, and others may round otherwise. Set it to False."
            )
        return found

    def _drops_within(self, module: nn.Module) -> bool:
        """True for a recurrent layer that cuDNN computes, dropout included."""
        return (
            isinstance(module, nn.RNNBase)
            and module.dropout > 0
            and any(weight.device.type == self.kind for weight in module.parameters())
        )

    def _free_workspaces(self) -> None:
        # cuBLAS keeps its workspaces allocated, and empty_cache frees only unused segments.
        getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


class _Xpu(Accelerator):
    graph = "XPUGraph"


def _modules(roots: Iterable[object]) -> Iterator[nn.Module]:
    for root in roots:
        if isinstance(root, nn.Module):
            yield from root.modules()


_graphs: dict[type[Any], weakref.WeakSet[Any]] = {}
"""The graphs that are there, by their class; a class is here once it was asked for."""


def _captured(kind: type[Any]) -> weakref.WeakSet[Any]:
    """The graphs of a class.

    The objects of the process are searched once, which can take a tenth of a second. Graphs that
    come later are noted when their capture begins.
    """
    if kind not in _graphs:
        found = _graphs[kind] = weakref.WeakSet(_heap.objects(kind))
        begin = kind.capture_begin

        @functools.wraps(begin)
        def noted(graph: Any, *args: Any, **options: Any) -> Any:
            found.add(graph)
            return begin(graph, *args, **options)

        kind.capture_begin = noted
    return _graphs[kind]


_KINDS: dict[str, Callable[[str], Accelerator]] = {"cuda": _Cuda, "xpu": _Xpu}


def accelerator_of(device: torch.device) -> Accelerator | None:
    """The accelerator that a device is of, None for a CPU."""
    return None if device.type == "cpu" else _KINDS.get(device.type, Accelerator)(device.type)


def accelerator() -> Accelerator | None:
    """The accelerator that this build of torch is for, None if that is a CPU."""
    try:
        device = torch.accelerator.current_accelerator()
    except RuntimeError:  # as torch 2.6 says it
        return None
    return None if device is None else accelerator_of(device)


def used_accelerator() -> Accelerator | None:
    """The accelerator that this process has used; asking does not wake it up."""
    found = accelerator()
    return found if found is not None and found.used else None
