"""Retries while a database does not answer."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import TypeVar

from optuna_hermes import ledger
from optuna_hermes._optuna._storages import line
from optuna_hermes.errors import DatabaseOutageError, StorageError
from optuna_hermes.model import OUTAGE_SECONDS

LONGEST_RETRY_SECONDS = OUTAGE_SECONDS + 30.0
"""Longest retry of a call in seconds: a little longer than a broker waits to suspend all trials."""

FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0

NOTICE_SECONDS = 5.0
"""Seconds of waiting after which a warning is logged."""

log = logging.getLogger(__name__)

T = TypeVar("T")


def with_retry(
    call: Callable[..., T],
    *args: object,
    seconds: float = LONGEST_RETRY_SECONDS,
    since: float | None = None,
    **named: object,
) -> T:
    """Retry a call, which may run twice, with growing pauses while its database does not answer.

    It waits for ``seconds`` at most: from the first error on, or from ``since``, a time of
    ``time.monotonic()``.

    Raises:
        DatabaseOutageError: the database did not answer for longer.
        Exception: the call's error if it has another cause.
    """
    pause, end, notice_at = FIRST_PAUSE_SECONDS, None, math.inf
    while True:
        try:
            return call(*args, **named)
        except Exception as error:
            if not ledger.is_transient(error):
                raise
            now = time.monotonic()
            if end is None:
                end = (now if since is None else since) + seconds
                notice_at = now + NOTICE_SECONDS
            if now + pause > end:
                raise outage_error(error) from error
            if now >= notice_at:
                notice_at = math.inf
                log.warning(outage_warning(error))
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def outage_warning(error: Exception) -> str:
    """The warning about a database that is waited for."""
    reason = line(error)
    full = f" {ledger.FULL}" if ledger.is_full(reason) else ""
    how = ledger.outage_phrase(reason)
    return f"Waiting for the study's database, which {how}: {_reason(error)}{full}"


def outage_error(error: Exception) -> DatabaseOutageError:
    """The error of a database that was waited for in vain."""
    return DatabaseOutageError(
        f"The study's database {ledger.outage_phrase(line(error))}: {_reason(error)} Bring it "
        "back, then run the same command again: nothing that was trained is lost."
    )


def _reason(error: Exception) -> str:
    # A storage that cannot be opened is named, without its password: its URL may be wrong.
    return str(error) if isinstance(error, StorageError) else line(error)
