"""Checks that a process can be forked after it has imported, or run, a user's files.

A fork has one thread. Work that other threads of the parent had begun is never finished in it, and
waiting for that work never returns.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from enum import Enum
from multiprocessing.connection import wait
from pathlib import Path
from typing import NoReturn

from optuna_hermes.errors import no_process

PROBE_SECONDS = (2.0, 20.0)
"""Seconds for each forked process to check accelerators.

The first may wait for a lock that another thread had; a GPU driver may be slow at first.
"""

_PAUSE_SOFT = 1
_CUDA_NOT_INITIALISED = 3
_NOT_MISSED = ("TMonitor",)
"""Classes of threads that forks can do without: monitors, here that of tqdm."""
_RENEWED = ("jemalloc_bg_thd",)
"""Names of threads of libraries that start them anew in a fork: here pyarrow's, and so pandas'."""
_ENDING_SECONDS = 0.5
"""Seconds to wait for threads that are about to end."""


class Unsafe(Enum):
    """A reason why a process cannot be forked."""

    ACCELERATOR = "an accelerator was used"
    THREADS = "threads were started"


def why_not_fork() -> Unsafe | None:
    """The reason why workers must be fresh processes; None if this process can be forked.

    Call it in the main thread, once all is imported.

    Raises:
        HermesError: the system refuses to start a process.
    """
    # Operations of torch leave idle threads behind; OpenMP starts them again when it needs them.
    _end_openmp_threads()
    # No answer is tried again; that it does not work is an answer.
    answers = (answer for answer in map(_probe, PROBE_SECONDS) if answer is not None)
    if not next(answers, False):
        return Unsafe.ACCELERATOR
    deadline = time.monotonic() + _ENDING_SECONDS
    while _has_other_threads():
        if time.monotonic() > deadline:
            return Unsafe.THREADS
        time.sleep(0.02)
    return None


def _end_openmp_threads() -> None:
    for path in _loaded("libgomp", "libomp", "libiomp"):
        pause = getattr(ctypes.CDLL(path), "omp_pause_resource_all", None)
        if pause is not None:  # since OpenMP 5.0
            pause(_PAUSE_SOFT)


def _probe(seconds: float) -> bool | None:
    """Fork once; True if accelerators can be used in the fork; None if it does not answer."""
    ours, theirs = os.pipe()
    # Also wanted: OpenBLAS ends its threads before a fork, and starts them when it needs them.
    try:
        pid = os.fork()
    except OSError as error:
        os.close(ours)
        os.close(theirs)
        raise no_process(error) from error
    if pid == 0:
        _answer(theirs)
    os.close(theirs)
    answered = False
    try:
        answered = bool(wait([ours], seconds))  # select() knows no handle above 1023
        return os.read(ours, 1) == b"y" if answered else None
    finally:
        os.close(ours)
        # The kernel has reaped it where the script ignores SIGCHLD, or a handler of the script has.
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            if not answered:
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _answer(theirs: int) -> NoReturn:
    try:
        os.write(theirs, b"y" if _accelerators_work() else b"n")
    finally:
        os._exit(0)


def _accelerators_work() -> bool:
    if "torch" in sys.modules:
        from optuna_hermes.suspend._tiers._accelerators import accelerator

        found = accelerator()
        if found is not None and found.lost_by_fork:
            return False
    for path in _loaded("libcuda.so"):
        if ctypes.CDLL(path).cuInit(0) == _CUDA_NOT_INITIALISED:
            return False
    return True


def missed_threads() -> list[threading.Thread]:
    """Python's threads, beside the main one, that a fork would lack."""
    return [each for each in _python_threads() if type(each).__name__ not in _NOT_MISSED]


def _python_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each is not threading.main_thread()]


def _has_other_threads() -> bool:
    """True if there are threads beside the main one that a fork would lack."""
    if missed_threads():
        return True
    torch = sys.modules.get("torch")
    # Torch has a pool of its own for set_num_threads(), and drops it in forks.
    pool = 0 if torch is None else torch.get_num_threads() - 1
    return len(_native_threads()) > pool


def other_threads() -> str:
    """The names of the threads that a fork would lack, with commas."""
    native = Counter(_native_threads())  # most have the name of the program
    found = [each.name for each in missed_threads()]
    return ", ".join(found + [f"{count} x {name}" for name, count in sorted(native.items())])


def _native_threads() -> list[str]:
    """The names of the threads that are not Python's, but for those that start anew in a fork."""
    ours = {os.getpid(), *(each.native_id for each in _python_threads())}
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has just ended
            name = Path(f"/proc/self/task/{task}/comm").read_text().rstrip("\n")
            if int(task) not in ours and name not in _RENEWED:
                names.append(name)
    return names


def _loaded(*names: str) -> Iterator[str]:
    """The paths of libraries in this process whose files begin with these names."""
    with open("/proc/self/maps") as maps:
        mapped = [line.split(maxsplit=5) for line in maps]
    paths = {line[5].strip() for line in mapped if len(line) > 5}
    for path in sorted(paths):
        if os.path.basename(path).startswith(names):
            yield path
