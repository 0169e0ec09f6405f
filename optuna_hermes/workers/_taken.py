"""A study that another process of this host optimizes: waited for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import psutil

from optuna_hermes.broker import broker_status

TAKEN = "Process {pid} optimizes this study on this host: waiting for it."

REPLACE_SECONDS = 10.0
"""How long a driver whose broker died may take to start another one, before others do so."""

_LOOK_SECONDS = 0.2


def wait_for_driver(key: str, pid: int, should_stop: Callable[[], bool]) -> int | None:
    """Wait until no other driver of this host optimizes a study.

    Args:
        key: the study's.
        pid: its driver, as the broker told.
        should_stop: asked again and again.

    Returns:
        The driver that is still there though the wait was stopped, None if there is none.

    Raises:
        BrokerConflictError: the broker's socket is not ours.
    """
    absent_at, has_lost_broker = math.inf, False
    while not should_stop():
        status, now = broker_status(runs=False), time.monotonic()
        found = _driver(status, key)
        has_lost_broker = has_lost_broker or status is None
        if found is not None:
            pid, absent_at = found, math.inf
        else:
            absent_at = min(absent_at, now)
            is_back_soon = has_lost_broker and now - absent_at < REPLACE_SECONDS
            if not is_back_soon or not psutil.pid_exists(pid):
                return None
        time.sleep(_LOOK_SECONDS)
    return pid


def _driver(status: dict[str, Any] | None, key: str) -> int | None:
    """The process for which the broker serves a study, None if there is none."""
    for study in [] if status is None else status["studies"]:
        if study["key"] == key:
            found: int | None = study["driver_pid"]
            return found
    return None
