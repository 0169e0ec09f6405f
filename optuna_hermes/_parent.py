"""Processes of this package: the command that starts one, its end, and that of its parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PIDFD_OPEN = 434
"""The number of this system call, which is the same on every architecture."""

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


def pidfd_open(pid: int) -> int:
    """A descriptor that is readable once a process has ended, as ``os.pidfd_open``.

    Conda's Pythons may lack that: they are built for kernels without such a call.

    Raises:
        ProcessLookupError: there is no such process.
        OSError: the kernel has no such call, or a container forbids it.
    """
    python_s = getattr(os, "pidfd_open", None)
    if python_s is not None:
        return int(python_s(pid))
    handle = int(ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_OPEN, pid, 0))
    if handle < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return handle


def kill(pid: int) -> None:
    """SIGKILL a process, unless it is gone already, or cannot be seen from here."""
    if pid <= 0:  # that would be a whole group, this process's own among them
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends, for any reason.

    SIGKILL to a parent leaves it no time to end its children. One that ended before this call
    sends nothing: compare ``os.getppid`` where that may be.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
