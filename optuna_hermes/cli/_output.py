"""Printing: results to standard output, everything else to standard error."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from optuna_hermes.errors import ExitStatus, UnprintedError
from optuna_hermes.view.formats import printable

if TYPE_CHECKING:
    from rich.console import RenderableType


def complain(message: str, status: int) -> int:
    """Print an error as one line and return its exit status."""
    note(f"error: {' '.join(message.split())}")
    return status


def note(text: str) -> None:
    """Print a line to standard error, unless nobody reads it any more."""
    try:
        print(printable(text), file=sys.stderr, flush=True)
    except OSError:
        discard_unwritten()


def discard_unwritten() -> None:
    """Redirect standard output and standard error to nowhere, each if it cannot be flushed.

    The flush at the end of the process would fail too, and change its exit status.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


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
        _write(f"{printable(view)}\n")
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    # Not printed by the console, which ends the process where nobody reads.
    with console.capture() as shown:
        console.print(view)
        console.quiet = True  # the end of a capture writes too, an empty text
    _write(shown.get())


class Printable(io.TextIOBase):
    """A stream that escapes control characters, for Optuna's output about a study."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _printing():
            self._stream.write(printable(text))
        return len(text)

    def flush(self) -> None:
        with _printing():
            self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()


def show_json(document: Any) -> None:
    """Print a result for programs."""
    _write(f"{json.dumps(finite(document), indent=2, default=str)}\n")


def show_result(show_it: Callable[[], None]) -> int:
    """Print the result of a study that has ended; return ``FAILED`` if there is no room for it.

    What is said and done after it must not depend on a reader: Ctrl-C ends the ``tee`` behind a
    pipe as well, and a terminal may be closed.
    """
    try:
        show_it()
    except UnprintedError as error:
        return end_unprinted(error, ExitStatus.DONE)
    return ExitStatus.DONE


def end_unprinted(error: UnprintedError, if_unread: int) -> int:
    """Say that there is no room for the result, if that is why; return the exit status."""
    discard_unwritten()
    return if_unread if error.unread else complain(str(error), ExitStatus.FAILED)


def _write(text: str) -> None:
    with _printing():
        print(text, end="", flush=True)


@contextlib.contextmanager
def _printing() -> Iterator[None]:
    """Raise ``UnprintedError`` in place of ``OSError``."""
    try:
        yield
    except OSError as error:
        # Without a number: of EPIPE, typer would end the process.
        unprinted = UnprintedError(
            f"The result cannot be printed ({error.strerror or error}): send it elsewhere, and "
            "run the same command again."
        )
        unprinted.unread = error.errno in (errno.EPIPE, errno.EIO)
        raise unprinted from error


def finite(value: Any) -> Any:
    """A document for JSON, which has neither NaN nor infinity: None in their place."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
