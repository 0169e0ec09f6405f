"""Fork server: a process that has imported what workers need, and forks a worker on request.

A fork is a ready worker within milliseconds, where a fresh process would import torch for seconds.
The server is itself a fork of the driver (``_forked``), or a new Python where that is not safe.
It has one thread and never touches a device. It ends with its parent, and its children
end with it. Where the objective's import makes forks unsafe (``_fork_safety``), workers are fresh
processes instead. A value of ``once`` is computed by a fork of the server, its successor, which
forks all later workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import math
import os
import pickle
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from optuna_hermes import _optuna
from optuna_hermes._heap import flush_files, freeze
from optuna_hermes._optuna import Study
from optuna_hermes._parent import end_with_parent, kill
from optuna_hermes.broker import sessions
from optuna_hermes.broker._imports import absolute_policy_name
from optuna_hermes.errors import HermesError, ObjectiveError
from optuna_hermes.workers import _once
from optuna_hermes.workers._fork_safety import Unsafe, other_threads, why_not_fork
from optuna_hermes.workers._imports import LibrariesFirst
from optuna_hermes.workers._objective import Objective, file_of, pack, unpack
from optuna_hermes.workers._output import silent
from optuna_hermes.workers._preload import function_of, preload, read_code
from optuna_hermes.workers._processes import (
    NOT_LOADED,
    end_with,
    kill_session,
    own_positions,
    spawn_fresh,
)
from optuna_hermes.workers._signals import LEFT_TO_DRIVER, leave_group, leave_to_driver
from optuna_hermes.workers._start_method import forget_fork_server, fork_by_default
from optuna_hermes.workers._successor import Successor
from optuna_hermes.workers._words import GRANTED, NOTE, ONCE, WAITS
from optuna_hermes.workers._worker import WorkerInput, serve, study_of

_PR_SET_CHILD_SUBREAPER = 36

_MAX_NOT_LOADED = 3
"""Workers in a row that may end with ``NOT_LOADED``; then the fork server ends, since others would.
"""

_MOST_VALUES = 16
"""Values of ``once`` that are shared: there is a successor, which is a process, for each."""

_LEAVE_SECONDS = 2.0
"""Seconds for workers to exit once the driver has left: those that have just ended a trial."""
_READ_SECONDS, _READ_FORKS = 1.0, 8
"""Age of the trials in this process's cache, and workers that were forked since, at which it reads
them again before it forks: each worker reads itself those that have not ended by then."""

_SLOW = (
    "Workers are not forked but start slowly, since {} when the objective was imported: move what "
    "does so into the objective."
)


def main() -> int:
    """Serve the driver that has started this process as a new Python, and sends its objective."""
    end_with_parent()
    leave_group()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_DRIVER)  # blocked by the driver until here
    gc.freeze()  # nor does the import of the objective look at what is imported by now
    gc.enable()
    parent = socket.socket(fileno=int(sys.argv[1]))
    try:
        packed, study_name, path, arguments = _read_payload(parent)
    except EOFError:  # the call has ended before it had begun
        return 0
    prepare_imports(packed, path, arguments)
    # The import may change the working folder, from which a fresh worker would look for the file.
    found = absolute_policy_name(packed) if isinstance(packed, str) and file_of(packed) else packed
    return _serve(parent, partial(unpack, packed, study_name), lambda objective: found)


def serve_driver(parent: socket.socket, objective: Objective, *, collects: bool) -> int:
    """Serve the driver that this process is a fork of.

    ``collects`` is False if the script has disabled the garbage collector.
    """
    prepare_imports(b"", sys.path, sys.argv)
    return _serve(parent, lambda: objective, pack, collects=collects)


def _serve(
    parent: socket.socket,
    load: Callable[[], Objective],
    packed: Callable[[Objective], bytes | str],
    *,
    collects: bool = True,
) -> int:
    """Load the objective, send success or the error to the driver, then fork workers on request."""
    imports = list(sys.path), list(sys.argv)  # before the objective's import changes them
    sent: bytes | str = b""
    fork_by_default()
    try:
        objective = _prepare(load)
        _optuna.prepare_storages()
        unsafe = why_not_fork()
        if unsafe is not None:
            sent = packed(objective)
    except HermesError as error:
        with contextlib.suppress(ConnectionError):  # the call has ended meanwhile
            _tell(parent, {"error": str(error), "kind": type(error).__name__})
        return 2
    if unsafe is not None:
        which = f" ({other_threads()})" if unsafe is Unsafe.THREADS else ""
        print(_SLOW.format(unsafe.value + which), file=sys.stderr, flush=True)
    flush_files()
    freeze()  # a worker that searches its objects for tensors skips all that was imported
    if collects:
        gc.enable()
    try:
        _tell(parent, {"ready": True})
        job = _read_payload(parent)
    except (EOFError, ConnectionError):  # the call has ended before it needed a worker
        return 0
    fresh = None if unsafe is None else _order((sent, *imports, job, unsafe))
    _ForkServer(parent, job, objective, fresh, study=_study(job, fresh)).run()
    return 0


def _study(job: WorkerInput, fresh: int | None) -> Study | None:
    """The study that workers inherit; None if they are not forked, or load it themselves."""
    if fresh is not None or not job.inherits:
        return None
    with contextlib.suppress(Exception):  # a worker says why
        return study_of(job)
    return None


def prepare_imports(packed: bytes | str, path: list[str], arguments: list[str]) -> None:
    """Make imports of this process find what the driver's would, and libraries come first."""
    file = file_of(packed)
    sys.meta_path.insert(0, LibrariesFirst(None if file is None else file.stem))
    sys.path[:] = path
    sys.argv[:] = arguments


