"""Checks of the limits of this host, or of this container."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

from optuna_hermes._cgroups import left_bytes
from optuna_hermes.cli._checks._base import LITTLE_BYTES, Check, enough, judged
from optuna_hermes.view import size

SHARED_MEMORY = Path("/dev/shm")
FEW_FILES = 1024


def room() -> Iterator[Check]:
    """Check free memory and free disk."""
    available = psutil.virtual_memory().available
    left = left_bytes()
    name = "free memory"
    if left is not None and left < available:
        available, name = left, "free memory, by the limit of its container or slice"
    yield enough(name, available, "A worker with torch takes about 1 GiB.")
    disk = psutil.disk_usage(str(Path.cwd())).free
    yield enough("free disk here", disk, "Suspended trials are kept on disk; `gc` frees some.")


def limits() -> Iterator[Check]:
    """Check system limits that are reached only late in a study."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = 0 <= files < FEW_FILES
    problem = "A broker needs a file a worker: `ulimit -n 4096` before it starts." if few else ""
    yield judged("open files", f"{files} at most", problem=problem)
    if SHARED_MEMORY.is_dir() and os.path.ismount(SHARED_MEMORY):
        total = psutil.disk_usage(str(SHARED_MEMORY)).total
        yield shared_memory(total)


def shared_memory(total_bytes: int) -> Check:
    """Check the shared memory through which data loaders of several trials pass batches."""
    problem = (
        "Data loaders with workers hand batches over there, and end by SIGBUS when it is full: "
        "`docker run --ipc=host`, or --shm-size=8g, or num_workers=0."
        if total_bytes < LITTLE_BYTES
        else ""
    )
    return judged("shared memory", size(total_bytes), problem=problem)
