"""What an objective prints goes to a file of its trial; what cannot be written is no failure."""

from __future__ import annotations

import io
import logging
import os
import sys
from pathlib import Path
from typing import TextIO

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW


def write_output_to(path: Path) -> bool:
    """Send what this process prints to a file: many trials share one screen.

    Where the file cannot be made all goes where it went before, and this is False; where a line
    cannot be written it is left out, for a trial must not fail by what it says. That a checkpoint
    cannot be written is said where it went before: the file may be on the same disk.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():  # it would lead out of the trial's folder
            path.unlink()
        handle = os.open(path, _FLAGS, 0o644)
    except OSError:
        return False
    _keep_warnings(os.dup(2))
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    sys.stdout, sys.stderr = _stream(1), _stream(2)
    return True


def _keep_warnings(screen: int) -> None:
    stream = os.fdopen(screen, "w", encoding="utf-8", errors="backslashreplace")
    handler = logging.StreamHandler(stream)
    handler.setLevel(logging.WARNING)
    logging.getLogger("optuna_hermes.suspend").addHandler(handler)


class _Patient(io.FileIO):
    """A file that leaves out what it cannot take."""

    def write(self, data: object) -> int:
        """Take all of it, or nothing."""
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError:
            return memoryview(data).nbytes  # type: ignore[arg-type]


def _stream(descriptor: int) -> TextIO:
    file = io.BufferedWriter(_Patient(descriptor, "w", closefd=False))
    return io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", line_buffering=True)
