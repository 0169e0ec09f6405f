"""``once`` within one process: what is kept, for whom, and with which random numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import optuna
import pytest

import optuna_hermes
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.suspend._state import entropy_of
from optuna_hermes.workers import _fork_server, _once
from optuna_hermes.workers._successor import Successor
from optuna_hermes.workers._words import NOTE

calls: list[Any] = []


def load(*args: Any, **kwargs: Any) -> Any:
    calls.append((args, kwargs))
    return random.random(), float(np.random.rand())


def fail() -> None:
    calls.append("fail")
    raise OSError("no such data")


class Loads:
    @staticmethod
    def data() -> list[int]:
        calls.append("data")
        return [1]


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> _once._Process:
    """A process that has computed nothing."""
    fresh = _once._Process()
    monkeypatch.setattr(_once, "_process", fresh)
    calls.clear()
    return fresh


def test_plain_optuna_computes_once_in_a_process() -> None:
    """All trials of a study get the same object."""
    seen: list[Any] = []

    def objective(trial: optuna.Trial) -> float:
        seen.append(optuna_hermes.once(load))
        return trial.suggest_float("x", 0, 1)

    optuna.create_study().optimize(objective, n_trials=3)
    assert len(calls) == 1
    assert all(each is seen[0] for each in seen)


def test_each_combination_of_arguments_is_another_value() -> None:
    """Equal numbers of other types are other arguments, and so are names."""
    for _ in range(2):
        _once.once(load, 1)
        _once.once(load, 1.0)
        _once.once(load, True)
        _once.once(load, a=1)
        _once.once(load, a=1, b=2)
        _once.once(load, b=2, a=1)
    assert len(calls) == 5


@dataclasses.dataclass(frozen=True)
class Shape:
    side: float


@pytest.mark.parametrize(
    "wrap",
    [lambda n: (n,), lambda n: ("a", (n,)), lambda n: frozenset([n]), Shape, lambda n: (Shape(n),)],
    ids=["tuple", "nested", "frozenset", "dataclass", "both"],
)
def test_equal_numbers_are_told_apart_inside_of_arguments(wrap: Callable[[float], Any]) -> None:
    """So are two zeros, and equal texts are not."""
    for _ in range(2):
        for number in (1, 1.0, True, 0.0, -0.0):
            _once.once(load, wrap(number))
    assert len(calls) == 5


def test_the_trial_s_random_numbers_go_on_as_if_nothing_had_been_called() -> None:
    """A computed value and an inherited one leave the same state behind."""
    torch = pytest.importorskip("torch")

    def draw(called: bool) -> list[float]:
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        if called:
            _once.once(load, "x")
        return [random.random(), float(np.random.rand()), torch.rand(()).item()]

    without = draw(False)
    assert draw(True) == without  # computed
    assert draw(True) == without  # known
    assert len(calls) == 1


@pytest.mark.parametrize("bits", [np.random.PCG64, np.random.SFC64])
def test_another_bit_generator_of_numpy_changes_nothing(bits: Any, process: Any) -> None:
    """The value is the same, and the trial's own numbers go on, those of its seed too."""
    first = np.random.mtrand.get_bit_generator()

    def draw(called: bool) -> tuple[Any, ...]:
        np.random.mtrand.set_bit_generator(bits(3))
        with entropy_of(3):
            value = _once.once(draws_entropy) if called else None
            return value, float(np.random.rand()), float(np.random.default_rng().random())

    try:
        without, called = draw(False), draw(True)
    finally:
        np.random.mtrand.set_bit_generator(first)
    assert called[1:] == without[1:]
    process.values.clear()
    assert _once.once(draws_entropy) == called[0]


def draws_entropy() -> tuple[float, float]:
    return float(np.random.rand()), float(np.random.default_rng().random())


def test_the_value_s_random_numbers_do_not_depend_on_the_trial(process: Any) -> None:
    """Another process, at another place of its own random numbers, computes the same."""
    values = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        values.append(_once.once(load))
        process.values.clear()
    assert values[0] == values[1]


