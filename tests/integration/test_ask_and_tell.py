"""Trials by ask and tell, without ``study.optimize``, and studies inside of trials."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from optuna_hermes import HermesPruner, HermesSampler, _optuna
from optuna_hermes._optuna import _plain, _waiting
from optuna_hermes.broker import broker_status, sessions
from optuna_hermes.errors import HermesError
from optuna_hermes.ledger import open_ledger

optuna.logging.set_verbosity(optuna.logging.WARNING)

FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def no_session_outlives_its_test() -> Iterator[None]:
    yield
    for held in sessions.all():
        sessions.take_away(held)
        held.session.hang_up()


def make_study(
    storage: str | RDBStorage | None = None, *, devices: str = "cpu:1", name: str | None = None
) -> optuna.Study:
    return optuna.create_study(
        study_name=name,
        storage=storage,
        sampler=HermesSampler(devices=devices),
        pruner=HermesPruner(),
    )


def train(trial: optuna.Trial, units: int = 2) -> float:
    for unit in range(1, units + 1):
        trial.report(1 / unit, unit)
        if trial.should_prune():
            raise optuna.TrialPruned
    return 1 / units


def holders() -> list[int | None]:
    """The trials that have a device."""
    status = broker_status()
    assert status is not None
    return [device.holder.trial for device in status.devices if device.holder is not None]


def waiting() -> list[int]:
    """The trials that have asked for their first device and have none yet."""
    status = broker_status()
    assert status is not None
    return [
        trial.number
        for study in status.studies
        for trial in study.trials
        if trial.state == "pending"
    ]


def is_free() -> bool:
    return not holders()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def test_a_batch_is_asked_for_and_told() -> None:
    """Sixteen trials are asked for and told together: none of them needs a device, or a broker."""
    study = make_study()
    trials = [study.ask({"x": optuna.distributions.FloatDistribution(0, 1)}) for _ in range(16)]
    for trial in trials:
        study.tell(trial, trial.params["x"])
    assert {trial.state for trial in study.trials} == {TrialState.COMPLETE}
    assert broker_status() is None


def test_trials_side_by_side_share_the_device_of_their_thread() -> None:
    """One loop that trains sixteen trials in turn ends, on one device, and gives it back."""
    study = make_study()
    trials = [study.ask() for _ in range(16)]
    for unit in range(1, 4):
        for trial in trials:
            trial.report(unit, unit)
            assert not trial.should_prune()
    assert len(holders()) == 1
    for trial in trials:
        study.tell(trial, 0.0)
    assert {trial.state for trial in study.trials} == {TrialState.COMPLETE}
    assert holders() == []


def test_trials_of_a_pool_are_told_at_its_end(
    monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> None:
    """Threads that have trained and only wait keep nobody from a device."""
    monkeypatch.setattr("optuna_hermes._optuna._plain.IDLE_SECONDS", 1.0)
    study = make_study()
    trials = [study.ask() for _ in range(4)]
    for trial, value in zip(trials, list(pool.map(train, trials)), strict=True):
        study.tell(trial, value)
    assert {trial.state for trial in study.trials} == {TrialState.COMPLETE}


def test_a_trial_that_nobody_has_any_more_gives_its_device_back(
    wait_for: Callable[..., Any],
) -> None:
    """The device of a trial that was dropped is free, although its process and thread go on."""
    study = make_study()
    trial = study.ask()
    train(trial)
    assert holders() == [0]
    del trial
    gc.collect()
    wait_for(is_free)


def test_a_trial_has_its_device_until_the_last_of_its_objects_is_gone(
    wait_for: Callable[..., Any],
) -> None:
    """An objective may make a further one for a moment, or go on with that one alone."""
    study = make_study()
    lost = []

    def objective(trial: optuna.Trial) -> float:
        value = train(trial)
        optuna.Trial(study, trial._trial_id)
        gc.collect()
        lost.extend(_plain._watch._abandoned(sessions.all()))
        return value

    study.optimize(objective, n_trials=1)
    trial: optuna.Trial | None = study.ask()
    assert trial is not None
    further = optuna.Trial(study, trial._trial_id)
    train(trial)
    trial = None
    gc.collect()
    lost.extend(_plain._watch._abandoned(sessions.all()))
    assert not lost
    assert holders() == [1]
    del further
    gc.collect()
    wait_for(is_free)


def test_a_thread_that_ends_gives_the_device_back(wait_for: Callable[..., Any]) -> None:
    """A trial whose thread is gone trains no more, though it is not told."""
    study = make_study()
    trial = study.ask()
    thread = threading.Thread(target=train, args=(trial,))
    thread.start()
    thread.join()
    wait_for(is_free)
    train(study.ask())
    study.tell(trial, 1.0)


def test_a_busy_thread_keeps_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that was asked for and computes keeps its device, however long a unit takes."""
    monkeypatch.setattr("optuna_hermes._optuna._plain.IDLE_SECONDS", 1.0)
    study = make_study()
    trial = study.ask()
    train(trial, units=1)
    end = time.monotonic() + 4.0
    while time.monotonic() < end:
        sum(range(1000))
    assert holders() == [0]
    study.tell(trial, 1.0)


