"""A small file system of its own, which can be filled to the last byte."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

SIZE_MB = 64
_BLOCK = 4096


class SmallDisk:
    """A tmpfs at ``folder``; a plain folder where this user may not mount one.

    Args:
        folder: missing.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        options = f"size={SIZE_MB}m,mode=0700"
        try:
            mount = ["mount", "-t", "tmpfs", "-o", options, "hermes-chaos", str(folder)]
            done = subprocess.run(mount, capture_output=True, check=False)
            self.can_fill = done.returncode == 0
        except OSError:  # there is no such command
            self.can_fill = False
        self._filler = folder / "filler"

    def __enter__(self) -> SmallDisk:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.can_fill:
            # Lazily: a process that was killed a moment ago may still be there.
            subprocess.run(["umount", "--lazy", str(self.folder)], check=False)

    def fill(self) -> None:
        """Take all the room there is, also what was given back since the last call."""
        assert self.can_fill
        with self._filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(_BLOCK))

    def clear(self) -> None:
        """Give the room back."""
        self._filler.unlink(missing_ok=True)

    @property
    def free_bytes(self) -> int:
        status = os.statvfs(self.folder)
        return status.f_bavail * status.f_frsize
