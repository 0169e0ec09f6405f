"""What goes to standard output (results) and to standard error (everything else)."""

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

if TYPE_CHECKING:
    from rich.console import RenderableType

FAILED = 1
BAD_INPUT = 2
NOTHING_SUCCEEDED = 3
INTERRUPTED = 130
"""Exit statuses. 3 says that every trial of a study has failed, 130 is what a shell says of a
process that Ctrl-C ended."""


def complain(message: str, status: int) -> int:
    """Print an error as one line and return its exit status."""
    print(f"error: {_printable(' '.join(message.split()))}", file=sys.stderr)
    return status


def note(text: str) -> None:
    """Print a line for people."""
    print(_printable(text), file=sys.stderr, flush=True)


@contextlib.contextmanager
def libraries_to_stderr() -> Iterator[None]:
    """What a library prints from C goes to standard error, as HiGHS' leftovers of debugging do."""
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
    """Print a result for people; a text as it is, for lines that are to be copied must not wrap."""
    if isinstance(view, str):
        print(_printable(view))
        return
    from rich.console import Console

    Console(highlight=False, markup=False).print(view)


class Printable(io.TextIOBase):
    """A stream on which control characters are spelled: for what others print of a study.

    Args:
        stream: where it goes.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text for people."""
        self._stream.write(_printable(text))
        return len(text)

    def flush(self) -> None:
        """Likewise below."""
        self._stream.flush()

    def fileno(self) -> int:
        """The handle of the stream below."""
        return self._stream.fileno()


def _printable(text: str) -> str:
    from optuna_hermes.view import printable

    return printable(text)


def show_json(document: Any) -> None:
    """Print a result for programs; JSON has no NaN and no infinity, so they become null."""
    print(json.dumps(finite(document), indent=2, default=str))


def finite(value: Any) -> Any:
    """A document as JSON can have it: what is not finite becomes None."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
