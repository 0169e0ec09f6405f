"""A fork is tried before a driver is forked."""

from __future__ import annotations

import multiprocessing
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.random import bit_generator

from optuna_hermes.suspend._state import end_entropy, seed_entropy
from optuna_hermes.workers import _fork_safety
from optuna_hermes.workers._fork_safety import Unsafe, why_not_fork


def test_a_driver_that_does_not_answer_in_a_fork_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The forks are killed and reaped."""
    monkeypatch.setattr(_fork_safety, "PROBE_SECONDS", (0.1, 0.1))
    monkeypatch.setattr(_fork_safety, "_accelerators_work", signal.pause)
    assert why_not_fork() is Unsafe.ACCELERATOR


def test_a_fork_that_waits_for_a_lock_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Once is not enough to start all workers slowly."""
    first = tmp_path / "first"

    def stuck_once() -> bool:
        if first.exists():
            return True
        first.touch()
        signal.pause()
        return False

    monkeypatch.setattr(_fork_safety, "PROBE_SECONDS", (0.5, 20.0))
    monkeypatch.setattr(_fork_safety, "_accelerators_work", stuck_once)
    assert why_not_fork() is not Unsafe.ACCELERATOR


def test_a_process_may_have_any_number_of_open_files() -> None:
    """Handles above 1023 are waited for like others."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2000:
        pytest.skip(f"needs 2000 open files, this system allows {hard}")
    script = (
        "import os, resource\n"
        "from optuna_hermes.workers._fork_safety import why_not_fork\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (2000, {hard}))\n"
        "held = [os.open('/dev/null', os.O_RDONLY) for _ in range(1100)]\n"
        "print(why_not_fork())\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "None\n", done.stderr


NATIVE = """
import ctypes, sys
from optuna_hermes.workers._fork_safety import other_threads, why_not_fork

libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
libc.pthread_create(ctypes.byref(thread), None, libc.pause, None)
libc.pthread_setname_np(thread, sys.argv[1].encode())
print(why_not_fork(), other_threads(), sep=";")
"""


@pytest.mark.parametrize(
    ("name", "found"),
    [("of a library", "Unsafe.THREADS;1 x of a library"), ("jemalloc_bg_thd", "None;")],
)
def test_threads_of_libraries(name: str, found: str) -> None:
    """They are named; pyarrow's allocator starts its own anew in a fork."""
    command = [sys.executable, "-c", NATIVE, name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == found


def test_threads_of_python_are_named_once() -> None:
    """By what Python calls them, and not again as one of the system's."""
    script = (
        "import threading\n"
        "from optuna_hermes.workers._fork_safety import other_threads\n"
        "wait = threading.Event()\n"
        "threading.Thread(target=wait.wait, name='of the script').start()\n"
        "print(other_threads())\n"
        "wait.set()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "of the script\n"


def test_a_script_may_ignore_the_ends_of_its_children() -> None:
    """The kernel reaps them then: the fork that is tried is none to wait for."""
    script = (
        "import signal\n"
        "from optuna_hermes.workers._fork_safety import why_not_fork\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "print(why_not_fork())\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "None\n", done.stderr


def draw() -> float:
    return float(np.random.default_rng().random())


def test_generators_without_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a trial are the same in its next process; those of its forks, and later, are not."""
    monkeypatch.setitem(vars(bit_generator), "randbits", vars(bit_generator)["randbits"])
    drawn = []
    for _ in range(2):
        seed_entropy(3)
        own = draw()
        with multiprocessing.get_context("fork").Pool(1) as pool:
            drawn.append((own, pool.apply(draw)))
    (first, forked), (again, forked_again) = drawn
    assert first == again
    assert forked != forked_again
    seed_entropy(3)
    end_entropy()
    assert draw() != first
