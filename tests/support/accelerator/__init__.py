"""A simulated accelerator: a backend of PyTorch's that behaves as CUDA does where it hurts.

Its streams run nothing before something waits for it, its memory is limited and cannot be touched
by the CPU, and its context does not survive a fork: ``docs/design/0032-simulated-accelerator.md``.
"""

from __future__ import annotations

from support.accelerator._build import built, why_not_built
from support.accelerator._device_module import KIND, install, pinned_bytes, set_limit, waiting

__all__ = ["KIND", "built", "install", "pinned_bytes", "set_limit", "waiting", "why_not_built"]
