"""Messages of workers to their driver; not exit statuses, since an objective may choose any.

They go through a pipe to the fork server, which forwards them before it reports a worker's exit.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable

WAITS, GRANTED, BEGAN, FAILED = "waits", "granted", "began", "failed"
"""It waits for a lease; has one; has found its trial; has raised an error, which goes along."""

LEFT, STOP, NOTHING_LEFT = "left", "stop", "nothing left"
"""It ends by itself. Its objective has called ``study.stop()``; or the sampler has, with no more
to propose."""

ONCE, NOTE = "once", "note"
"""It has computed a value that later workers may share: a packed call. A line for the user."""

LONGEST_REASON = 300
"""Characters of a reason: a line below 4096 bytes (PIPE_BUF) is written to the pipe atomically."""

KERNEL = "by the kernel, if memory has run out"
_KILLERS = f"{KERNEL}, or by the broker, whose log then says why"
"""Senders of SIGKILL: to any process, and to a worker, which the driver kills at its end only."""

Say = Callable[[str, str], None]


def text_of(value: object, how: Callable[[object], str] = repr) -> str:
    """The text of a user's value; the name of its class where that raises."""
    try:
        return how(value)
    except Exception:
        return type(value).__name__


def sayer(pipe: int) -> Say:
    """The function ``say(word, reason)`` of this process; ``pipe`` is the end for writing."""

    def say(word: str, reason: str = "") -> None:
        reason = reason if word == ONCE else reason[:LONGEST_REASON]
        words = {"worker": os.getpid(), "said": word, "reason": reason}
        with contextlib.suppress(OSError):  # the objective has closed what it did not open
            os.write(pipe, json.dumps(words).encode() + b"\n")

    return say


def described(status: int | None, killers: str = _KILLERS) -> str:
    """An exit status, or minus a signal, in words; ``killers`` may have sent SIGKILL."""
    if status is None:
        return "an unknown cause"
    if status >= 0:
        return f"exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"{name}, {killers}" if -status == 9 else name