def test_a_trial_told_by_another_process_has_ended(storage_url: str) -> None:
    """The next trial of its thread takes a turn of its own."""
    study = make_study(storage_url)
    first = study.ask()
    train(first)
    told = (
        "import optuna, sys; "
        "optuna.load_study(study_name=sys.argv[1], storage=sys.argv[2]).tell(0, 1.0)"
    )
    subprocess.run([sys.executable, "-c", told, study.study_name, storage_url], check=True)
    second = study.ask()
    train(second)
    assert holders() == [1]


def test_a_study_after_an_untold_trial_takes_turns_of_its_own() -> None:
    """``study.optimize`` does not train under the lease of a trial that was only asked for."""
    study = make_study()
    trial = study.ask()
    train(trial)
    seen: list[list[int | None]] = []

    def objective(trial: optuna.Trial) -> float:
        seen.append(holders())
        return train(trial)

    study.optimize(objective, n_trials=1)
    assert seen == [[1]]


@pytest.fixture
def optuna_logs(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """``caplog``, which has what Optuna logs, too."""
    optuna.logging.enable_propagation()
    yield caplog
    optuna.logging.disable_propagation()


@pytest.mark.parametrize("n_jobs", [1, 2])
def test_a_study_inside_of_a_trial_ends(
    n_jobs: int, monkeypatch: pytest.MonkeyPatch, optuna_logs: pytest.LogCaptureFixture
) -> None:
    """An objective that optimizes another study does so on the device that it has.

    Where that is a guess, since a thread of its own waits for the device, it is said once.
    """
    monkeypatch.setattr(_waiting._notices, "_shared", False)

    def outer(trial: optuna.Trial) -> float:
        inner = make_study()
        inner.optimize(train, n_trials=3, n_jobs=n_jobs)
        return inner.best_value

    study = make_study()
    study.optimize(outer, n_trials=2)
    assert [trial.value for trial in study.trials] == [0.5, 0.5]
    said = [text for text in optuna_logs.messages if "trains on the device of another" in text]
    assert len(said) == n_jobs - 1


def test_a_study_inside_of_a_trial_ends_in_a_pool_that_is_kept(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread is older than the second trial around it, which waits for it all the same."""
    monkeypatch.setattr(_waiting, "OLDER_SHARE_SECONDS", 1.0)

    def outer(trial: optuna.Trial) -> float:
        inner = make_study()
        pool.submit(inner.optimize, train, n_trials=2).result(60)
        return inner.best_value

    pool.submit(int).result(60)
    study = make_study()
    study.optimize(outer, n_trials=2)
    assert [trial.value for trial in study.trials] == [0.5, 0.5]


def test_studies_in_threads_of_their_own_take_turns(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial that waits for a process, say, is not taken for one that waits for their threads."""
    monkeypatch.setattr(_waiting, "SHARE_SECONDS", 1e-9)
    has_device, looked = threading.Event(), threading.Event()
    look = _waiting.Wait._is_inside_of_thread
    looks: list[bool] = []

    def looking(wait: _waiting.Wait) -> bool:
        looks.append(look(wait))
        if len(looks) > 2 and has_device.is_set():  # it is idle from the second look on
            looked.set()
        return looks[-1]

    def first(trial: optuna.Trial) -> float:
        has_device.set()
        assert looked.wait(60)
        return train(trial)

    def second(trial: optuna.Trial) -> float:
        assert sessions.of_thread() is not None
        return train(trial)

    def later() -> None:
        assert has_device.wait(60)
        make_study().optimize(second, n_trials=1)

    monkeypatch.setattr(_waiting.Wait, "_is_inside_of_thread", looking)
    waits = pool.submit(later)
    make_study().optimize(first, n_trials=1)
    waits.result(60)


def test_studies_of_one_name_are_told_apart(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    """Trials of one number train at once, each under its own lease, in two databases."""
    met = threading.Barrier(2, timeout=60)

    def optimized(value: float) -> optuna.Study:
        def objective(trial: optuna.Trial) -> float:
            for unit in range(1, 4):
                trial.report(value, unit)
                assert not trial.should_prune()
                met.wait()
            return value

        study = optuna.create_study(
            storage=f"sqlite:///{tmp_path}/{value}.db",
            study_name="hpo",
            sampler=HermesSampler(devices="cpu:2"),
            pruner=HermesPruner(),
        )
        study.optimize(objective, n_trials=2)
        return study

    for value, study in zip((0.25, 0.75), pool.map(optimized, (0.25, 0.75)), strict=True):
        assert {trial.state for trial in study.trials} == {TrialState.COMPLETE}
        with closing(open_ledger(_optuna.ledger_url(study))) as ledger:
            curves = ledger.load_curves(_optuna.study_key(study))
        assert [curve.values for curve in curves.values()] == [(value,) * 3] * 2
    assert sessions.all() == []
    assert holders() == []


def test_a_study_of_a_journal_is_one_study_by_each_of_its_objects(tmp_path: Path) -> None:
    """A trial that was asked of one and is told to another one gives its device back."""

    def loaded() -> optuna.Study:
        storage = JournalStorage(JournalFileBackend(str(tmp_path / "journal.log")))
        return optuna.create_study(
            storage=storage,
            study_name="s",
            sampler=HermesSampler(devices="cpu:1"),
            pruner=HermesPruner(),
            load_if_exists=True,
        )

    first, second = loaded(), loaded()
    assert _optuna.identity(first) == _optuna.identity(second)
    trial = first.ask()
    value = train(trial)
    assert holders() == [0]
    second.tell(trial.number, value)
    assert holders() == []
    assert sessions.all() == []


def test_an_objective_may_change_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The study of a journal that is named by a relative path stays the same one."""
    monkeypatch.chdir(tmp_path)
    storage = JournalStorage(JournalFileBackend("journal.log"))
    study = optuna.create_study(storage=storage)
    before = _optuna.identity(study)
    (tmp_path / "own").mkdir()
    monkeypatch.chdir(tmp_path / "own")
    assert _optuna.identity(study) == before


def test_a_study_inside_of_a_trial_may_have_the_name_of_its_study() -> None:
    """Its trials are others, though their numbers are the same."""

    def outer(trial: optuna.Trial) -> float:
        inner = optuna.create_study(
            study_name="s", sampler=HermesSampler(devices="cpu:1"), pruner=HermesPruner()
        )
        inner.optimize(train, n_trials=2, n_jobs=2)
        return train(trial) + inner.best_value

    study = optuna.create_study(
        study_name="s", sampler=HermesSampler(devices="cpu:1"), pruner=HermesPruner()
    )
    study.optimize(outer, n_trials=2)
    assert [trial.value for trial in study.trials] == [1.0, 1.0]


def inside(queue: Any, name: str | None) -> None:
    inner = make_study(name=name)
    inner.optimize(train, n_trials=2)
    queue.put(inner.best_value)


@pytest.mark.parametrize("name", [None, "s"], ids=["other names", "one name"])
def test_a_study_in_a_process_of_a_trial_ends(name: str | None) -> None:
    """An objective may wait for a process that optimizes another study, whatever its name."""

    def outer(trial: optuna.Trial) -> float:
        queue = FORK.Queue()
        process = FORK.Process(target=inside, args=(queue, name))
        process.start()
        value = float(queue.get(timeout=60))
        process.join()
        return value

    study = make_study(name=name)
    study.optimize(outer, n_trials=1)
    assert study.trials[0].value == 0.5


def test_who_waits_says_for_what(
    monkeypatch: pytest.MonkeyPatch,
    optuna_logs: pytest.LogCaptureFixture,
    wait_for: Callable[..., Any],
) -> None:
    """A trial that has no device for some seconds names the one that has it."""
    monkeypatch.setattr("optuna_hermes._optuna._waiting.NOTICE_SECONDS", 0.5)
    monkeypatch.setattr("optuna_hermes._optuna._waiting.WARNING_SECONDS", 0.5)
    monkeypatch.setattr("optuna_hermes._optuna._waiting._notices._last", -1e9)
    monkeypatch.setattr("optuna_hermes._optuna._plain.IDLE_SECONDS", 1e6)
    optuna_logs.set_level(logging.INFO)
    study = make_study()
    first = study.ask()
    train(first)
    thread = threading.Thread(target=lambda: train(study.ask()))
    thread.start()
    # Not the first notice, perhaps: the first trial may have waited for a broker that starts,
    # and one that is slow to tell who has its devices is left out.
    words = f"Trial 1 of .* has waited .* cpu:0 has trial 0 of study {study.study_name!r}"
    wait_for(lambda: re.search(words, optuna_logs.text))
    study.tell(first, 1.0)
    thread.join()


def test_an_enqueued_trial_that_never_began_is_in_the_queue_again() -> None:
    """A mistyped policy, or a broker that cannot start, uses up no configuration."""
    sampler = HermesSampler(devices="cpu:1", policy="no-such-policy.py:Mine")
    study = optuna.create_study(sampler=sampler, pruner=HermesPruner())
    study.enqueue_trial({"x": 0.25})
    for _ in range(2):
        with pytest.raises(HermesError, match="no-such-policy"):
            study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
        assert [each.state for each in study.trials] == [TrialState.WAITING]
    study.sampler = HermesSampler(devices="cpu:1")
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
    assert [each.value for each in study.trials] == [0.25]


def test_ctrl_c_while_a_trial_waits_leaves_nothing_behind(
    wait_for: Callable[..., Any], tmp_path: Path
) -> None:
    """The trial that waited has failed, as in Optuna, and asks for no device any more.

    It had a heartbeat: another process would have found it dead.
    """
    url = f"sqlite:///{tmp_path / 'study.db'}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        storage = RDBStorage(url, heartbeat_interval=1)
    study = make_study(storage)

    def beats() -> list[int]:
        with closing(sqlite3.connect(tmp_path / "study.db")) as connection:
            rows = connection.execute("SELECT trial_id FROM trial_heartbeats").fetchall()
        return [id_ for (id_,) in rows]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        first = study.ask()  # Optuna warns that such a trial has no heartbeat
    train(first)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        wait_for(lambda: 1 in waiting())
        wait_for(lambda: study.trials[1]._trial_id in beats())
        signal.pthread_kill(main, signal.SIGINT)

    sessions.all()[0].thread = threading.Thread()  # as if another thread trained the first one
    sessions.all()[0].lazy = False
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        study.optimize(train, n_trials=1)
    thread.join()
    assert study.trials[1].state == TrialState.FAIL
    study.tell(first, 1.0)
    wait_for(is_free)
    assert len(sessions.all()) == 0


def test_a_script_that_keeps_a_trial_to_its_end_ends_quietly(storage_url: str) -> None:
    """The trial's last reference goes in the midst of the interpreter's end."""
    script = (
        "import optuna\n"
        "from optuna_hermes import HermesPruner, HermesSampler\n"
        "optuna.logging.set_verbosity(optuna.logging.WARNING)\n"
        f"study = optuna.create_study(storage={storage_url!r}, sampler=HermesSampler(), "
        "pruner=HermesPruner())\n"
        "trial = study.ask()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
