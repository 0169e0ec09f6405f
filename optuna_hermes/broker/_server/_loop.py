"""Calls into the broker's event loop, from any thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable


def soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Call it in the loop, unless the loop has ended."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)
