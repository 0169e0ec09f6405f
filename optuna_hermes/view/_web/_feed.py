"""Feed of all open pages: one shared look at the study, whose changes go to every listener."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from optuna_hermes.view._web._delta import delta

EVERY_SECONDS = 0.4
"""Seconds between two looks. A report reaches the ledger up to 0.25 s after the broker has it."""

SHARE = 0.5
"""Largest share of the time that is spent on looks."""

BEAT_SECONDS = 15.0
"""Seconds without a change after which a comment line is sent: proxies close silent streams."""

UNREAD = 64
"""Number of unread changes after which a listener is sent the whole page instead."""

log = logging.getLogger("optuna_hermes.web")

Page = dict[str, Any]


class Feed:
    """Stream of server-sent events for each open page.

    Args:
        look: returns the present page; called from one thread at a time.
        rest: called once there are no listeners any more.
        every_seconds: time between two looks.
    """

    def __init__(
        self,
        look: Callable[[], Page],
        rest: Callable[[], None] = lambda: None,
        every_seconds: float = EVERY_SECONDS,
    ) -> None:
        self._look = look
        self._rest = rest
        self._every_seconds = every_seconds
        self._page: Page | None = None
        self._listeners: set[_Listener] = set()
        self._looking: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._turn = asyncio.Lock()
        self._closed = False

    async def listen(self) -> AsyncIterator[bytes]:
        """Server-sent events: the whole page, then what has changed of it, until ``close``."""
        listener = _Listener()
        self._listeners.add(listener)
        try:
            if self._looking is None:
                self._looking = asyncio.create_task(self._keep_looking())
            elif self._page is not None:
                listener.put(_event("page", self._page))
            while not self._closed:
                yield await listener.get()
        finally:
            self._listeners.discard(listener)
            self._hurry.set()

    def hurry(self) -> None:
        """Look at once, after a change made through this server."""
        self._hurry.set()

    def close(self) -> None:
        """End every stream; no further one begins."""
        self._closed = True
        self._hurry.set()
        for listener in self._listeners:
            listener.put(b"")

    async def _keep_looking(self) -> None:
        while self._listeners and not self._closed:
            begin = time.monotonic()
            await self._look_once()
            took = time.monotonic() - begin
            await self._pause(max(self._every_seconds, took / SHARE) - took)
        self._looking = self._page = None
        # The lock keeps rest() from closing what a new listener's look() uses on another thread.
        async with self._turn:
            await asyncio.to_thread(self._rest)

    async def _look_once(self) -> None:
        try:
            async with self._turn:
                page = await asyncio.to_thread(self._look)
        except Exception:  # the loop must live: the next look may succeed
            log.exception("a look failed")
            return
        before, self._page = self._page, page
        changes = page if before is None else delta(before, page)
        if changes:
            event = _event("page" if before is None else "change", changes)
            for listener in self._listeners:
                listener.tell(event, page)

    async def _pause(self, seconds: float) -> None:
        self._hurry.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), seconds)


class _Listener:
    """The unread events of one open page."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[bytes] = asyncio.Queue()

    def put(self, event: bytes) -> None:
        self._events.put_nowait(event)

    def tell(self, event: bytes, page: Page) -> None:
        """Add an event; of a page that does not read, replace all of them by the whole page."""
        if self._events.qsize() >= UNREAD:
            while not self._events.empty():
                self._events.get_nowait()
            event = _event("page", page)
        self.put(event)

    async def get(self) -> bytes:
        try:
            return await asyncio.wait_for(self._events.get(), BEAT_SECONDS)
        except asyncio.TimeoutError:
            return b": still here\n\n"


def _event(name: str, document: Page) -> bytes:
    """One server-sent event, with the server's time, by which pages count slices down."""
    timed = {**document, "now": round(time.time(), 2)}
    text = json.dumps(timed, separators=(",", ":"), allow_nan=False)
    return f"event: {name}\ndata: {text}\n\n".encode()