IMPORTS_TORCH = """
import sys
from optuna_hermes.workers import _fork_server, _once
from optuna_hermes.workers._words import NOTE

def load():
    import torch
    if {fails}:
        raise OSError
    return torch.rand(()).item()

if {before}:
    import torch
    torch.manual_seed(5)
_once.begin_trial(5)
try:
    value = _once.once(load)
except OSError:
    value = None
import torch
print(value, torch.rand(()).item())
"""


@pytest.mark.parametrize("fails", [False, True])
def test_torch_draws_the_same_whether_or_not_it_was_imported_before(fails: bool) -> None:
    """A process that imports torch in the function ends up with the same value and state."""
    pytest.importorskip("torch")
    printed = [
        subprocess.run(
            [sys.executable, "-c", IMPORTS_TORCH.format(before=before, fails=fails)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for before in (True, False)
    ]
    assert printed[0] == printed[1]


def test_an_error_is_raised_and_not_kept() -> None:
    """The next trial tries again."""
    for _ in range(2):
        with pytest.raises(OSError, match="no such data"):
            _once.once(fail)
    assert calls == ["fail", "fail"]


def test_a_function_without_a_name_is_called_each_time(process: Any) -> None:
    """It may have values of its trial; the user is told once."""
    notes: list[str] = []
    _once.begin_worker(None, notes.append)
    for number in range(3):
        assert _once.once(lambda number=number: number) == number
    (note,) = notes
    assert "make it a function of the file" in note
    assert not process.values


def test_static_methods_and_functions_of_libraries_have_names() -> None:
    """They are found by their qualified names."""
    assert _once.once(Loads.data) is _once.once(Loads.data)
    assert _once.once(np.eye, 2) is _once.once(np.eye, 2)


def test_arguments_must_be_hashable() -> None:
    """The message says so, and what to give."""
    with pytest.raises(InvalidInputError, match="give numbers, texts and tuples"):
        _once.once(load, [1])


def test_a_value_may_use_another_one() -> None:
    """The lock is reentrant."""
    assert _once.once(uses_other) == [1, 1]


def uses_other() -> list[int]:
    return 2 * _once.once(Loads.data)


def test_a_worker_shares_what_it_has_computed(process: Any) -> None:
    """The fork server gets a call that it can repeat, once."""
    sent: list[str] = []
    _once.begin_worker(sent.append, calls.append)
    value = _once.once(load, 2, a=(1, "x"))
    _once.once(load, 2, a=(1, "x"))
    (packed,) = sent
    process.values.clear()
    assert not _once.is_computed(packed)
    assert _once.compute(packed) == ""
    assert _once.is_computed(packed)
    assert _once.n_computed() == 1
    assert _once.once(load, 2, a=(1, "x")) == value
    assert _once.name_of(packed) == "load"


def test_a_module_that_only_the_objective_imports(
    process: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that computes a value for forks has not run the objective."""
    (tmp_path / "imported_within.py").write_text("def load():\n    return [7]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    sent: list[str] = []
    _once.begin_worker(sent.append, calls.append)
    module = importlib.import_module("imported_within")
    assert _once.once(module.load) == [7]
    process.values.clear()
    monkeypatch.delitem(sys.modules, "imported_within")
    assert "import it at the top of the file" in _once.compute(sent.pop())
    assert not process.values


def open_file() -> Any:
    return open(__file__)


def test_what_cannot_be_shared_is_said(process: Any) -> None:
    """Handles of files share their position among forks; long arguments fit in no message."""
    notes: list[str] = []
    sent: list[str] = []
    _once.begin_worker(sent.append, notes.append)
    _once.once(open_file).close()
    assert _once.compute(sent.pop()) == "it keeps files open"
    next(iter(process.values.values())).close()
    _once.once(fail_late, ())
    why = _once.compute(sent.pop())
    assert "OSError" in why
    assert len(why) < 400
    _once.once(load, "x" * 5000)
    _once.once(load, sys)
    assert not sent
    assert "too long" in notes[0]
    assert "cannot be sent" in notes[1]


def fail_late(made: tuple[()]) -> None:
    calls.append(made)
    if len(calls) > 1:
        raise OSError("gone" * 100_000)


class Elsewhere:
    """Of a module that only the objective can import."""

    def __reduce__(self) -> Any:
        return fail, ()


def test_arguments_are_unpacked_only_by_a_process_that_computes() -> None:
    """One that forks workers would end with the error."""
    sent: list[str] = []
    _once.begin_worker(sent.append, calls.append)
    _once.once(load, Elsewhere())
    (packed,) = sent
    calls.clear()
    assert not _once.is_computed(packed)
    assert _once.name_of(packed) == "load"
    assert not calls
    assert _once.compute(packed).startswith("it raised OSError('no such data') in another process")


def test_a_successor_that_ends_is_heard_first(process: Any) -> None:
    """Its reason is in the socket when its exit is noticed, and others may still ask it."""
    computing, asked = "AAAA load", "AAAA fail"
    driver, parent = socket.socketpair()
    ours, theirs = socket.socketpair()
    words, words_end = os.pipe()
    job: Any = None
    server = _fork_server._ForkServer(parent, job, lambda trial: 0.0, fresh=None)
    server._serves, server._computing = True, computing
    successor = server._successor = Successor(0, ours, words_end)
    theirs.sendall(b'{"refused": "it is a test"}\n')
    theirs.close()
    os.close(words)
    server._share(asked, b"another value is asked for")
    server._take_over(successor, 0)
    line = json.loads(driver.recv(4096))
    assert line["said"] == NOTE
    assert line["reason"] == "once() calls load in each trial, since it is a test."
    for each in (driver, parent, server._wake, server._wake_end, server._selector):
        each.close()
    os.close(server._words)
    os.close(server._words_end)


def test_a_successor_that_computes_for_ever_holds_up_nobody() -> None:
    """It reads nothing: it is asked once for each value, and for no more than its pipe holds."""
    ours, theirs = socket.socketpair()
    words, words_end = os.pipe()
    successor = Successor(0, ours, words_end)
    line = b"x" * 3000
    for _ in range(100):
        successor.pass_on("AAAA load", line)
    assert os.read(words, 65536) == line + b"\n"
    for number in range(100):
        successor.pass_on(f"AAAA {number}", line)
    os.set_blocking(words, False)
    with contextlib.suppress(BlockingIOError):
        while os.read(words, 65536):
            pass
    successor.pass_on("AAAA 99", line)  # there is room again
    assert os.read(words, 65536) == line + b"\n"
    theirs.close()
    successor.forget()
    os.close(words)


def test_a_message_of_a_successor_that_is_not_whole_is_not_its_end() -> None:
    """The rest is still read."""
    ours, theirs = socket.socketpair()
    successor = Successor(0, ours, os.dup(1))
    theirs.sendall(b'{"rea')
    assert successor.lines() == []
    assert successor.lines() == []
    theirs.sendall(b'dy": true}\n')
    assert successor.lines() == [b'{"ready": true}']
    theirs.close()
    assert successor.lines() is None
    successor.forget()


def test_a_fork_computes_while_another_thread_did(process: Any) -> None:
    """The thread that held the lock is not in the fork."""
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        go_on.wait(30)

    with mock.patch.dict(globals(), wait_here=wait):
        thread = threading.Thread(target=_once.once, args=(load_slowly,))
        thread.start()
        begun.wait(30)
        child = os.fork()
        if not child:
            signal.alarm(20)
            os._exit(_once.once(Loads.data)[0])
        go_on.set()
        thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def wait_here() -> None:
    """What ``load_slowly`` waits for."""


def load_slowly() -> int:
    wait_here()
    return 1
