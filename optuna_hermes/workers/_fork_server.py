"""Fork server: a process that has imported what workers need, and forks a worker on request.

A fork is a ready worker within milliseconds, where a fresh process would import torch for seconds.
The server has one thread and never touches a device. It ends with its parent, and its children
end with it. Where the objective's import makes forks unsafe (``_fork_safety``), workers are fresh
processes instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import pickle
import selectors
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

from optuna_hermes import _optuna
from optuna_hermes.broker import sessions
from optuna_hermes.errors import HermesError, ObjectiveError
from optuna_hermes.workers._fork_safety import why_not_fork
from optuna_hermes.workers._imports import LibrariesFirst
from optuna_hermes.workers._objective import Objective, file_of, unpack
from optuna_hermes.workers._preload import preload
from optuna_hermes.workers._processes import command
from optuna_hermes.workers._signals import leave_to_driver
from optuna_hermes.workers._words import FAILED, sayer
from optuna_hermes.workers._worker import WorkerInput, work

_PR_SET_PDEATHSIG = 1

NOT_LOADED = 12
"""Exit status of a fresh worker that could not load the objective."""
_MAX_NOT_LOADED = 3
"""Workers that may end with ``NOT_LOADED``; then the fork server ends, since others would too."""

_SLOW = (
    "Workers are not forked but start slowly, since {} when the objective was imported: move what "
    "does so into the objective."
)


def main() -> int:
    """Load the objective, send success or the error to the driver, then fork workers on request."""
    die_with_parent()
    _leave_group()
    gc.freeze()  # nor does the import of the objective look at what is imported by now
    gc.enable()
    parent = socket.socket(fileno=int(sys.argv[1]))
    packed, path, arguments = _read_payload(parent)
    prepare_imports(packed, path, arguments)
    try:
        objective = _prepare(packed)
    except HermesError as error:
        _tell(parent, {"error": str(error), "kind": type(error).__name__})
        return 2
    _optuna.prepare_storages()
    unsafe = why_not_fork()
    if unsafe is not None:
        print(_SLOW.format(unsafe.value), file=sys.stderr, flush=True)
    gc.freeze()  # a worker that searches its objects for tensors skips all that was imported
    _tell(parent, {"ready": True})
    job = _read_payload(parent)
    fresh = None if unsafe is None else _order((packed, path, arguments, job, unsafe))
    _ForkServer(parent, job, objective, fresh).run()
    return 0


def prepare_imports(packed: bytes | str, path: list[str], arguments: list[str]) -> None:
    """Make imports of this process find what the driver's would, and libraries come first."""
    file = file_of(packed)
    sys.meta_path.insert(0, LibrariesFirst(None if file is None else file.stem))
    sys.path[:] = path
    sys.argv[:] = arguments


def _leave_group() -> None:
    """Leave the driver's process group: only the driver acts on signals to that group."""
    os.setpgid(0, 0)
    # A background group that prints to its terminal would be stopped.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    leave_to_driver()


def _order(content: object) -> int:
    """The handle of a file in memory that fresh workers read."""
    order = os.memfd_create("hermes-order")
    with open(order, "wb", closefd=False) as file:
        pickle.dump(content, file)
    return order


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, for any reason."""
    # SIGKILL to the driver leaves it no time to end its children.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _prepare(packed: bytes | str) -> Objective:
    sessions.importing = True
    objective = unpack(packed)  # here, so that its errors reach the user before any worker
    sessions.importing = False
    preload(objective)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise ObjectiveError(
            "Importing the objective must not touch CUDA, since workers are forked after it: move "
            "what does into the objective."
        )
    return objective


def _read_payload(parent: socket.socket) -> Any:
    """Read one pickled value; safe, since only the driver, this process's parent, has the pipe."""
    with parent.makefile("rb", buffering=0) as stream:
        size = int.from_bytes(_read(stream, 8), "big")
        return pickle.loads(_read(stream, size))


def _read(stream: Any, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = stream.read(size - len(data))
        if not part:
            raise EOFError("The driver is gone.")
        data += part
    return data


def _tell(parent: socket.socket, line: dict[str, Any]) -> None:
    parent.sendall(json.dumps(line).encode() + b"\n")


class _ForkServer:
    def __init__(
        self, parent: socket.socket, job: WorkerInput, objective: Objective, fresh: int | None
    ) -> None:
        self._parent = parent
        self._job = job
        self._objective = objective
        self._fresh = fresh
        self._not_loaded = 0
        self._children: set[int] = set()
        self._wake, wake = socket.socketpair()
        wake.setblocking(False)
        self._wake_end = wake
        self._words, self._words_end = os.pipe()
        os.set_blocking(self._words, False)
        self._unread = b""

    def run(self) -> None:
        # Without a handler Python never writes to the wakeup handle.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_end.fileno(), warn_on_full_buffer=False)
        with contextlib.suppress(ConnectionError):  # the driver is gone
            self._serve()
        # The driver has suspended what it wanted: what is left here has no driver.
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self._children:
            os.waitpid(pid, 0)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._parent, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                # Exits first, so that the driver hears of an end before it hears of a new worker.
                if self._wake in ready:
                    self._wake.recv(4096)
                    self._reap()
                    if self._not_loaded >= _MAX_NOT_LOADED:
                        return
                if self._parent in ready:
                    asked = self._parent.recv(4096)
                    if not asked:
                        return
                    for _ in range(asked.count(b"f")):
                        self._fork()

    def _fork(self) -> None:
        server = os.getpid()
        pid = os.fork() if self._fresh is None else _spawn(self._fresh, self._words_end, server)
        if pid == 0:
            self._be_a_worker(server)
        self._children.add(pid)
        _tell(self._parent, {"forked": pid})

    def _be_a_worker(self, server: int) -> None:
        try:
            end_with(server)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            leave_to_driver()
            for end in (self._parent, self._wake, self._wake_end):
                end.close()
            os.close(self._words)
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # an exception would return to the server's loop in a second process
        serve(self._job, self._objective, self._words_end)

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self._children.discard(pid)
            code = os.waitstatus_to_exitcode(status)
            self._pass_words_on()
            self._not_loaded += code == NOT_LOADED
            _tell(self._parent, {"exited": pid, "status": code})

    def _pass_words_on(self) -> None:
        """Forward what workers have sent to the driver, before the message that one has exited."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._unread += os.read(self._words, 65536)
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            self._parent.sendall(line + b"\n")


def _spawn(order: int, words_end: int, server: int) -> int:
    words = command("_fresh", order, words_end, server)
    # These are inherited, other handles are not.
    actions = [(os.POSIX_SPAWN_DUP2, handle, handle) for handle in (order, words_end)]
    return os.posix_spawn(words[0], words, os.environ, file_actions=actions)


def end_with(server: int) -> None:
    """Have the kernel kill this process when the fork server, its parent, ends."""
    die_with_parent()
    # It may have ended before the kernel was asked.
    if os.getppid() != server:
        os._exit(1)


def serve(job: WorkerInput, objective: Objective, words_end: int) -> NoReturn:
    """Work, writing messages to ``words_end``; exit without cleaning up what was inherited."""
    status, say = 1, sayer(words_end)
    try:
        work(job, objective, say)
        status = 0
    except BaseException as error:
        traceback.print_exc()
        say(FAILED, repr(error))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
