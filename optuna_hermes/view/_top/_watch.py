"""The threads of ``top``: whoever leaves waits for none of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rich.console import RenderableType
from textual.message import Message

from optuna_hermes.errors import HermesError
from optuna_hermes.view._history import Bar
from optuna_hermes.view._top._picture import Picture
from optuna_hermes.view._top._source import Source

LOOK_SECONDS = 1.0
"""How often the broker is asked."""

READ_SECONDS = 10.0
"""How often the ledger is asked who had which device."""


class Seen(Message):
    """There is a new picture; ``bars`` are what was read of the past."""

    def __init__(self, picture: Picture, bars: tuple[Bar, ...]) -> None:
        super().__init__()
        self.picture = picture
        self.bars = bars


class Lost(Message):
    """There is nobody to ask any more."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.words = words


class Told(Message):
    """A trial's story was read."""

    def __init__(self, number: int, story: RenderableType) -> None:
        super().__init__()
        self.number = number
        self.story = story


class Said(Message):
    """Something is to be told in a line."""

    def __init__(self, words: str, *, bad: bool = False) -> None:
        super().__init__()
        self.words = words
        self.bad = bad


class Watcher:
    """Asks a source for pictures, and does what people want, in threads of its own.

    Args:
        source: see ``Source``.
        post: gives a message to the screen, from any thread.
    """

    def __init__(self, source: Source, post: Callable[[Message], object]) -> None:
        self._source = source
        self._post = post
        self._read_at: float | None = None
        self._asked = threading.Event()
        self._ended = threading.Event()
        self.key = ""

    def start(self) -> None:
        """Begin to look."""
        self._start(self._watch)

    def look_now(self, key: str) -> None:
        """Look at this study, and do not wait for the next time."""
        self.key = key
        self._asked.set()

    def do(self, call: Callable[[], Message | None]) -> None:
        """Do something, tell what came of it, and look again."""

        def work() -> None:
            try:
                answer = call()
            except HermesError as error:
                answer = Said(str(error), bad=True)
            if answer is not None:
                self._post(answer)
            self._asked.set()

        self._start(work)

    def end(self) -> None:
        """Look no more."""
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
