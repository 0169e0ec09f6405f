"""Start method of ``multiprocessing`` in a study's processes: fork, where nothing else is chosen.

Since Python 3.14 the default is its own fork server. What it starts imports the script and torch
once more, for seconds in each process of a trial, and has nothing that the script has set.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.context
import os
import sys
from typing import Any


def fork_by_default() -> None:
    """Make fork the default of this process and its forks."""
    default: Any = multiprocessing.context._default_context
    # A progress bar's lock is enough to fix the default for good: that is nobody's choice.
    if default._actual_context is default._default_context:
        default._actual_context = None
    # The public function would fix it, too, and an objective may still choose.
    default._default_context = multiprocessing.get_context("fork")


def forget_fork_server() -> None:
    """Have this fork start a fork server of Python's of its own.

    It would wait for that of its parent, which is no child of it: an error (CPython's gh-86354).
    """
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    if server is None or server._forkserver_pid is None:
        return
    with contextlib.suppress(OSError):
        os.close(server._forkserver_alive_fd)
    for name in ("pid", "address", "alive_fd", "authkey"):  # the last one since Python 3.14
        setattr(server, f"_forkserver_{name}", None)
