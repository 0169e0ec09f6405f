"""``torch.simulated``: what torch, Lightning and users ask of a backend's module."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.utils import backend_registration

from support.accelerator._build import built

KIND = "simulated"
"""Name of the backend in devices: ``torch.device("simulated:0")``."""

_ops: Any = torch.ops


def install() -> None:
    """Make the simulated accelerator the accelerator of this process."""
    if hasattr(torch, KIND):
        return
    _ops.load_library(str(built()))
    backend_registration.rename_privateuse1_backend(KIND)
    module = _Module(f"torch.{KIND}")
    torch._register_device_module(KIND, module)  # type: ignore[no-untyped-call]
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)


def set_limit(device: int, limit_bytes: int) -> None:
    """Limit a device's memory: what is more is refused as CUDA refuses it."""
    _ops.simulated.set_limit(device, limit_bytes)


def waiting(device: int = 0) -> int:
    """Return the amount of queued work that has not run yet, on all streams of a device."""
    return int(_ops.simulated.waiting(device))


def pinned_bytes() -> int:
    """Pinned host memory that the process holds, with what is cached."""
    return int(_ops.simulated.pinned_bytes())


class _Module(types.ModuleType):
    Stream = torch.Stream
    Event = torch.Event

    # -- the process ---------------------------------------------------------------------------

    @staticmethod
    def is_available() -> bool:
        return bool(_ops.simulated.device_count())

    @staticmethod
    def is_initialized() -> bool:
        return bool(_ops.simulated.is_initialized())

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return bool(_ops.simulated.is_in_bad_fork())

    @staticmethod
    def _lazy_init() -> None:
        _ops.simulated.initialize()

    init = _lazy_init

    # -- devices and streams -------------------------------------------------------------------

    @staticmethod
    def device_count() -> int:
        return int(_ops.simulated.device_count())

    @staticmethod
    def current_device() -> int:
        return torch.accelerator.current_device_index()

    @staticmethod
    def set_device(device: torch.device | str | int) -> None:
        torch.accelerator.set_device_index(device)

    @staticmethod
    def synchronize(device: torch.device | str | int | None = None) -> None:
        torch.accelerator.synchronize(device)

    @staticmethod
    def current_stream(device: torch.device | str | int | None = None) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    @staticmethod
    def stream(stream: torch.Stream) -> torch.Stream:
        return stream

    # -- memory --------------------------------------------------------------------------------

    memory_allocated = staticmethod(torch.accelerator.memory_allocated)
    max_memory_allocated = staticmethod(torch.accelerator.max_memory_allocated)
    memory_reserved = staticmethod(torch.accelerator.memory_reserved)
    max_memory_reserved = staticmethod(torch.accelerator.max_memory_reserved)
    memory_stats = staticmethod(torch.accelerator.memory_stats)
    reset_peak_memory_stats = staticmethod(torch.accelerator.reset_peak_memory_stats)
    empty_cache = staticmethod(torch.accelerator.empty_cache)
    mem_get_info = staticmethod(torch.accelerator.get_memory_info)

    # -- random numbers ------------------------------------------------------------------------

    @classmethod
    def _generator(cls, device: torch.device | str | int) -> torch.Generator:
        index: int | None = device if isinstance(device, int) else torch.device(device).index
        chosen = cls.current_device() if index is None else index
        generator: torch.Generator = _ops.simulated.default_generator(chosen)
        return generator

    @classmethod
    def get_rng_state(cls, device: torch.device | str | int = KIND) -> torch.Tensor:
        return cls._generator(device).get_state()

    @classmethod
    def set_rng_state(cls, state: torch.Tensor, device: torch.device | str | int = KIND) -> None:
        cls._generator(device).set_state(state)

    @classmethod
    def manual_seed(cls, seed: int) -> None:
        cls._generator(KIND).manual_seed(seed)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        for index in range(cls.device_count()):
            cls._generator(index).manual_seed(seed)

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]
