"""Waiting for a database that is away."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import TypeVar

from optuna_hermes._optuna._storages import line
from optuna_hermes.errors import StorageError
from optuna_hermes.ledger import FULL, is_full, mends

PATIENCE_SECONDS = 330.0
"""How long one call waits: a little longer than a broker waits before it suspends everything."""

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0

NOTICE_SECONDS = 5.0
"""Whoever waits for longer says for what."""

log = logging.getLogger(__name__)

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
    pause, end, notice_at = FIRST_PAUSE_SECONDS, None, math.inf
    while True:
        try:
            return call(*args, **named)
        except Exception as error:
            if not mends(error):
                raise
            now = time.monotonic()
            if end is None:
                end, notice_at = now + seconds, now + NOTICE_SECONDS
            if now + pause > end:
                raise away(error) from error
            if now >= notice_at:
                notice_at = math.inf
                log.warning(waits(error))
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def waits(error: Exception) -> str:
    """What is to be said of a database that is waited for."""
    full = f" {FULL}" if is_full(line(error)) else ""
    return f"Waiting for the study's database, which does not answer: {line(error)}{full}"


def away(error: Exception) -> StorageError:
    """The error of a database that was waited for in vain."""
    return StorageError(
        f"The study's database does not answer: {line(error)} Bring it back, then run the same "
        "command again: nothing that was trained is lost."
    )
