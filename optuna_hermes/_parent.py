"""The parent of a process, with which it ends."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends, for any reason.

    SIGKILL to a parent leaves it no time to end its children. One that ended before this call
    sends nothing: compare ``os.getppid`` where that may be.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