def _order(content: object) -> int:
    """The handle of a file in memory that fresh workers read."""
    create = getattr(os, "memfd_create", None)
    if create is None:  # in some of Conda's Pythons
        with tempfile.TemporaryFile() as unnamed:
            order = os.dup(unnamed.fileno())
    else:
        order = create("hermes-order")
    with open(order, "wb", closefd=False) as file:
        pickle.dump(content, file)
    return order


def _prepare(load: Callable[[], Objective]) -> Objective:
    sessions.importing = True
    objective = load()  # here, so that its errors reach the user before any worker
    sessions.importing = False
    _once.set_objective(function_of(objective))
    preload(objective)
    read_code(objective)
    if _once.used_accelerator() is not None:
        raise ObjectiveError(
            "Importing the objective must not use an accelerator, since workers are forked after "
            "it: move what does into the objective."
        )
    return objective


def _read_payload(parent: socket.socket) -> Any:
    """Read one pickled value; safe, since only the driver, this process's parent, has the pipe."""
    with parent.makefile("rb", buffering=0) as stream:
        size = int.from_bytes(_read(stream, 8), "big")
        return pickle.loads(_read(stream, size))


def _read(stream: Any, size: int) -> bytearray:
    data, had = bytearray(size), 0  # filled in place: an objective may bring gigabytes
    while had < size:
        count = stream.readinto(memoryview(data)[had:])
        if not count:
            raise EOFError("The driver is gone.")
        had += count
    return data


def _tell(parent: socket.socket, line: dict[str, Any]) -> None:
    parent.sendall(json.dumps(line).encode() + b"\n")


