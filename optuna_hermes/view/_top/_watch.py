"""The source of ``top``, and the threads on which it is read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from rich.console import RenderableType
from textual.message import Message

from optuna_hermes.errors import HermesError, sentence
from optuna_hermes.view.history import Bar
from optuna_hermes.view.picture import Picture

# Between two requests to the broker, which also has work to do.
LOOK_SECONDS = 1.0

# Between two reads of past leases: pictures show the newest ones, if less exactly.
READ_SECONDS = 10.0


class TopSource(Protocol):
    """Source of pictures and target of commands; an error that is raised is shown."""

    # Calls may block: ``look`` and ``past`` are made in one thread, the others in any.

    def look(self, key: str) -> Picture:
        """The present picture of a study; with an empty key of any."""

    def past(self) -> Sequence[Bar]:
        """Past leases of the study of the last ``look``, if its ledger is known."""

    def override(self, key: str, number: int, override: Literal["held", "boosted"] | None) -> None:
        """Hold, boost or (None) release a trial."""

    def finish(self, key: str, number: int) -> None:
        """Finish a trial at its last value."""

    def change_policy(self, key: str, policy: str) -> None:
        """Change the study's policy."""

    def event_log(self, key: str, number: int) -> RenderableType:
        """The figures and the event log of a trial."""

    def close(self) -> None:
        """Close the connection; a blocked ``look`` returns."""


@dataclass
class NewPicture(Message):
    """Message: a new picture, and past leases (``bars``) if they were read."""

    picture: Picture
    bars: tuple[Bar, ...]


@dataclass
class SourceLost(Message):
    """Message: the source cannot be reached."""

    text: str


@dataclass
class EventLogRead(Message):
    """Message: a trial's event log was read."""

    number: int
    log: RenderableType


@dataclass
class Notice(Message):
    """Message: a line to show; ``bad`` for an error."""

    text: str
    bad: bool = False


class Watcher:
    """Polls a source for pictures, and carries out commands, on threads of its own."""

    def __init__(self, source: TopSource, post: Callable[[Message], object]) -> None:
        self._source = source
        self._post = post
        self._read_at: float | None = None
        self._seen = ""
        self._due = threading.Event()
        self._ended = threading.Event()
        self.key = ""

    def start(self) -> None:
        self._start(self._watch)

    def look_now(self, key: str) -> None:
        """Poll at once, for this study."""
        self.key = key
        self._due.set()

    def do(self, call: Callable[[], Message]) -> None:
        """Call a function on a thread, post its message or its error, and poll at once."""

        def work() -> None:
            try:
                self._post(call())
            except Exception as error:
                self._post(Notice(_text(error), bad=True))
            # The command's effect is shown at once.
            self._due.set()

        self._start(work)

    def end(self) -> None:
        """Stop polling, and close the source."""
        self._ended.set()
        self._due.set()
        self._source.close()

    def _start(self, work: Callable[[], None]) -> None:
        # A daemon: leaving waits for no answer of a broker or a database.
        threading.Thread(target=work, name="hermes-top", daemon=True).start()

    def _watch(self) -> None:
        while not self._ended.is_set():
            begin = time.monotonic()
            try:
                self._post(NewPicture(self._source.look(self.key), self._past()))
                self._seen = " What you see is of before."
            except Exception as error:
                # Any error: the loop must live, for the next look may succeed.
                self._post(SourceLost(f"{_text(error)}{self._seen}"))
            self._due.wait(max(0.0, begin + LOOK_SECONDS - time.monotonic()))
            self._due.clear()

    def _past(self) -> tuple[Bar, ...]:
        if self._read_at is not None and time.monotonic() - self._read_at < READ_SECONDS:
            return ()
        try:
            return tuple(self._source.past())
        except Exception:
            # Pictures go on without it, for the broker does: they show the newest leases.
            return ()
        finally:
            # From the end: a database that is away may take as long as that to say so.
            self._read_at = time.monotonic()


def _text(error: Exception) -> str:
    # Others than this package's are for no user, and may have many lines.
    is_own = isinstance(error, HermesError)
    return str(error) if is_own else f"{type(error).__name__}: {sentence(error)}"
