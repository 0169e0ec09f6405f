"""Fork of the driver that becomes its fork server: it has imported all that the script has.

A new Python would import torch, Optuna and the objective's libraries a second time, which takes as
long as the script took for it. The fork has everything that the script has set, too.
"""

from __future__ import annotations

import ctypes
import gc
import io
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import NoReturn

from optuna_hermes import _optuna
from optuna_hermes._heap import flush_files, freeze
from optuna_hermes._optuna import Study
from optuna_hermes.workers._fork_safety import missed_threads, why_not_fork
from optuna_hermes.workers._objective import Objective
from optuna_hermes.workers._output import flush_streams, stream
from optuna_hermes.workers._processes import ForkedProcess, end_with
from optuna_hermes.workers._signals import LEFT_TO_DRIVER, leave_group
from optuna_hermes.workers._start_method import forget_fork_server
from optuna_hermes.workers._threads import THREADS_VARIABLE, limit_threads


def why_new_python(objective: Objective | str, study: Study | None) -> str | None:
    """The reason why the fork server must be a new Python; None if this process can be forked.

    Closes this process's connections to the study's database: SQLite's locks do not survive a fork.
    """
    if isinstance(objective, str) or study is None:
        return "the driver has not imported the objective"
    # The kernel ends a fork with the thread that it is a fork of.
    if threading.get_native_id() != os.getpid():
        return "it is not the main thread"
    if missed_threads():  # most of all in notebooks; these do not end soon
        return "threads were started"
    if not _optuna.close_connections(study):
        return "the study's database may be open"
    unsafe = why_not_fork()
    return None if unsafe is None else unsafe.value


def fork_server(
    objective: Objective, end: socket.socket, ours: socket.socket, environment: Mapping[str, str]
) -> ForkedProcess:
    """Fork this process; the fork serves at ``end`` of the socket, and never returns to the caller.

    It closes ``ours``, the driver's end, and has an environment of its own.
    """
    # What is buffered the fork would write once more.
    flush_streams()
    flush_files()
    ctypes.CDLL(None).fflush(None)
    driver = os.getpid()
    # One that comes before the fork has its handlers would end it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_DRIVER)
    try:
        pid = os.fork()
        if pid == 0:
            _be_the_server(objective, end, ours, environment, driver, mask)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return ForkedProcess(pid)


def _be_the_server(
    objective: Objective,
    end: socket.socket,
    ours: socket.socket,
    environment: Mapping[str, str],
    driver: int,
    mask: set[signal.Signals | int],
) -> NoReturn:
    status = 1
    try:
        # What the script has left to be collected may have unwritten output, or connections.
        freeze()
        collects = gc.isenabled()
        gc.disable()  # until all is imported
        _end_tools()
        ours.close()
        forget_fork_server()
        _begin_streams()
        _set_environment(environment)
        from optuna_hermes.workers._fork_server import serve_driver

        end_with(driver)
        _forget_handlers()
        leave_group()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        status = serve_driver(end, objective, collects=collects)
    except BaseException:
        traceback.print_exc()
    finally:
        # Never back into the script, whose frames are above this one.
        os._exit(status)


def _end_tools() -> None:
    """End a debugger, which nobody is there to answer, and a profiler."""
    sys.settrace(None)
    sys.setprofile(None)
    # Profilers use it since Python 3.12, and debuggers since 3.14.
    monitoring = getattr(sys, "monitoring", None)
    if monitoring is None:
        return
    for tool in (monitoring.DEBUGGER_ID, monitoring.PROFILER_ID):
        if monitoring.get_tool(tool) is not None:
            monitoring.set_events(tool, 0)
            monitoring.free_tool_id(tool)


def _begin_streams() -> None:
    """Give this process the streams of a new one: no input, and output to standard error."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    if has_fileno(sys.stderr):
        os.dup2(sys.stderr.fileno(), 1)
    # The script may have put its own in their places.
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    sys.stdout, sys.stderr = stream(1), stream(2)


def has_fileno(file: object) -> bool:
    """True if a stream is a file of the system."""
    try:
        file.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False
    return True


def _set_environment(environment: Mapping[str, str]) -> None:
    told = THREADS_VARIABLE in os.environ
    os.environ.clear()
    os.environ.update(environment)
    if not told:  # else the libraries that are loaded have read it
        limit_threads(int(environment[THREADS_VARIABLE]))


def _forget_handlers() -> None:
    """Handle signals as a new process does: handlers of the script are for the script's process."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
