"""Feed of all open pages: one shared look at the study, whose changes go to every listener.

A page is sent whole once, then only its changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

# Between two looks: a report reaches the ledger up to 0.25 s after the broker has it.
EVERY_SECONDS = 0.4

# Of the time, spent on looks: a huge study takes long to read, and the rest is left to others.
SHARE = 0.5

# Without a change for so long an event without content is sent: proxies close silent streams, and a
# page that hears nothing has lost its server.
BEAT_SECONDS = 15.0

# A listener with more unread changes is sent the whole page instead, which is bounded.
UNREAD = 64

log = logging.getLogger("optuna_hermes.web")

# Parts of a page that are compared entry by entry; a removed entry is sent as None.
KEYED = ("trials", "bars")

# The part whose entries are curves; of each only the points after the common start are sent.
GROWING = "curves"

Page = dict[str, Any]
Answer = TypeVar("Answer")


class Feed:
    """Stream of server-sent events for each open page.

    ``look`` returns the present page, and is called from one thread at a time; ``on_idle`` is
    called once there are no listeners any more.
    """

    def __init__(
        self,
        look: Callable[[], Page],
        on_idle: Callable[[], None] = lambda: None,
        every_seconds: float = EVERY_SECONDS,
    ) -> None:
        self._look = look
        self._on_idle = on_idle
        self._every_seconds = every_seconds
        self._page: Page | None = None
        self._listeners: set[_Listener] = set()
        self._looking: asyncio.Task[None] | None = None
        self._due = asyncio.Event()
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
                # A page that is opened later need not wait for the next look.
                listener.put(_event("page", self._page))
            while not self._closed:
                yield await listener.get()
        finally:
            self._listeners.discard(listener)
            self._due.set()

    def look_now(self) -> None:
        """Look at once, after a change made through this server."""
        self._due.set()

    def close(self) -> None:
        """End every stream; no further one begins."""
        self._closed = True
        self._due.set()
        for listener in self._listeners:
            listener.put(b"")

    async def _keep_looking(self) -> None:
        while self._listeners and not self._closed:
            begin = time.monotonic()
            self._due.clear()  # not after the look: a change that comes during it is due
            await self._look_once()
            took = time.monotonic() - begin
            with contextlib.suppress(asyncio.TimeoutError):
                pause = max(self._every_seconds, took / SHARE) - took
                await asyncio.wait_for(self._due.wait(), pause)
        self._looking = self._page = None
        # The lock keeps on_idle() from closing what a new listener's look() uses on another thread.
        async with self._turn:
            await in_thread(self._on_idle)

    async def _look_once(self) -> None:
        try:
            async with self._turn:
                page = await in_thread(self._look)
            before = self._page
            changes = page if before is None else delta(before, page)
            event = _event("page" if before is None else "change", changes) if changes else b""
        except Exception:
            # Any error: the loop must live, for the next look may succeed.
            log.exception("a look failed")
            return
        self._page = page
        if event:
            for listener in self._listeners:
                listener.send(event, page)


class _Listener:
    """The unread events of one open page."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[bytes] = asyncio.Queue()

    def put(self, event: bytes) -> None:
        self._events.put_nowait(event)

    def send(self, event: bytes, page: Page) -> None:
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
            return b"event: beat\ndata: {}\n\n"


def _event(name: str, document: Page) -> bytes:
    # Pages count slices down by the server's clock, not by that of another computer.
    timed = {**document, "now": round(time.time(), 2)}
    text = json.dumps(timed, separators=(",", ":"), allow_nan=False)
    return f"event: {name}\ndata: {text}\n\n".encode()


async def in_thread(call: Callable[[], Answer]) -> Answer:
    """The answer of a function that is called in a daemon thread."""
    # Not asyncio.to_thread(): whose threads the event loop waits for at its end.
    answer: Future[Answer] = Future()
    answer.set_running_or_notify_cancel()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, name="hermes-web", daemon=True).start()
    return await asyncio.wrap_future(answer)


# -- changes --------------------------------------------------------------------------------------


def delta(before: Page, after: Page) -> Page:
    """The changes that turn ``before`` into ``after``; empty if they are equal.

    Example:
        >>> delta({"trials": {"0": "parked"}}, {"trials": {"0": "parked", "1": "pending"}})
        {'trials': {'1': 'pending'}}
    """
    changes: Page = {}
    for name, part in after.items():
        old = before.get(name)
        # A part that has not changed is the same object: large ones are not compared.
        if part is old or part == old:
            continue
        changes[name] = part
        if name in KEYED or name == GROWING:
            changes[name] = _entries(old or {}, part, growing=name == GROWING)
    return changes


def _entries(before: Page, after: Page, *, growing: bool) -> Page:
    changes: Page = {key: None for key in before if key not in after}
    for key, entry in after.items():
        old = before.get(key)
        if entry is not old and entry != old:
            changes[key] = _grown(old, entry) if growing else entry
    return changes


def _grown(before: Page | None, after: Page) -> Any:
    """The columns of a curve from its first new point on; ``from`` is the index of that point."""
    count = 0 if before is None else _common(before, after)
    return {"from": count, **{name: column[count:] for name, column in after.items()}}


def _common(before: Page, after: Page) -> int:
    """The number of equal points at the beginning of two curves."""
    old = list(zip(*(before[name] for name in after), strict=True))
    new = list(zip(*after.values(), strict=True))
    same = (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
    return next(same, min(len(old), len(new)))
