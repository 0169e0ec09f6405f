"""Processes of this package: the command that starts one, and the parent with which it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

_START = (
    "import sys; {}sys.path[:] = [each for each in sys.path if each] + [{!r}]; "
    "from {} import main; sys.exit(main())"
)


def python_command(module: str, *arguments: object, first: str = "") -> list[str]:
    """The command line that runs ``main`` of a module of this package, after a ``first`` code."""
    # Not `python -m`: this process may have the package from a folder that only it knows, and it
    # would import from the current folder first.
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return [sys.executable, "-c", _START.format(first, folder, module), *map(str, arguments)]


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends, for any reason.

    SIGKILL to a parent leaves it no time to end its children. One that ended before this call
    sends nothing: compare ``os.getppid`` where that may be.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
