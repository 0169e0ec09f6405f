"""Return of free memory to the system, so that a broker does not stay at its largest size."""

from __future__ import annotations

import contextlib
import ctypes

LARGE_BYTES = 128 * 1024
"""Blocks of this size and above go back to the system as soon as they are free."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def give_back_large_blocks() -> None:
    """Have glibc give large blocks back to the system, for the life of this process."""
    # Of its own accord it keeps what is as large as the largest block that was ever freed: after
    # one long answer to a client that did not read, the broker would stay as large.
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            library.mallopt(option, LARGE_BYTES)


def give_back_free_pages() -> None:
    """Have glibc give pages between blocks that are in use back; a matter of milliseconds."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
