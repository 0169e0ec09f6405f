"""A stand-in for NVIDIA's driver library, on which the real binding works: see ``fake_nvml.c``.

The binding opens ``libnvidia-ml.so.1`` by name, so a small library of that name on the loader's
path is a driver to it. A process loads it once, and never in the process of the tests.
"""

from __future__ import annotations

from support.nvml._build import build, why_not_built
from support.nvml._host import (
    EXCLUSIVE,
    GPUS,
    NEEDS_RESET,
    PROHIBITED,
    SLICES,
    SimulatedHost,
)
from support.nvml._remote import RemoteSource

__all__ = [
    "EXCLUSIVE",
    "GPUS",
    "NEEDS_RESET",
    "PROHIBITED",
    "SLICES",
    "RemoteSource",
    "SimulatedHost",
    "build",
    "why_not_built",
]
