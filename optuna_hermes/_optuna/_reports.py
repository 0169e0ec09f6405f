"""Journal of reported values during an outage; a file keeps them beyond the process."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from optuna_hermes._optuna._patience import patiently

LATE_SECONDS = 1.0
"""Seconds after which a value that is not written goes to a file, and training goes on."""

Write = Callable[[int, int, float], None]

log = logging.getLogger(__name__)


class Reports:
    """Writes the values of trials on a thread, in order.

    Args:
        write: writes one value: the trial's id, the step, the value.
    """

    def __init__(self, write: Write) -> None:
        self._write = write
        self._queue: deque[tuple[int, int, float]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._late = False
        self._file: Path | None = None

    @property
    def late(self) -> bool:
        """True if values wait for a database that does not answer."""
        with self._changed:
            return self._late

    def keep_in(self, file: Path, trial_id: int) -> None:
        """Journal late values to a file; first queue those that an earlier process left in it."""
        self._file = file
        for step, value in _read(file):
            self.put(trial_id, step, value)

    def put(self, trial_id: int, step: int, value: float) -> None:
        """Write a value, or keep it for later during an outage.

        Raises:
            Exception: the error of writing an earlier value.
        """
        with self._changed:
            self._raise()
            self._queue.append((trial_id, step, value))
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="hermes-reports", daemon=True
                )
                self._thread.start()
            if not self._late:
                self._late = not self._empty(LATE_SECONDS)
            if self._late:
                self._keep()
            self._raise()

    def flush(self, seconds: float) -> bool:
        """Wait until all is written; False if it took too long.

        Raises:
            Exception: the error of writing a value.
        """
        with self._changed:
            done = self._empty(seconds)
            self._raise()
            return done

    def _empty(self, seconds: float) -> bool:
        return self._changed.wait_for(lambda: not self._queue, seconds)

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                each = self._queue[0]
            error: Exception | None = None
            try:
                patiently(self._write, *each, seconds=math.inf)
            except Exception as raised:  # the next call of put() or flush() raises it
                error = raised
            with self._changed:
                self._queue.popleft()
                self._error = self._error or error
                if not self._queue:
                    self._forget()
                self._changed.notify_all()

    def _keep(self) -> None:
        if self._file is not None:
            partial = self._file.with_suffix(".new")
            values = [(step, value) for _, step, value in self._queue]
            try:
                # Replaced in one step: a kill while writing must not lose the earlier values.
                partial.write_text(json.dumps(values))
                os.replace(partial, self._file)
            except OSError as error:  # the disk may be full, too: they wait in memory alone
                log.warning(
                    "Values that wait for the database are in no file, so make room there: %s",
                    error,
                )
                with contextlib.suppress(OSError):
                    partial.unlink(missing_ok=True)

    def _forget(self) -> None:
        self._late = False
        if self._file is not None:
            with contextlib.suppress(OSError):  # its values would only be reported twice
                self._file.unlink(missing_ok=True)


def _read(file: Path) -> list[tuple[int, float]]:
    try:
        pairs = json.loads(file.read_text())
        return [(int(step), float(value)) for step, value in pairs]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s cannot be read, so look in `status` for what it misses: %s", file, error)
        return []
