"""The driver's end of the fork server."""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from optuna_hermes.errors import HermesError, no_process
from optuna_hermes.workers import _worker_pool
from optuna_hermes.workers._fork_safety import why_not_fork
from optuna_hermes.workers._processes import command
from optuna_hermes.workers._settings import OptimizeSettings
from optuna_hermes.workers._signals import LEFT_TO_DRIVER
from optuna_hermes.workers._starts import Starts
from optuna_hermes.workers._worker_pool import WorkerPool


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The driver's end, and that of the fork server."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def pool(ends: tuple[socket.socket, socket.socket]) -> WorkerPool:
    """A pool without a process."""
    made = WorkerPool.__new__(WorkerPool)
    made._ready, made._buffer, made._socket = False, b"", ends[0]
    return made


def test_an_import_may_be_waited_for_any_time(
    pool: WorkerPool, ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs without a limit end in a year, and the system waits 25 days at most."""
    until = time.monotonic() + 0.1
    with monkeypatch.context() as patch:
        patch.setattr(_worker_pool, "_LONGEST_WAIT_SECONDS", 0.03)
        assert not pool.wait_until_ready(until)
    assert time.monotonic() >= until
    ends[1].sendall(b'{"ready": true}\n')
    assert pool.wait_until_ready(time.monotonic() + 1e9)


def test_the_number_of_a_process_may_come_again(pool: WorkerPool, ends: Any) -> None:
    """The exit status of the earlier one is not that of a worker that lives."""
    pool._asked, pool._alive, pool._statuses, pool.n_ended = 2, set(), {}, 0
    pool.starts = Starts()
    ends[1].sendall(b'{"forked": 7}\n{"exited": 7, "status": 1}\n')
    pool._read()
    assert (pool.status_of(7), pool.n_ended) == (1, 1)
    ends[1].sendall(b'{"forked": 7}\n')
    pool._read()
    assert (pool.status_of(7), pool.n_ended) == (None, 1)


def test_a_worker_without_room_for_its_threads_is_said_once(pool: WorkerPool, ends: Any) -> None:
    """As one that could not be forked: the user may raise the limit of processes."""
    pool._asked, pool._alive, pool._statuses, pool.n_ended = 3, set(), {}, 0
    pool._notes, pool.said, pool.starts = {}, set(), Starts()
    for pid in (7, 8, 9):
        said = {"worker": pid, "said": "failed", "reason": "can't start new thread"}
        lines = {"forked": pid}, said, {"exited": pid, "status": 1}
        for line in lines if pid > 7 else lines[:1]:
            ends[1].sendall(json.dumps(line).encode() + b"\n")
    pool._read()
    assert pool.new_notes() == [
        "The system refuses to start a worker (can't start new thread): it is tried again, and "
        "parked trials go to disk where others need their processes."
    ]


def test_a_fork_server_may_be_killed_before_it_has_its_job(pool: WorkerPool, ends: Any) -> None:
    """As by the kernel for want of memory: the driver says that it has ended."""
    pool._process = subprocess.Popen(["sleep", "100"])
    pool._process.kill()
    ends[1].close()
    job: Any = {}
    pool.configure(job)
    with pytest.raises(
        HermesError, match=r"^The process that .* has ended \(SIGKILL, by the kernel"
    ):
        pool._read()


@pytest.mark.parametrize(
    ("error", "number"),
    [(KeyboardInterrupt, signal.SIGKILL), (SystemExit, signal.SIGTERM)],
)
def test_an_interrupted_call_ends_its_workers_at_once(
    error: type[BaseException], number: signal.Signals, pool: WorkerPool
) -> None:
    """The user has pressed Ctrl-C again; else one that has just ended its trial may exit itself."""
    with subprocess.Popen(["sleep", "60"]) as worker, subprocess.Popen(["true"]) as server:
        pool._ready, pool._alive, pool._process = True, {worker.pid}, server
        with pytest.raises(error), pool:
            raise error
        worker.terminate()
        assert worker.wait() == -number


CLOSED = """
import sys
from optuna_hermes.workers._worker_pool import WorkerPool

new_python = sys.argv[1] or None
with WorkerPool(len, "study", "cpu:1", new_python) as pool:
    sys.exit(0 if pool.wait_until_ready() else 1)
"""


@pytest.mark.parametrize("new_python", ["", "threads were started"])
@pytest.mark.parametrize("closed", ["0", "2", "01"])
def test_a_fork_server_of_a_script_whose_streams_are_closed(closed: str, new_python: str) -> None:
    """As by ``2>&-``: else the fork would overwrite, or close, the socket that has the number."""
    shell = " ".join(f"{number}>&-" for number in closed)
    words = ["sh", "-c", f'exec "$@" {shell}', "sh", sys.executable, "-c", CLOSED, new_python]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, timeout=60, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("new_python", [None, "threads were started"])
def test_a_fork_server_that_the_system_refuses(
    new_python: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says which limits to raise, whatever is forked first."""

    def refuse(*words: object, **options: object) -> NoReturn:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    for start in (why_not_fork, lambda: WorkerPool(lambda trial: 0.0, "s", "cpu:1", new_python)):
        with pytest.raises(HermesError) as error:
            start()
        assert str(error.value) == (
            "The system starts no process ([Errno 11] Resource temporarily unavailable): raise the "
            "limit of processes or of memory, then run the same command again."
        )


def test_a_thread_that_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of processes is one of threads: the same words, and the fork server ends."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    settings = OptimizeSettings(devices="cpu:1")
    with (
        pytest.raises(HermesError, match=r"no process \(can't start new thread\): raise the limit"),
        _worker_pool.start("math:cos", settings, "s"),
    ):
        pass


def test_a_fork_server_leaves_signals_to_the_driver_from_its_first_moment(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C reaches it while it imports, before it has left the group of its terminal."""
    with WorkerPool("math:cos", "study", "cpu:1", "threads were started") as pool:
        for number in LEFT_TO_DRIVER:
            os.kill(pool._process.pid, number)
        assert pool.wait_until_ready(time.monotonic() + 60.0)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()).isdisjoint(LEFT_TO_DRIVER)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("sent", [b"", pickle.dumps(("math:cos", "study", [*sys.path], ["x"]))])
def test_a_fork_server_without_a_driver_ends(
    sent: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its driver was interrupted before it had sent anything, or during the import."""
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(sent and len(sent).to_bytes(8, "big") + sent)
        order = command("_fork_server", theirs.fileno())
        assert subprocess.run(order, pass_fds=(theirs.fileno(),), check=False).returncode == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (RuntimeError("can't start new thread"), "raise the limit of processes or of memory"),
        (OSError(errno.EMFILE, "Too many open files"), "raise the limit of open files"),
        (OSError(errno.ENOENT, "No such file", "/venv/bin/python"), "see to that"),
    ],
)
def test_what_keeps_a_process_from_starting_is_said(error: Exception, advice: str) -> None:
    """Another limit than that which was reached would help nobody."""
    assert f"({error}): {advice}, then run the same command again." in str(no_process(error))
