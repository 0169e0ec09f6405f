"""The sessions of this process, by trial and by thread."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna_hermes.broker._client._session import TrialSession
    from optuna_hermes.broker._protocol import Ending

INSIDE_VARIABLE = "OPTUNA_HERMES_INSIDE"
"""Set in every process that ``optimize`` starts; those that an objective starts inherit it."""

StudyIdentity = tuple[object, int]
"""A study among those of this process: its storage, or that one's URL, and its id there.

Its name is no identity: studies of several storages may have the same one.
"""


@dataclass(kw_only=True, eq=False)
class SessionEntry:
    """A session of a trial in this process.

    Args:
        lazy: the trial was only asked for: its session began with its first report, and may end
            before the trial does.
        thread: the thread that trains it.
        longest_seconds: the longest time between two signs of life, at ``seen_at`` the last one.
        fate: tells how the trial has ended, None if it has not.
        in_use: a call works with the session now.
        older: the threads that had begun before it: hardly any of them is part of its trial.
    """

    session: TrialSession
    study: StudyIdentity
    number: int
    lazy: bool = False
    thread: threading.Thread = field(default_factory=threading.current_thread)
    seen_at: float = field(default_factory=time.monotonic)
    longest_seconds: float = 0.0
    fate: Callable[[], Ending | None] = lambda: None
    in_use: bool = False
    older: weakref.WeakSet[threading.Thread] = field(
        default_factory=lambda: weakref.WeakSet(threading.enumerate())
    )

    def seen(self) -> None:
        """Note a sign of life of the trial, from the thread that trains it."""
        now = time.monotonic()
        self.longest_seconds = max(self.longest_seconds, now - self.seen_at)
        self.seen_at, self.thread = now, threading.current_thread()


class Sessions:
    """The sessions of this process, by study and trial number.

    ``worker`` is the session of a process that serves one trial at a time for ``optimize``, and
    ``importing`` says that this process imports an objective for such processes.
    """

    def __init__(self) -> None:
        self.worker: TrialSession | None = None
        self.importing = False
        self._held: dict[tuple[StudyIdentity, int], SessionEntry] = {}
        self._lock = threading.Lock()

    @property
    def inside(self) -> bool:
        """True in a worker of ``optimize`` and in what its objective starts, on its device."""
        return self.worker is not None or INSIDE_VARIABLE in os.environ

    def add(
        self, study: StudyIdentity, number: int, session: TrialSession, **known: Any
    ) -> SessionEntry:
        """Add the session of a trial, with further ``known`` fields of ``SessionEntry``."""
        held = SessionEntry(session=session, study=study, number=number, **known)
        with self._lock:
            self._held[study, number] = held
        return held

    def get(self, study: StudyIdentity, number: int) -> TrialSession | None:
        held = self._held.get((study, number))
        return None if held is None else held.session

    def pop(self, study: StudyIdentity, number: int) -> TrialSession | None:
        with self._lock:
            held = self._held.pop((study, number), None)
        return None if held is None else held.session

    def all(self) -> list[SessionEntry]:
        with self._lock:
            return list(self._held.values())

    def of_thread(self) -> SessionEntry | None:
        """A session of the trials that the calling thread trains, None if there is none."""
        me = threading.current_thread()
        return next((held for held in self.all() if held.thread is me), None)

    @contextmanager
    def using(self, study: StudyIdentity, number: int) -> Iterator[SessionEntry | None]:
        """Session of a trial, None if there is none; it is not taken away within the block."""
        with self._lock:
            held = self._held.get((study, number))
            if held is not None:
                held.in_use = True
        try:
            if held is not None:
                held.seen()
            yield held
        finally:
            if held is not None:
                held.in_use = False
                held.seen_at = time.monotonic()

    def take_away(self, held: SessionEntry) -> bool:
        """Remove a session, unless a call works with it now or it was removed; True if this did."""
        key = held.study, held.number
        with self._lock:
            if held.in_use or self._held.get(key) is not held:
                return False
            del self._held[key]
            return True

    def forget(self) -> None:
        """Remove the sessions of trials: after a fork they are the parent's."""
        # Another thread may have held the lock at the fork, and is not there to release it.
        self._lock = threading.Lock()
        self._held = {}


sessions = Sessions()
os.register_at_fork(after_in_child=sessions.forget)
