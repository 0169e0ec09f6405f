"""A small file system of its own, which can be filled to the last byte, or refuse to be written."""

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
        self.can_lock = self._lock("+i")
        self._lock("-i")

    def __enter__(self) -> SmallDisk:
        return self

    def __exit__(self, *exception: object) -> None:
        self.unlock()
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

    def mount_read_only(self) -> None:
        """Whoever opens a file for writing, or makes one, is refused with EROFS."""
        assert self.can_fill
        folder = str(self.folder)
        subprocess.run(["mount", "--bind", folder, folder], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)

    def unmount_read_only(self) -> None:
        """Have it written again."""
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)

    def lock(self) -> None:
        """Make all that is there immutable, even for root: whoever changes it gets EPERM."""
        assert self.can_lock
        self._lock("-R", "+i")

    def unlock(self) -> None:
        """Have it changed again."""
        self._lock("-R", "-i")

    def _lock(self, *words: str) -> bool:
        try:
            command = ["chattr", *words, str(self.folder)]
            return subprocess.run(command, capture_output=True, check=False).returncode == 0
        except OSError:  # there is no such command
            return False

    @property
    def free_bytes(self) -> int:
        status = os.statvfs(self.folder)
        return status.f_bavail * status.f_frsize