class _ForkServer:
    def __init__(
        self,
        parent: socket.socket,
        job: WorkerInput,
        objective: Objective,
        fresh: int | None,
        words: tuple[int, int] | None = None,
        study: Study | None = None,
    ) -> None:
        self._parent = parent
        self._job = job
        self._objective = objective
        self._fresh = fresh
        self._not_loaded = 0
        self._children: set[int] = set()
        self._waiting: set[int] = set()
        self._granted: set[int] = set()
        self._wake, wake = socket.socketpair()
        wake.setblocking(False)
        self._wake_end = wake
        self._words, self._words_end = words or _words_pipe()
        self._unread = b""
        self._unsent: list[bytes] = []
        self._selector = selectors.DefaultSelector()
        self._successor: Successor | None = None
        self._refused: set[str] = set()
        self._computing = ""
        self._serves = False
        self._study = study
        self._read_at = -math.inf
        self._forks_to_read = 0

    def run(self) -> None:
        self._serves = True
        # Of what workers leave behind: in a container there may be nobody else who reaps it.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # Without a handler Python never writes to the wakeup handle.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_end.fileno(), warn_on_full_buffer=False)
        # A program that waits for it by `sigwait` or `signalfd` may have left it blocked.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        with contextlib.suppress(ConnectionError):  # the driver is gone
            self._serve()
        # The driver has suspended what it wanted: what is left here has no driver.
        until = time.monotonic() + _LEAVE_SECONDS
        for pid in self._children - self._granted:  # these wait for trials
            kill(pid)
        if self._successor is not None:
            self._successor.close()
        for pid in self._children:
            # One that has just ended its trial is about to exit, and what it started may go on.
            if _status_of(pid, until):
                kill_session(pid)
        signal.set_wakeup_fd(-1)
        for end in (self._wake, self._wake_end):
            end.close()

    def _serve(self) -> None:
        for each in (self._parent, self._wake, self._words):
            self._selector.register(each, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in self._selector.select()]
            # Exits first, so that the driver hears of an end before it hears of a new worker.
            if self._wake in ready:
                self._wake.recv(4096)
                self._reap()
                if self._not_loaded >= _MAX_NOT_LOADED:
                    return
            if self._words in ready:
                self._read_words()
            if self._successor is not None and self._successor.socket in ready:
                self._read_successor(self._successor)
            if self._parent in ready:
                asked = self._parent.recv(4096)
                if not asked:
                    return
                self._fork(asked.count(b"f"))

    def _fork(self, count: int) -> None:
        if self._successor is not None and self._successor.is_ready:
            self._successor.fork(count)
            return
        age = time.monotonic() - self._read_at
        if self._study is not None and age > _READ_SECONDS and self._forks_to_read <= 0:
            _optuna.read_trials(self._study)
            if self._read_at > -math.inf:  # not before the first workers, which need none of it
                _optuna.load_sampler(self._study)
                self._forks_to_read = _READ_FORKS
            gc.collect()  # before what is left is passed over for good
            freeze()
            flush_files()  # of an own sampler's; it looks at few objects now
            self._read_at = time.monotonic()
        server = os.getpid()
        for done in range(count):
            try:
                fresh = self._fresh
                pid = os.fork() if fresh is None else spawn_fresh(fresh, self._words_end, server)
            except OSError as error:  # the system is short of processes, or of memory, for now
                _tell(self._parent, {"unforked": count - done, "reason": str(error)})
                return
            if pid == 0:
                self._be_a_worker(server)
            self._children.add(pid)
            self._forks_to_read -= 1
            _tell(self._parent, {"forked": pid})

    def _be_a_worker(self, server: int) -> None:
        try:
            self._leave(server)
            own_positions()
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # an exception would return to the server's loop in a second process
        serve(self._job, self._objective, self._words_end, self._study, shares=True)

    def _leave(self, server: int) -> None:
        """Make a forked process independent of its server's loop."""
        end_with(server)
        os.setsid()  # see kill_session
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        leave_to_driver()
        self._selector.close()
        for end in (self._wake, self._wake_end, self._parent):
            end.close()
        os.close(self._words)
        if self._successor is not None:
            self._successor.forget()
        forget_fork_server()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if self._successor is not None and pid == self._successor.pid:
                self._take_over(self._successor, code)
                continue
            if pid not in self._children:  # begun by a worker
                continue
            self._children.discard(pid)
            if code:  # its trial goes on in another one
                kill_session(pid)
            self._read_words()
            self._waiting.discard(pid)
            self._granted.discard(pid)
            self._pass_words_on()
            self._not_loaded += code == NOT_LOADED
            _tell(self._parent, {"exited": pid, "status": code})

    def _read_words(self) -> None:
        """Read what workers say; most of it is for the driver, but not urgent."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._unread += os.read(self._words, 65536)
        *lines, self._unread = self._unread.split(b"\n")
        for each in lines:
            line = json.loads(each)
            said, pid = line["said"], line["worker"]
            if said == WAITS:
                self._waiting.add(pid)
                self._not_loaded = 0
            else:
                self._waiting.discard(pid)
            if said == GRANTED:
                self._granted.add(pid)
            if said == ONCE:
                self._share(line["reason"], each)
                continue
            self._unsent.append(each)
            if said == NOTE:
                self._pass_words_on()

    def _pass_words_on(self) -> None:
        """Forward what workers have sent to the driver, before the message that one has exited."""
        for each in self._unsent:
            self._parent.sendall(each + b"\n")
        self._unsent.clear()

    # -- values of ``once`` ----------------------------------------------------------------------

    def _share(self, packed: str, line: bytes) -> None:
        """Have a successor compute a value that workers are to inherit."""
        if _once.is_computed(packed) or packed in self._refused:
            return
        if not self._serves:
            self._refuse(packed, _once.compute(packed))
            return
        if _once.n_computed() >= _MOST_VALUES:
            self._refuse(packed, f"{_MOST_VALUES} other values are shared already")
            return
        if self._successor is not None:
            self._successor.pass_on(packed, line)  # it may have another value only
            return
        words = _words_pipe()
        try:
            (ours, theirs), server, pid = socket.socketpair(), os.getpid(), os.fork()
        except OSError as error:  # for now: the next worker that asks tries it again
            for end in words:
                os.close(end)
            self._note_refused(packed, f"no process can be started for it ({error})")
            return
        self._computing = packed
        if pid == 0:
            ours.close()
            self._be_a_successor(server, theirs, words, packed)
        theirs.close()
        os.close(words[0])
        self._successor = Successor(pid, ours, words[1])
        self._selector.register(ours, selectors.EVENT_READ)

    def _be_a_successor(
        self, server: int, parent: socket.socket, words: tuple[int, int], packed: str
    ) -> NoReturn:
        # In a process of its own: what a user's function does here must not harm the server.
        status = 1
        try:
            self._leave(server)
            os.close(self._words_end)
            heir = _ForkServer(parent, self._job, self._objective, None, words, self._study)
            heir._refused |= self._refused
            why = heir._compute(packed)
            if why:
                _tell(parent, {"refused": why})
            else:
                freeze()
                flush_files()
                _tell(parent, {"ready": True})
                heir.run()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def _compute(self, packed: str) -> str:
        """Compute a value, and those asked for meanwhile; the reason if workers cannot share it."""
        with silent():  # the trial's own call has printed the same to its log
            why = _once.compute(packed)
            if not why:
                self._read_words()
        unsafe = None if why else why_not_fork()
        return why if unsafe is None else unsafe.value

    def _read_successor(self, successor: Successor) -> None:
        lines = successor.lines()
        if lines is None:  # its exit will be noticed, or was
            with contextlib.suppress(KeyError):
                self._selector.unregister(successor.socket)
        for each in lines or ():
            line = json.loads(each)
            if "ready" in line:
                successor.is_ready = True
                self._end_waiting()
            elif "refused" in line:
                self._refuse(self._computing, line["refused"])
            else:
                successor.follow(line)
                self._parent.sendall(each + b"\n")

    def _end_waiting(self) -> None:
        """End workers that have no trial yet: those that replace them will have the value."""
        self._read_words()
        for pid in self._waiting & self._children:
            kill(pid)

    def _take_over(self, successor: Successor, code: int) -> None:
        """Fork workers again in place of a successor that has ended, whose workers ended too."""
        self._read_successor(successor)  # it may have said why, and nobody has read it yet
        self._successor = None
        self._refused.add(self._computing)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(successor.socket)
        successor.forget()
        for pid in successor.workers:
            _tell(self._parent, {"exited": pid, "status": code})
        if code < 0:  # with its workers, which are this process's children now
            for pid in {successor.pid, *successor.workers}:
                kill_session(pid)
        self._fork(successor.n_requested)

    def _refuse(self, packed: str, why: str) -> None:
        """Leave a value to each trial if there is a reason to."""
        if why:
            self._refused.add(packed)
            self._note_refused(packed, why)

    def _note_refused(self, packed: str, why: str) -> None:
        text = _once.not_shared(_once.name_of(packed), why)
        _tell(self._parent, {"worker": os.getpid(), "said": NOTE, "reason": text})


def _status_of(child: int, until: float) -> int:
    """The wait status of a child, which is killed if it has not ended in time."""
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        if time.monotonic() >= until:
            kill(child)
        time.sleep(0.005)


def _words_pipe() -> tuple[int, int]:
    words, words_end = os.pipe()
    os.set_blocking(words, False)
    return words, words_end
