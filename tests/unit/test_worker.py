"""Work of a worker around the training of a trial."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import filelock
import optuna
import psutil
import pytest
from optuna.trial import TrialState

from optuna_hermes import HermesSampler, _optuna
from optuna_hermes.broker._protocol import Grant
from optuna_hermes.errors import ObjectiveError
from optuna_hermes.workers._worker import (
    _creation_lock,
    _end_idle_pools,
    _Notes,
    _TrialExecution,
)


def test_another_host_cannot_keep_trials_from_being_opened(tmp_path: Path) -> None:
    """A lock in a folder that hosts share, held by one that hangs, holds up no other."""
    entered = threading.Event()

    def work() -> None:
        with _creation_lock(tmp_path):
            entered.set()

    with filelock.FileLock(tmp_path / "open.lock", is_singleton=False):
        threading.Thread(target=work, daemon=True).start()
        assert entered.wait(2.0)


def test_one_worker_of_a_study_opens_a_trial_at_a_time(tmp_path: Path) -> None:
    """Two could take the same one from SQLite; those of another study do not wait."""
    own, other = threading.Event(), threading.Event()

    def work(root: Path, entered: threading.Event) -> None:
        with _creation_lock(root):
            entered.set()

    with _creation_lock(tmp_path / "one"):
        waits = threading.Thread(target=work, args=(tmp_path / "one", own), daemon=True)
        waits.start()
        threading.Thread(target=work, args=(tmp_path / "two", other), daemon=True).start()
        assert other.wait(10.0)
        assert not own.is_set()
    waits.join(10.0)
    assert own.is_set()


def test_the_folder_of_the_lock_is_removed_under_one_that_waits(
    runtime_dir: Path, tmp_path: Path, wait_for: Callable[..., Any]
) -> None:
    """It has its turn all the same, and who comes later makes the folder again."""
    entered = threading.Event()

    def work() -> None:
        with _creation_lock(tmp_path):
            entered.set()

    with _creation_lock(tmp_path):
        threading.Thread(target=work, daemon=True).start()
        wait_for(lambda: _n_open(runtime_dir) == 2)
        shutil.rmtree(runtime_dir)
        assert not entered.is_set()
    assert entered.wait(10.0)
    with _creation_lock(tmp_path):
        assert len(list(runtime_dir.glob("open-*.lock"))) == 1


def _n_open(folder: Path) -> int:
    """The number of files in a folder that this process has open."""
    return sum(f"{folder}/" in os.path.realpath(each) for each in Path("/proc/self/fd").iterdir())


def test_a_process_that_is_forked_meanwhile_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A sampler may start one that lives on."""
    with _creation_lock(tmp_path):
        child = os.fork()
        if child == 0:
            while True:
                signal.pause()
    try:
        entered = threading.Event()

        def work() -> None:
            with _creation_lock(tmp_path):
                entered.set()

        threading.Thread(target=work, daemon=True).start()
        assert entered.wait(10.0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_no_thread_can_be_started_for_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a limit of processes a dashboard misses a trial's states, and the trial goes on."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    noted: list[str] = []
    notes = _Notes(noted.append, lambda: None)  # type: ignore[arg-type]  # only called
    notes.put("done")
    notes.close()
    assert noted == []


class TextlessError(Exception):
    """An error whose text needs what it was not given."""

    def __str__(self) -> str:
        raise KeyError("code")

    __repr__ = __str__


def ends_of(
    study: optuna.Study, objective: Callable[[optuna.Trial], float]
) -> list[tuple[str | None, ...]]:
    """What the broker is told of the end of a trial that a worker trains."""
    ends: list[tuple[str | None, ...]] = []
    session: Any = SimpleNamespace(
        left=False, checkpoints=(), checkpoint_url=None, end=lambda *end: ends.append(end)
    )
    job: Any = SimpleNamespace(ids_return=False)
    notes: Any = SimpleNamespace(put=lambda state: None, close=lambda: None)
    with _optuna.retrying(study):
        execution = _TrialExecution(job, study, session, lambda word, reason: None)
        execution._train(study.ask(), objective, notes)
    return ends


def test_trials_of_a_copied_study_are_not_taken_for_those_of_its_leases(
    tmp_path: Path, storage_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epochs begin anew in the ledger of the copy, and the marks of the original are copied."""
    session: Any = SimpleNamespace(begin=lambda number, trial_id: None)
    known = SimpleNamespace(add=lambda *entry: None)
    monkeypatch.setattr("optuna_hermes.workers._worker.sessions", known)

    def opened(study: optuna.Study, epoch: int, *lost: str) -> int:
        spec = SimpleNamespace(key=_optuna.study_key(study), seed=0)
        job: Any = SimpleNamespace(ids_return=False, checkpoint_root=tmp_path, spec=spec)
        execution = _TrialExecution(job, study, session, lambda word, reason: None)
        return execution._trial(Grant(epoch=epoch, devices=(), lost=lost)).number

    study = optuna.create_study(storage=storage_url, study_name="s")
    assert opened(study, 7) == 0
    copy = f"{storage_url}.copy"
    optuna.copy_study(from_study_name="s", from_storage=storage_url, to_storage=copy)
    copied = optuna.load_study(study_name="s", storage=copy)
    assert opened(copied, 8, "7") == 1
    assert opened(copied, 7) == 2
    assert opened(copied, 9, "8") == 1
    assert opened(study, 8, "7") == 0


def test_an_error_without_a_text_fails_its_trial(storage_url: str) -> None:
    """Its class is named; the trial does not lose its process for it."""

    def objective(trial: optuna.Trial) -> float:
        raise TextlessError

    study = optuna.create_study(storage=storage_url)
    assert ends_of(study, objective) == [("failed", "TextlessError")]
    assert study.trials[0].state.name == "FAIL"


def test_a_pool_of_joblib_ends_with_its_worker() -> None:
    """It would keep its processes for five minutes, a trial's beside the next trial's."""
    joblib = pytest.importorskip("joblib")
    pids = {*joblib.Parallel(n_jobs=2)(joblib.delayed(os.getpid)() for _ in range(4))}
    assert os.getpid() not in pids
    _end_idle_pools()
    assert not any(map(psutil.pid_exists, pids))
    _end_idle_pools()
    assert joblib.Parallel(n_jobs=2)(joblib.delayed(abs)(-1) for _ in range(2)) == [1, 1]
    _end_idle_pools()


class NeedsPackageSampler(optuna.samplers.RandomSampler):
    """A sampler that imports what is not installed once it proposes."""

    def sample_independent(self, *args: Any) -> Any:
        raise ModuleNotFoundError("No module named 'cmaes'")


def suggests(trial: optuna.Trial) -> float:
    return trial.suggest_float("x", 0, 1)


def imports(trial: optuna.Trial) -> float:
    raise ModuleNotFoundError("No module named 'cmaes'")


def test_a_package_that_its_sampler_needs_is_no_fault_of_a_trial(storage_url: str) -> None:
    """All other trials would fail for it, too; one that an objective imports fails its trial."""
    sampler = HermesSampler(NeedsPackageSampler())
    study = optuna.create_study(storage=storage_url, sampler=sampler)
    with pytest.raises(ObjectiveError) as error:
        ends_of(study, suggests)
    assert str(error.value) == (
        "its sampler NeedsPackageSampler raises ModuleNotFoundError(\"No module named 'cmaes'\"): "
        "install what that needs, then run the same command again."
    )
    assert study.trials[0].state.name == "RUNNING"
    assert [end for end, _ in ends_of(study, imports)] == ["failed"]


@pytest.mark.parametrize(("state", "end"), [("COMPLETE", "done"), ("FAIL", "failed")])
@pytest.mark.parametrize("reports", [True, False])
def test_a_trial_that_is_told_while_it_trains(
    storage_url: str, state: str, end: str, reports: bool
) -> None:
    """It ends as it was told, at its next report or at its end; its process is not lost for it."""
    study = optuna.create_study(storage=storage_url)

    def objective(trial: optuna.Trial) -> float:
        values = {"values": 0.125} if state == "COMPLETE" else {}
        told = optuna.load_study(study_name=study.study_name, storage=storage_url)
        told.tell(0, state=TrialState[state], **values)
        if reports:
            trial.report(1.0, 1)
        return 1.0

    assert ends_of(study, objective) == [(end,)]
    assert study.trials[0].state.name == state
