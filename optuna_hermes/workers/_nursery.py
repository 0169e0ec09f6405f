"""The process that workers are forked from: it has imported what they need, and does little else.

A fork of it is a ready worker within milliseconds, where a fresh process would import torch for
seconds. It is one thread and never touches a device. It ends with its parent, and its children
end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pickle
import selectors
import signal
import socket
import sys
import traceback
from typing import Any

from optuna_hermes.errors import HermesError, ObjectiveError
from optuna_hermes.workers._objective import Objective, unpack
from optuna_hermes.workers._worker import Job, work

_PRELOAD = ("numpy", "torch", "lightning.pytorch", "optuna_hermes.lightning", "sqlalchemy")
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Load the objective, say whether that can be done, then fork a worker whenever asked."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to deal with
    parent = socket.socket(fileno=int(sys.argv[1]))
    packed, path = _read_payload(parent)
    sys.path[:] = path
    try:
        objective = _prepare(packed)
    except HermesError as error:
        _tell(parent, {"error": str(error), "kind": type(error).__name__})
        return 2
    gc.freeze()  # a worker that looks for its tensors need not look at all that was imported
    _tell(parent, {"ready": True})
    _Nursery(parent, _read_payload(parent), objective).run()
    return 0


def die_with_parent() -> None:
    """Be killed when the parent process ends, however it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _prepare(packed: bytes | str) -> Objective:
    objective = unpack(packed)  # what is wrong with it is said at once
    for name in _PRELOAD:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise ObjectiveError(
            "Importing the objective must not touch CUDA, since workers are forked after it: move "
            "what does into the objective."
        )
    return objective


def _read_payload(parent: socket.socket) -> Any:
    """What the driver, which is this process's own parent, sends through their private pipe."""
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


class _Nursery:
    def __init__(self, parent: socket.socket, job: Job, objective: Objective) -> None:
        self._parent = parent
        self._job = job
        self._objective = objective
        self._children: set[int] = set()
        self._wake, wake = socket.socketpair()
        wake.setblocking(False)
        self._wake_end = wake

    def run(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_end.fileno(), warn_on_full_buffer=False)
        with contextlib.suppress(ConnectionError):  # the driver is gone, with or without a word
            self._serve()
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
                if self._wake in ready:
                    self._wake.recv(4096)
                    self._reap()
                if self._parent in ready:
                    asked = self._parent.recv(4096)
                    if not asked:
                        return
                    for _ in range(asked.count(b"f")):
                        self._fork()

    def _fork(self) -> None:
        nursery = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._be_a_worker(nursery)
        self._children.add(pid)
        _tell(self._parent, {"forked": pid})

    def _be_a_worker(self, nursery: int) -> None:
        status = 1
        try:
            die_with_parent()
            if os.getppid() != nursery:
                os._exit(1)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (self._parent, self._wake, self._wake_end):
                end.close()
            status = work(self._job, self._objective)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # No clean-up of what was inherited from the nursery.
            os._exit(status)

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self._children.discard(pid)
            code = os.waitstatus_to_exitcode(status)
            _tell(self._parent, {"exited": pid, "status": code})


if __name__ == "__main__":
    sys.exit(main())
