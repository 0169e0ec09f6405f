"""Processes that ``optimize`` starts: command line, start, end, and that none starts others."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import stat
import subprocess
import time

from optuna_hermes._parent import end_with_parent, kill, python_command
from optuna_hermes.broker import INSIDE_VARIABLE, sessions
from optuna_hermes.errors import ObjectiveError

NOT_LOADED = 12
"""Exit status of a fresh worker that could not load the objective."""

_POLL_SECONDS = 0.002
"""Time between two looks at a child: short, for each call of ``optimize`` ends with its end."""


def command(module: str, *arguments: object) -> list[str]:
    """The command line that runs ``main`` of a module in this folder."""
    # Garbage is not collected until `main` enables it: imports make many objects that stay.
    first = "import gc; gc.disable(); "
    return python_command(f"optuna_hermes.workers.{module}", *arguments, first=first)


def spawn_fresh(order: int, words_end: int, server: int) -> int:
    """Start a fresh worker with the fork server's order; its process id."""
    words = command("_fresh", order, words_end, server)
    # These are inherited, other handles are not.
    actions = [(os.POSIX_SPAWN_DUP2, handle, handle) for handle in (order, words_end)]
    return os.posix_spawn(words[0], words, os.environ, file_actions=actions)


def end_with(server: int) -> None:
    """Have the kernel kill this process when the fork server, its parent, ends."""
    end_with_parent()
    # It may have ended before the kernel was asked.
    if os.getppid() != server:
        os._exit(1)


def own_positions() -> None:
    """Give this process positions of its own in the files that it reads: forks share them."""
    for handle in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the one that lists them is closed by now
            # In files that are written the common position is right: nobody overwrites others.
            if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
                continue
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                continue
            own = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)
            os.lseek(own, os.lseek(handle, 0, os.SEEK_CUR), os.SEEK_SET)
            os.dup2(own, handle, os.get_inheritable(handle))
            os.close(own)


def kill_session(worker: int) -> None:
    """SIGKILL what a worker that has ended had started: it would train on.

    Each worker leads a session of its own, so what other trials have started is not touched, nor
    what has a session of its own: a daemon, for example. A process group would not do: coreutils'
    ``timeout``, for one, begins another.
    """
    killed: set[int] = set()
    while left := _members(worker) - killed:  # some may have been started meanwhile
        for pid in left:
            kill(pid)
        killed |= left


def _members(session: int) -> set[int]:
    found = set()
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) == session:
                found.add(pid)
    return found


def refuse_inside() -> None:
    """Raise in a process that ``optimize`` has started.

    Raises:
        ObjectiveError: this is the fork server, a worker or a process of one.
    """
    if sessions.worker is not None:
        raise ObjectiveError("optimize() cannot be called in an objective: call it in a script.")
    if INSIDE_VARIABLE in os.environ:
        raise ObjectiveError(
            "optimize() was called in a process that it has started. If that imports the script, "
            'put the call under `if __name__ == "__main__":`; a program that an objective starts '
            "cannot call it."
        )


class ForkedProcess:
    """A fork of this process, with the part of ``subprocess.Popen`` that its owner needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._is_gone = False

    def kill(self) -> None:
        """Send SIGKILL, unless it has been waited for."""
        if not self._is_gone:
            kill(self.pid)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it has not ended after ``timeout`` seconds.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        # Nothing is left to wait for where the script ignores SIGCHLD.
        with contextlib.suppress(ChildProcessError):
            while not self._is_gone:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid != 0:
                    self.returncode = os.waitstatus_to_exitcode(status)
                    break
                if time.monotonic() >= end:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
                time.sleep(_POLL_SECONDS)
        self._is_gone = True
