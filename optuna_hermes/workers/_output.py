"""Standard streams: an objective's output goes to a file of its trial, and never fails it."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW


def write_output_to(path: Path) -> bool:
    """Redirect this process's output to a file, since many trials share one terminal.

    Returns False, and changes nothing, if the file cannot be created. A line that cannot be written
    is left out.
    """
    _stay_enabled()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():  # it could lead out of the trial's folder
            path.unlink()
        handle = os.open(path, _FLAGS, 0o644)
    except OSError:
        return False
    # A checkpoint that cannot be written is still told on the screen: this file may be on the same
    # full disk.
    _keep_warnings(os.dup(2))
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    sys.stdout, sys.stderr = stream(1), stream(2)
    return True


class _Enabled(logging.Logger):
    """A logger that stays enabled where a script, or an objective, configures logging.

    ``logging.config`` disables all loggers that it does not name, unless it is told otherwise.
    """

    @property
    def disabled(self) -> bool:
        """Always False; ``setLevel`` silences it."""
        return False

    @disabled.setter
    def disabled(self, value: bool) -> None: ...


def _stay_enabled() -> None:
    """Let no configuration hide this package's warnings of what is lost."""
    for name, logger in [*logging.root.manager.loggerDict.items()]:
        if name.startswith("optuna_hermes") and isinstance(logger, logging.Logger):
            logger.__class__ = _Enabled


def _keep_warnings(screen: int) -> None:
    stream = os.fdopen(screen, "w", encoding="utf-8", errors="backslashreplace")
    handler = logging.StreamHandler(stream)
    handler.setLevel(logging.WARNING)
    logger = logging.getLogger("optuna_hermes.suspend")
    logger.addHandler(handler)

    def leave() -> None:  # else a pool that outlives its trial would hold the screen's pipe open
        logger.removeHandler(handler)
        stream.close()

    os.register_at_fork(after_in_child=leave)


class _LossyFile(io.FileIO):
    """A file that drops data which cannot be written."""

    def write(self, data: object) -> int:
        """Write ``data``, or drop it on an error; the return value claims success in both cases."""
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError:
            return memoryview(data).nbytes  # type: ignore[arg-type]


def stream(descriptor: int) -> TextIO:
    """A text stream on a file descriptor; what cannot be written is dropped."""
    file = io.BufferedWriter(_LossyFile(descriptor, "w", closefd=False))
    return io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def open_closed_streams() -> None:
    """Open to nowhere each standard stream that is closed, as by ``2>&-``.

    Else the next file or socket would get its number, here and in the workers.
    """
    names = ("stdin", "stdout", "stderr")
    # The system gives the lowest number that is free.
    while (number := os.open(os.devnull, os.O_RDWR)) < len(names):
        os.set_inheritable(number, True)
        if getattr(sys, names[number]) is None:
            file = io.FileIO(number, "w" if number else "r", closefd=False)
            setattr(sys, names[number], io.TextIOWrapper(file, errors="backslashreplace"))
    os.close(number)


def flush_streams() -> None:
    """Write what is buffered for standard output and error."""
    for each in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # none, closed, or replaced by the script or objective
            each.flush()


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Drop what this process prints."""
    kept, nothing = (os.dup(1), os.dup(2)), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, handle in zip((1, 2), kept, strict=True):
            os.dup2(handle, number)
        for handle in (nothing, *kept):
            os.close(handle)
