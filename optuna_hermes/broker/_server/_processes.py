"""Other processes and threads, and how the broker's loop learns of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator

from optuna_hermes._parent import pidfd_open

_LAST_WORDS_SECONDS = 0.05


def soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Call it in the loop, from any thread, unless the loop has ended."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


def watch(pid: int, ended: Callable[[], None]) -> Callable[[], None] | None:
    """Call ``ended`` once, in the running loop, when a process has ended.

    Returns:
        A function that ends the watch, at any time and repeatedly. None if none is possible:
        the process is gone already, or this kernel has no pidfd.
    """
    loop = asyncio.get_running_loop()
    try:
        handle = pidfd_open(pid)
    except OSError:
        return None

    watching = True

    def end() -> None:
        nonlocal watching
        if watching:  # later the number may be another handle's
            watching = False
            loop.remove_reader(handle)
            os.close(handle)

    def gone() -> None:
        end()
        ended()

    loop.add_reader(handle, gone)
    return end


@contextlib.contextmanager
def closed_with(pid: int, writer: asyncio.StreamWriter) -> Iterator[None]:
    """Close a connection when its process ends, though a child of it may hold the socket open."""

    def ended() -> None:
        # Its last messages may still be in the socket.
        asyncio.get_running_loop().call_later(_LAST_WORDS_SECONDS, writer.transport.abort)

    end = watch(pid, ended)
    try:
        yield
    finally:
        if end is not None:  # else the socket alone must tell
            end()
