"""The decision whether a driver can be forked, and what its fork begins with."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.context
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest

from optuna_hermes import _optuna, _parent
from optuna_hermes._optuna._storages import backend_of, close_connections
from optuna_hermes.workers import _fork_server, _forked
from optuna_hermes.workers._fork_safety import Unsafe
from optuna_hermes.workers._forked import why_new_python
from optuna_hermes.workers._processes import ForkedProcess
from optuna_hermes.workers._start_method import fork_by_default
from optuna_hermes.workers._worker import WorkerInput


def objective(trial: optuna.Trial) -> float:
    return trial.suggest_float("x", 0.0, 1.0)


@pytest.fixture
def study(storage_url: str) -> optuna.Study:
    return optuna.create_study(storage=storage_url)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process in which nothing else runs; that of tests may have threads."""
    monkeypatch.setattr(_forked, "missed_threads", list)
    monkeypatch.setattr(_forked, "why_not_fork", lambda: None)
    return monkeypatch


def test_a_script_can_be_forked(alone: pytest.MonkeyPatch, study: optuna.Study) -> None:
    """Its main thread has an objective and a study in a file, and nothing else runs."""
    assert why_new_python(objective, study) is None


@pytest.mark.parametrize("unsafe", Unsafe)
def test_unsafe_processes_are_not_forked(
    alone: pytest.MonkeyPatch, study: optuna.Study, unsafe: Unsafe
) -> None:
    """Threads and CUDA do not survive a fork."""
    alone.setattr(_forked, "why_not_fork", lambda: unsafe)
    assert why_new_python(objective, study) == unsafe.value


def test_a_process_with_threads_is_not_forked(
    monkeypatch: pytest.MonkeyPatch, study: optuna.Study
) -> None:
    """That is seen at once, without a fork to try it."""
    monkeypatch.setattr(_forked, "why_not_fork", lambda: pytest.fail("it was tried"))
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        assert why_new_python(objective, study) == "threads were started"
    finally:
        over.set()
        thread.join()


def test_what_the_driver_has_not_imported_takes_a_new_python(
    alone: pytest.MonkeyPatch, study: optuna.Study
) -> None:
    """The command line names a file, and opens its study while that is imported."""
    assert why_new_python("train.py:objective", study) is not None
    assert why_new_python(objective, None) is not None


def test_other_threads_fork_nothing(alone: pytest.MonkeyPatch, study: optuna.Study) -> None:
    """The kernel would end the fork with the thread, not with the process."""
    found: list[str | None] = []
    thread = threading.Thread(target=lambda: found.append(why_new_python(objective, study)))
    thread.start()
    thread.join()
    assert found == ["it is not the main thread"]


def test_an_open_connection_to_the_study_s_file_prevents_a_fork(
    alone: pytest.MonkeyPatch, study: optuna.Study, storage_url: str
) -> None:
    """The study's own are closed; those of another storage are not this call's to close."""
    other = optuna.load_study(study_name=study.study_name, storage=storage_url)
    assert other.trials == []
    assert why_new_python(objective, study) == "the study's database may be open"
    assert close_connections(other)
    assert study.trials == []  # connects again
    assert why_new_python(objective, study) is None


def test_other_storages_are_not_forked(alone: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Journals name their writers by process, others may have connections that are not known."""
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "journal"))
    study = optuna.create_study(storage=optuna.storages.JournalStorage(backend))
    assert why_new_python(objective, study) == "the study's database may be open"


def test_workers_do_not_inherit_a_journal(study: optuna.Study, tmp_path: Path) -> None:
    """Each has a name of its own there: what is refused to one is not an error of the others."""
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "journal"))
    journal = optuna.create_study(storage=optuna.storages.JournalStorage(backend))
    found = []
    for each in (study, journal):
        spec: Any = None
        job = WorkerInput(
            study=_optuna.for_workers(each),
            spec=spec,
            checkpoint_root=tmp_path,
            inherits=_optuna.is_inheritable(each),
        )
        found.append(_fork_server._study(job, None) is not None)
    assert found == [True, False]


def test_a_file_by_its_uri_is_not_forked(alone: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its path is not known, so neither whether it is open."""
    study = optuna.create_study(storage=f"sqlite:///file:{tmp_path}/study.db?uri=true")
    assert why_new_python(objective, study) == "the study's database may be open"
    backend_of(study).engine.dispose()


@pytest.mark.parametrize("pidfd", ["Python's", "the kernel's", "none"])
def test_a_process_is_opened_where_python_has_no_call_for_it(
    pidfd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conda's may lack ``os.pidfd_open``, and a container may forbid it."""
    if pidfd != "Python's":
        monkeypatch.delattr(os, "pidfd_open")
    if pidfd == "none":
        monkeypatch.setattr(_parent, "_PIDFD_OPEN", 100_000)  # no system call
    with contextlib.suppress(OSError):
        os.close(_parent.pidfd_open(os.getpid()))
        assert pidfd != "none"


def test_a_forked_process_is_waited_for(wait_for: Callable[..., Any]) -> None:
    """In time or not, once or twice, and also where its parent ignores the ends of children."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
    child = ForkedProcess(pid)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(timeout=0.01)
    child.kill()
    child.wait(timeout=10.0)
    child.wait()
    assert child.returncode == -signal.SIGKILL
    child.kill()  # not a process that has got its number since
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        wait_for(lambda: not os.path.exists(f"/proc/{pid}"))
        child = ForkedProcess(pid)
        child.wait()
        assert child.returncode is None
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"])
def test_a_library_that_is_loaded_takes_fewer_threads(variable: str) -> None:
    """NumPy's has read its number as it was loaded; one that the user has given to it stays."""
    code = (
        "import numpy\nfrom threadpoolctl import ThreadpoolController\n"
        "from optuna_hermes.workers._threads import limit_threads\n"
        "print([x.num_threads for x in ThreadpoolController().lib_controllers])\n"
        "limit_threads(1)\n"
        "print([x.num_threads for x in ThreadpoolController().lib_controllers])\n"
    )
    known = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS")
    clean = {name: value for name, value in os.environ.items() if name not in known}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, variable: "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    before, after = done.stdout.splitlines()
    assert after == ("[1]" if variable == "OMP_NUM_THREADS" else before)


@pytest.mark.parametrize("chosen", [None, "spawn"])
def test_processes_of_a_trial_are_forks_unless_another_way_was_chosen(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    """Python 3.14 has another default, which the first lock fixes; objectives may still choose."""
    context = multiprocessing.context.DefaultContext(multiprocessing.get_context("forkserver"))
    monkeypatch.setattr(multiprocessing.context, "_default_context", context)
    context.RLock()
    if chosen is not None:
        context.set_start_method(chosen, force=True)
    fork_by_default()
    assert context.get_start_method(allow_none=True) == chosen
    assert context.get_start_method() == (chosen or "fork")
