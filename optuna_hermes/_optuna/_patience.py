"""Waiting for a database that is away."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from optuna_hermes._optuna._storages import line
from optuna_hermes.errors import StorageError
from optuna_hermes.ledger import mends

PATIENCE_SECONDS = 330.0
"""How long one call waits: a little longer than a broker waits before it suspends everything."""

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0

T = TypeVar("T")


def patiently(
    call: Callable[..., T], *args: object, seconds: float = PATIENCE_SECONDS, **named: object
) -> T:
    """Call something again and again, with growing pauses, while its database is away.

    Args:
        call: what may be called twice.
        args: its arguments.
        seconds: how long to wait.
        named: its arguments by name.

    Raises:
        StorageError: the database was away for longer.
        Exception: what the call raised for another reason.
    """
    pause, end = FIRST_PAUSE_SECONDS, None
    while True:
        try:
            return call(*args, **named)
        except Exception as error:
            if not mends(error):
                raise
            now = time.monotonic()
            end = now + seconds if end is None else end
            if now + pause > end:
                raise away(error) from error
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def away(error: Exception) -> StorageError:
    """The error of a database that was waited for in vain."""
    return StorageError(
        f"The study's database does not answer: {line(error)} Bring it back, then run the same "
        "command again: nothing that was trained is lost."
    )
