"""What this host, or this container, has room for."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

from optuna_hermes.cli._checks._base import LITTLE_BYTES, Check, enough, judged
from optuna_hermes.view import size

CGROUP = Path("/sys/fs/cgroup")
SHARED_MEMORY = Path("/dev/shm")
FEW_FILES = 1024


def room() -> Iterator[Check]:
    """Memory and disk."""
    available = psutil.virtual_memory().available
    left = cgroup_left_bytes(CGROUP)
    name = "free memory"
    if left is not None and left < available:
        available, name = left, "free memory, by the limit of its container or slice"
    yield enough(name, available, "A worker with torch takes about 1 GiB.")
    disk = psutil.disk_usage(str(Path.cwd())).free
    yield enough("free disk here", disk, "Suspended trials are kept on disk; `gc` frees some.")


def cgroup_left_bytes(folder: Path) -> int | None:
    """What a limit on memory leaves to this process and its neighbours; None without a limit.

    Files that are cached count as taken there but go when others need the room.
    """
    try:
        limit = (folder / "memory.max").read_text().strip()
        taken = int((folder / "memory.current").read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    if not limit.isdigit():
        return None
    cached = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    return max(0, int(limit) - taken + cached)


def limits() -> Iterator[Check]:
    """What is bounded by the system, and runs out late in a study."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = 0 <= files < FEW_FILES
    problem = "A broker needs a file a worker: `ulimit -n 4096` before it starts." if few else ""
    yield judged("open files", f"{files} at most", problem=problem)
    if SHARED_MEMORY.is_dir() and os.path.ismount(SHARED_MEMORY):
        total = psutil.disk_usage(str(SHARED_MEMORY)).total
        yield shared_memory(total)


def shared_memory(total_bytes: int) -> Check:
    """Whether loaders of several trials find room to hand their batches over."""
    problem = (
        "Data loaders with workers hand batches over there, and end by SIGBUS when it is full: "
        "`docker run --ipc=host`, or --shm-size=8g, or num_workers=0."
        if total_bytes < LITTLE_BYTES
        else ""
    )
    return judged("shared memory", size(total_bytes), problem=problem)
