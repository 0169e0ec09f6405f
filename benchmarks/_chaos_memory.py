"""A control group with little memory: the kernel kills a process in it that takes more."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

LIMIT_MB = 64
_FILES = {"/sys/fs/cgroup/memory": "memory.limit_in_bytes", "/sys/fs/cgroup": "memory.max"}
"""Folders of memory groups, version 1 and 2, each with the name of the file of the limit."""


class SmallMemory:
    """Memory group with a small limit; memory taken before a process joined does not count."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        for root, limit in _FILES.items():
            folder = Path(root) / f"hermes-chaos-{os.getpid()}"
            with contextlib.suppress(OSError):
                folder.mkdir()
                self._folder = folder
                (folder / limit).write_text(str(LIMIT_MB << 20))
                return
            self.__exit__()

    def __enter__(self) -> SmallMemory:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._folder.rmdir()
            self._folder = None

    @property
    def procs(self) -> str:
        """The file that a process writes itself into; empty where this user may make no group."""
        return "" if self._folder is None else str(self._folder / "cgroup.procs")
