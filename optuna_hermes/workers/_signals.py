"""Handling of signals that reach every process of a job: only the driver acts on them.

``timeout``, systemd, SLURM and a terminal that is closed send them to all processes at once. If
they ended a worker, the batches since its last checkpoint would be lost; the driver suspends every
trial instead.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

LEFT_TO_DRIVER = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

_BETWEEN_SECONDS = 0.2
"""The longest time in which a signal for all processes reaches the first and the last of them."""

_TORCH_SIGNALS = "torch.utils.data._utils.signal_handling"

_python_signal, _python_getsignal = signal.signal, signal.getsignal
_handlers: dict[int, Any] = {}
"""Handlers that the objective has set for these signals."""
_seen: mmap.mmap | None = None
"""A byte for each signal that was sent to this process, shared with those it forks."""
_pipe: tuple[int, int] = (-1, -1)


def leave_to_driver() -> None:
    """Ignore these signals in this process, also after a library has set a handler for one.

    Forked processes ignore a signal only if this process was sent it too.
    """
    global _seen, _pipe
    if _seen is None:
        os.register_at_fork(after_in_child=_begin_child)
    _seen, _pipe = mmap.mmap(-1, signal.NSIG), os.pipe()
    for end in _pipe:
        os.set_blocking(end, False)
    # The pipe is written at once, even while a long operation delays Python's handlers.
    signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)
    # Not by SIG_IGN, which programs started from here would inherit: they could not be terminated.
    for number in LEFT_TO_DRIVER:
        _python_signal(number, _ignore)
    # Lightning sets handlers that end a training: they are remembered and never called.
    signal.signal, signal.getsignal = _set_handler, _get_handler  # type: ignore[assignment]


def leave_group() -> None:
    """Leave the driver's process group: only the driver acts on signals to that group."""
    os.setpgid(0, 0)
    # A background group that prints to its terminal would be stopped.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    leave_to_driver()


def sent_to_all() -> bool:
    """True if this process was sent such a signal, and so the processes that it has started."""
    return any(map(_was_sent, LEFT_TO_DRIVER))


def _ignore(number: int, frame: FrameType | None) -> None:
    _read_pipe()


def _begin_child() -> None:
    signal.set_wakeup_fd(-1)
    for number in LEFT_TO_DRIVER:
        _python_signal(number, _act_if_alone)
    torch = sys.modules.get(_TORCH_SIGNALS)
    if torch is not None:
        torch._set_worker_signal_handlers = partial(  # type: ignore[attr-defined]
            _begin_loader, torch._set_worker_signal_handlers
        )


def _begin_loader(begin: Callable[[], None]) -> None:
    """Set torch's handlers, but replace SIGTERM's, which ends a loader on a signal to all too."""
    begin()
    _handlers[signal.SIGTERM] = lambda number, frame: os._exit(0)  # as torch's does
    _python_signal(signal.SIGTERM, _act_if_alone)


def _act_if_alone(number: int, frame: FrameType | None) -> None:
    """Act on a signal, unless the parent process was sent it as well."""
    # Data loaders outlive a signal to the whole job; one to them alone closes a pool.
    deadline = time.monotonic() + _BETWEEN_SECONDS
    while not _was_sent(number):
        if time.monotonic() > deadline:
            return _act(number, frame)
        time.sleep(0.005)
    return None


def _act(number: int, frame: FrameType | None) -> None:
    handler = _get_handler(number)
    if callable(handler):
        handler(number, frame)
    elif handler != signal.SIG_IGN:
        _python_signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _was_sent(number: int) -> bool:
    _read_pipe()
    return _seen is not None and _seen[number] != 0


def _read_pipe() -> None:
    if _seen is not None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(_pipe[0], 1 << 16):
                _seen[number] = 1


def _set_handler(number: int, handler: Callable[..., Any] | int | None) -> Any:
    if number not in LEFT_TO_DRIVER:
        return _python_signal(number, handler)
    before, _handlers[number] = _get_handler(number), handler
    return before


def _get_handler(number: int) -> Any:
    if number not in LEFT_TO_DRIVER:
        return _python_getsignal(number)
    default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    return _handlers.get(number, default)
