"""Signals to processes that an objective forks."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing import popen_spawn_posix

import pytest

from optuna_hermes.workers import _signals

BEGIN = """
import multiprocessing, os, signal, threading
from optuna_hermes.workers import _signals
_signals.leave_to_driver()
"""

AT_ONCE = """
for _ in range(40):
    pid = os.fork()
    if pid == 0:
        for _ in range(600):  # else a signal right before the wait would be heeded after it
            threading.Event().wait(0.1)
        os._exit(1)
    os.kill(pid, signal.SIGTERM)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGTERM
assert not _signals.sent_to_all()
assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
"""

TERMINATED = """
context = multiprocessing.get_context("fork")
ready = context.Event()
process = context.Process(target=begin, args=(ready,))
process.start()
ready.wait()
process.terminate()
process.join()
"""

LOST = f"""
def begin(ready):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    ready.set()
    signal.sigwait([signal.SIGTERM])  # nobody acts on it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    threading.Event().wait(60.0)
{TERMINATED}
assert process.exitcode == -signal.SIGTERM
"""

SLOW = f"""
def begin(ready):
    def end(number, frame):
        heard.append(number)
        threading.Event().wait(3 * _signals._LOST_SECONDS)
        os._exit(len(heard))
    heard = []
    signal.signal(signal.SIGTERM, end)
    ready.set()
    threading.Event().wait(60.0)
{TERMINATED}
assert process.exitcode == 1
"""

AFTER_ONE_TO_ALL = f"""
def begin(ready):
    os.kill(os.getppid(), signal.SIGTERM)
    while not _signals.sent_to_all():
        threading.Event().wait(0.01)
    for _ in range(3):  # sent as often to all, which its parent may have taken for one
        os.kill(os.getpid(), signal.SIGTERM)
    ready.set()
    threading.Event().wait(60.0)
{TERMINATED}
assert process.exitcode == -signal.SIGTERM
assert _signals.sent_to_all()
"""

AFTER_ONE_TO_THE_PARENT = f"""
def begin(ready):
    ready.set()
    threading.Event().wait(60.0)
os.kill(os.getpid(), signal.SIGTERM)
{TERMINATED}
assert process.exitcode == -signal.SIGTERM
"""


@pytest.mark.parametrize(
    "script",
    [AT_ONCE, LOST, SLOW, AFTER_ONE_TO_ALL, AFTER_ONE_TO_THE_PARENT],
    ids=["as it begins", "a lost one", "that takes time", "after all", "after its parent"],
)
def test_a_forked_process_is_terminated(script: str) -> None:
    """Its parent, which leaves signals to the driver, takes none of them for one to all."""
    subprocess.run([sys.executable, "-c", BEGIN + script], check=True, timeout=60.0)


def test_a_process_of_another_program_is_terminated_once() -> None:
    """One that was not forked, or has begun a new program, acts by handlers of its own."""
    sent: list[object] = []
    _signals._terminate(popen_spawn_posix.Popen, sent.append)
    assert sent == [popen_spawn_posix.Popen]
    assert not _signals._terminated
