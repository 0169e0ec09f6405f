"""The command line: ``optuna-hermes``."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import NoReturn

from optuna_hermes.errors import ExitStatus
from optuna_hermes.workers._output import open_closed_streams

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
    open_closed_streams()
    # A name, or the bars of a curve, may have characters that the encoding of a terminal lacks.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))
