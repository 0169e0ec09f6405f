"""Printing: results to standard output, everything else to standard error."""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import math
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

from optuna_hermes.errors import ExitStatus
from optuna_hermes.view.formats import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

FAILED = ExitStatus.FAILED
BAD_INPUT = ExitStatus.BAD_INPUT
NOTHING_SUCCEEDED = ExitStatus.NOTHING_SUCCEEDED
SUSPENDED = ExitStatus.SUSPENDED
INTERRUPTED = ExitStatus.INTERRUPTED


def complain(message: str, status: int) -> int:
    """Print an error as one line and return its exit status."""
    print(f"error: {printable(' '.join(message.split()))}", file=sys.stderr)
    return status


def note(text: str) -> None:
    """Print a line to standard error."""
    print(printable(text), file=sys.stderr, flush=True)


@contextlib.contextmanager
def libraries_to_stderr() -> Iterator[None]:
    """Redirect C libraries' output to standard error in this block."""
    # HiGHS, by which SciPy solves, prints lines into the middle of JSON.
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


def show(view: RenderableType) -> None:
    """Print a result for people."""
    # A string is not wrapped: its lines may be copied.
    if isinstance(view, str):
        print(printable(view))
        return
    from rich.console import Console

    Console(highlight=False, markup=False).print(view)


class Printable(io.TextIOBase):
    """A stream that escapes control characters, for Optuna's output about a study."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(printable(text))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()


def show_json(document: Any) -> None:
    """Print a result for programs."""
    print(json.dumps(finite(document), indent=2, default=str))


def finite(value: Any) -> Any:
    """A document for JSON, which has neither NaN nor infinity: None in their place."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
