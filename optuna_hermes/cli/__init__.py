"""The command line: ``optuna-hermes``."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from optuna_hermes.errors import ExitStatus

__all__ = ["main", "run"]


def run(argv: Sequence[str]) -> int:
    """Run one command line, given without the program's name, and return its exit status."""
    try:
        # Imported here: that takes a while, in which Ctrl-C shall end it as at any other time.
        from optuna_hermes.cli import _app

        return _app.run(argv)
    except KeyboardInterrupt:
        return ExitStatus.INTERRUPTED


def main() -> NoReturn:
    """Run the command line of this process and exit with its status."""
    _open_closed_streams()
    # A name, or the dots of a chart, may have characters that the encoding of a terminal lacks.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))


def _open_closed_streams() -> None:
    """Open to nowhere each standard stream that is closed, as by ``2>&-``."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # Else the next file or socket would get this number, here and in the workers.
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
            file = io.FileIO(number, "w" if number else "r", closefd=False)
            setattr(sys, name, io.TextIOWrapper(file, errors="backslashreplace"))
