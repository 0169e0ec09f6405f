"""The threads of ``top``: daemons, so that leaving waits for none of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rich.console import RenderableType
from textual.message import Message

from optuna_hermes.errors import HermesError
from optuna_hermes.view._history import Bar
from optuna_hermes.view._top._picture import Picture, TopSource

LOOK_SECONDS = 1.0
"""Seconds between two requests to the broker."""

READ_SECONDS = 10.0
"""Seconds between two reads of past leases from the ledger."""


class Seen(Message):
    """Message: a new picture, and past leases (``bars``) if they were read."""

    def __init__(self, picture: Picture, bars: tuple[Bar, ...]) -> None:
        super().__init__()
        self.picture = picture
        self.bars = bars


class Lost(Message):
    """Message: the source cannot be reached."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.words = words


class LogRead(Message):
    """Message: a trial's event log was read."""

    def __init__(self, number: int, story: RenderableType) -> None:
        super().__init__()
        self.number = number
        self.story = story


class Said(Message):
    """Message: a line to show; ``bad`` for an error."""

    def __init__(self, words: str, *, bad: bool = False) -> None:
        super().__init__()
        self.words = words
        self.bad = bad


class Watcher:
    """Polls a source for pictures, and carries out commands, on threads of its own.

    Args:
        source: see ``TopSource``.
        post: posts a message to the screen, from any thread.
    """

    def __init__(self, source: TopSource, post: Callable[[Message], object]) -> None:
        self._source = source
        self._post = post
        self._read_at: float | None = None
        self._asked = threading.Event()
        self._ended = threading.Event()
        self.key = ""

    def start(self) -> None:
        """Start polling."""
        self._start(self._watch)

    def look_now(self, key: str) -> None:
        """Poll at once, for this study."""
        self.key = key
        self._asked.set()

    def do(self, call: Callable[[], Message | None]) -> None:
        """Call a function on a thread, post its message or its error, and poll at once."""

        def work() -> None:
            try:
                answer = call()
            except HermesError as error:
                answer = Said(str(error), bad=True)
            if answer is not None:
                self._post(answer)
            self._asked.set()  # the command's effect is shown at once

        self._start(work)

    def end(self) -> None:
        """Stop polling, and close the source."""
        self._ended.set()
        self._asked.set()
        self._source.close()

    def _start(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name="hermes-top", daemon=True).start()

    def _watch(self) -> None:
        while not self._ended.is_set():
            begin = time.monotonic()
            try:
                self._post(Seen(self._source.look(self.key), self._past(begin)))
            except HermesError as error:
                self._post(Lost(f"{error} What you see is of before."))
            self._asked.wait(max(0.0, begin + LOOK_SECONDS - time.monotonic()))
            self._asked.clear()

    def _past(self, now: float) -> tuple[Bar, ...]:
        if self._read_at is not None and now - self._read_at < READ_SECONDS:
            return ()
        self._read_at = now
        return tuple(self._source.past())
