"""Handling of signals that reach every process of a job: only the driver acts on them.

``timeout``, systemd, SLURM and a terminal that is closed send them to all processes at once. If
they ended a worker, the batches since its last checkpoint would be lost; the driver suspends every
trial instead.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import signal
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial, partialmethod
from multiprocessing import popen_fork
from types import FrameType
from typing import Any

LEFT_TO_DRIVER = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

_LOST_SECONDS = 0.5
"""Time after which a process that was terminated, and does not act on it, is terminated again."""
_BETWEEN_SECONDS = 0.2
"""The longest time in which a signal for all processes reaches the first and the last of them."""
_RECENT_SECONDS = 2.0
"""Time in which more of a signal for all are for all: a process may be sent two, another one."""

_TIME = struct.Struct("d")
_TORCH_SIGNALS = "torch.utils.data._utils.signal_handling"

_python_signal, _python_getsignal = signal.signal, signal.getsignal
_handlers: dict[int, Any] = {}
"""Handlers that the objective has set for these signals."""
_seen: mmap.mmap | None = None
"""A count, modulo 256, of each signal that was sent to this process, shared with those it forks.

Behind them a byte for each of these, which is set once it acts on a signal, and on the second page
the times of the last signals.
"""
_ignored: dict[int, int] = {}
"""The counts of the parent's signals that this forked process was sent as well, and ignored."""
_pipe: tuple[int, int] = (-1, -1)
_terminated: weakref.WeakSet[Any] = weakref.WeakSet()
_forks = threading.local()
"""The signals that were blocked before a thread forks, and the counts then."""


def leave_to_driver() -> None:
    """Ignore these signals in this process, also after a library has set a handler for one.

    Forked processes ignore a signal only if this process was sent it too.
    """
    global _seen, _pipe
    if _seen is None:
        # Blocked meanwhile: until it has begun, a child would note a signal to it as its parent's.
        os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_begin_child)
        kind: Any = popen_fork.Popen
        kind.terminate = partialmethod(_terminate, kind.terminate)
        kind.wait = partialmethod(_wait, kind.wait)
    _seen, _pipe = mmap.mmap(-1, 2 * mmap.PAGESIZE), os.pipe()
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
    return any(map(_count, LEFT_TO_DRIVER))


def _ignore(number: int, frame: FrameType | None) -> None:
    _read_pipe()


def _block() -> None:
    # Before: a handler that runs as the second call returns may raise.
    _forks.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_DRIVER)
    _forks.counts = {number: _count(number) for number in LEFT_TO_DRIVER}


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forks.blocked)


def _terminate(child: Any, terminate: Callable[[Any], None]) -> None:
    if type(child) is popen_fork.Popen:  # others begin a new program, which has its own handlers
        _terminated.add(child)
    terminate(child)


def _wait(
    child: Any, wait: Callable[[Any, float | None], int | None], timeout: float | None = None
) -> int | None:
    """Wait for a process; one that was terminated, and does not act on it, is terminated again.

    Python calls no handler for a signal that comes right before a process waits in C code, as for
    the lock of its pool's queue, until the next one comes.
    """
    until = math.inf if timeout is None else time.monotonic() + timeout
    lost = child in _terminated
    while lost and not _acts(child.pid) and time.monotonic() + _LOST_SECONDS < until:
        # Its end of the sentinel may be held by a process of its own.
        lost = wait(child, _LOST_SECONDS) is None and child.poll() is None
        if lost and not _acts(child.pid):
            child.terminate()
    return wait(child, None if timeout is None else max(0.0, until - time.monotonic()))


def _acts(pid: int) -> bool:
    """True if a process that was forked from this one acts on a signal."""
    return _seen is not None and _seen[_byte_of(pid)] != 0


def _byte_of(pid: int) -> int:
    return signal.NSIG + pid % (mmap.PAGESIZE - signal.NSIG)


def _begin_child() -> None:
    signal.set_wakeup_fd(-1)
    for number in LEFT_TO_DRIVER:
        _python_signal(number, _act_if_alone)
    torch = sys.modules.get(_TORCH_SIGNALS)
    if torch is not None:
        torch._set_worker_signal_handlers = partial(  # type: ignore[attr-defined]
            _begin_loader, torch._set_worker_signal_handlers
        )
    try:
        _ignored.update(_forks.counts)
        _unblock()
    finally:  # what a handler raises here is lost, as if the signal had not come
        if _seen is not None:
            _seen[_byte_of(os.getpid())] = 0


def _begin_loader(begin: Callable[[], None]) -> None:
    """Set torch's handlers, but replace SIGTERM's, which ends a loader on a signal to all too."""
    begin()
    _handlers[signal.SIGTERM] = lambda number, frame: os._exit(0)  # as torch's does
    _python_signal(signal.SIGTERM, _act_if_alone)


def _act_if_alone(number: int, frame: FrameType | None) -> None:
    """Act on a signal, unless it is one that the parent process was sent as well."""
    if _seen is None:
        return _act(number, frame)
    # Data loaders outlive a signal to the whole job; one to them alone closes a pool.
    deadline = time.monotonic() + _BETWEEN_SECONDS
    while _count(number) == _ignored.get(number, 0) and not _is_recent(number):
        if time.monotonic() > deadline:
            # Not earlier: the process that waits for this one would take it for one that acts.
            _seen[_byte_of(os.getpid())] = 1
            return _act(number, frame)
        time.sleep(0.005)
    _ignored[number] = _seen[number]
    return None


def _act(number: int, frame: FrameType | None) -> None:
    handler = _get_handler(number)
    if callable(handler):
        handler(number, frame)
    elif handler != signal.SIG_IGN:
        _python_signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _count(number: int) -> int:
    """The number of times that the process that forks others was sent a signal, modulo 256."""
    _read_pipe()
    return 0 if _seen is None else _seen[number]


def _is_recent(number: int) -> bool:
    """True if the process that forks others was sent a signal a moment ago."""
    if _seen is None or not _seen[number]:
        return False
    (at,) = _TIME.unpack_from(_seen, _time_at(number))
    return time.monotonic() < float(at) + _RECENT_SECONDS


def _time_at(number: int) -> int:
    return mmap.PAGESIZE + _TIME.size * number


def _read_pipe() -> None:
    if _seen is not None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(_pipe[0], 1 << 16):
                _seen[number] = (_seen[number] + 1) % 256
                _TIME.pack_into(_seen, _time_at(number), time.monotonic())


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
