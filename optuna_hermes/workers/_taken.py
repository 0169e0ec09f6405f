"""Waiting for a study that another process of this host optimizes."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable

import psutil

from optuna_hermes.broker import broker_status
from optuna_hermes.errors import BrokerError, BrokerSilentError

TAKEN = "Process {pid} optimizes this study on this host: waiting for it."

REPLACE_SECONDS = 10.0
"""Seconds in which a driver whose broker died may start another one, before others do so."""

_POLL_SECONDS = 0.2


_ANSWER_SECONDS = 2.0
"""Time for which the broker is waited for at once: meanwhile nobody looks whether to stop."""


def driver_of(key: str) -> int | None:
    """The process that optimizes a study on this host; None if none is known to."""
    study = None
    with contextlib.suppress(BrokerError):
        status = broker_status(trials=False, on_silence=_give_up)
        study = None if status is None else status.study(key)
    return None if study is None else study.driver_pid


def _give_up(seconds: float) -> None:
    if seconds > _ANSWER_SECONDS:
        raise BrokerSilentError(f"The broker has not answered for {seconds:.0f} s.")


def wait_for_driver(key: str, pid: int, should_stop: Callable[[], bool]) -> int | None:
    """Wait until no other driver of this host optimizes a study.

    Returns:
        The process of the driver if ``should_stop`` ended the wait; None if the driver has left.

    Raises:
        BrokerConflictError: the broker's socket is not ours.
    """
    absent_at, has_lost_broker = math.inf, False
    while not should_stop():
        try:
            status = broker_status(trials=False, on_silence=_give_up)
        except BrokerSilentError:  # stopped or busy: whom it serves is not known to have left
            continue
        now = time.monotonic()
        study = None if status is None else status.study(key)
        found = None if study is None else study.driver_pid
        has_lost_broker = has_lost_broker or status is None
        if found is not None:
            pid, absent_at = found, math.inf
        else:
            absent_at = min(absent_at, now)
            is_back_soon = has_lost_broker and now - absent_at < REPLACE_SECONDS
            if not is_back_soon or not psutil.pid_exists(pid):
                return None
        time.sleep(_POLL_SECONDS)
    return pid
