"""Queue of reported values during an outage; the journal keeps them beyond the process."""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from optuna_hermes._optuna._retry import with_retry
from optuna_hermes.broker._client._journal import change, find

LATE_SECONDS = 1.0
"""Seconds after which a value that is not written goes to the journal, and training goes on."""

Write = Callable[[int, int, float], None]


class Reports:
    """Writes the values of trials (trial's id, step, value) on a thread, in order."""

    def __init__(self, write: Write) -> None:
        self.beside = False
        """True while values are written beside the training, and their errors raised later."""
        self._write = write
        self._queue: deque[tuple[int, int, float]] = deque()
        self._changed = threading.Condition(threading.RLock())
        self._started = False
        self._error: Exception | None = None
        self._late = False
        self._folder: Path | None = None
        self._pid: int | None = None

    @property
    def late(self) -> bool:
        """True if values wait for a database that does not answer."""
        if self._in_fork:
            return False
        with self._changed:
            return self._late

    def keep_in(self, folder: Path, trial_id: int) -> None:
        """Journal late values in a trial's folder; queue those that an earlier process left."""
        self._folder, self._pid = folder, os.getpid()
        for step, value in find(folder).unwritten:
            self.put(trial_id, step, value)

    def put(self, trial_id: int, step: int, value: float) -> None:
        """Begin to write a value once all earlier ones are written, or are late.

        Raises:
            Exception: the error of writing an earlier value.
        """
        if self._in_fork:
            return with_retry(self._write, trial_id, step, value)
        with self._changed:
            self.check()
            self._queue.append((trial_id, step, value))
            self._changed.notify_all()
            if not self._started:
                self._start()
            if self._late:
                self._journal()

    def settle(self) -> None:
        """Wait until each value is written or in the journal, so that a later process has it."""
        if self._in_fork:
            return
        with self._changed:
            # During an outage the first late value is the last that training waits for.
            if not self._late:
                self._late = not self._empty(LATE_SECONDS)
                if self._late:
                    self._journal()

    def check(self) -> None:
        """As ``settle``.

        Raises:
            Exception: the error of writing a value.
        """
        if self._in_fork:
            return
        with self._changed:
            self.settle()
            self._raise()

    def flush(self, seconds: float) -> bool:
        """Wait until all is written; False if it took too long.

        Raises:
            Exception: the error of writing a value.
        """
        if self._in_fork:
            return True
        with self._changed:
            done = self._empty(seconds)
            self._raise()
            return done

    @property
    def _in_fork(self) -> bool:
        """True in a fork of the trial's process: it has no thread, and writes at once."""
        return self._pid not in (None, os.getpid())

    def _empty(self, seconds: float) -> bool:
        return self._changed.wait_for(lambda: not self._queue, seconds)

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name="hermes-reports", daemon=True)
        try:
            thread.start()
            self._started, self._pid = True, os.getpid()
        except RuntimeError:  # a limit of processes is reached, for this moment
            while self._queue:
                self._write_first()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
            self._write_first()

    def _write_first(self) -> None:
        each = self._queue[0]  # it stays, and so in the journal, until it is written
        error: Exception | None = None
        try:
            with_retry(self._write, *each, seconds=math.inf)
        except Exception as raised:  # the next call of put(), check() or flush() raises it
            error = raised
        with self._changed:
            self._queue.popleft()
            self._error = self._error or error
            if not self._queue:
                self._late = False
                self._journal()
            self._changed.notify_all()

    def _journal(self) -> None:
        """Write the values that wait into the journal, or take out those that do no longer."""
        if self._folder is not None:
            change(self._folder, unwritten=tuple((step, value) for _, step, value in self._queue))
