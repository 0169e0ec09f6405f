"""Messages to a study's user about problems, and their remedies."""

from __future__ import annotations

import contextlib
import functools
import pwd
import signal
import socket
import subprocess
import threading
import time
import types
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec
import optuna
import platformdirs
import pytest

from optuna_hermes import HermesPruner, HermesSampler, _optuna, optimize
from optuna_hermes._optuna import _local_ledgers, _retrying_storage
from optuna_hermes.broker._client import _journal
from optuna_hermes.cli import run
from optuna_hermes.errors import (
    BrokerError,
    CheckpointError,
    DatabaseOutageError,
    HermesError,
    InvalidInputError,
    ObjectiveError,
    StorageError,
    Suspended,
    SuspendError,
)
from optuna_hermes.ledger import TrialRecord, open_ledger
from optuna_hermes.suspend import read, write
from optuna_hermes.workers import (
    _driver,
    _fork_server,
    _once,
    _optimize,
    _taken,
    _worker,
    _worker_pool,
)
from optuna_hermes.workers._driver import Driver
from optuna_hermes.workers._optimize import OptimizeResult, TrialResult
from optuna_hermes.workers._settings import OptimizeSettings
from optuna_hermes.workers._worker_pool import ServerKilledError, WorkerPool
from support.disk_tier import DiskTier
from support.statuses import study_status
from support.tier_contract import Training


class Notes(list[str]):
    """A screen that keeps its lines."""

    def note(self, text: str) -> None:
        self.append(text)

    warn = note

    def close(self) -> None:
        pass


@pytest.fixture
def notes() -> Notes:
    return Notes()


def driver(notes: Notes) -> Driver:
    screen: Any = notes
    pool: Any = types.SimpleNamespace(began=0.0)
    return Driver(optuna.create_study(), pool, OptimizeSettings(), screen)


# -- optimize ----------------------------------------------------------------------------------


def test_a_study_in_memory_cannot_be_reached() -> None:
    """Worker processes need a database: one is named."""
    with pytest.raises(StorageError) as error:
        optimize(optuna.create_study(), lambda trial: 0.0, 1, show_progress=False)
    assert str(error.value) == (
        "optimize() trains in processes of their own and needs a storage that they can reach but "
        "this study is in memory: use create_study(storage='sqlite:///study.db', "
        "study_name='mine', load_if_exists=True)."
    )


@pytest.mark.parametrize("folder", ["", "{here}/"])
def test_a_folder_whose_name_python_cannot_decode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """As of an old file server, in Latin-1: a message to the broker could not hold it."""
    here = tmp_path / "st\udcfcdie"
    here.mkdir()
    monkeypatch.chdir(here)
    study = optuna.create_study(storage=f"sqlite:///{folder.format(here=here)}study.db")
    with pytest.raises(InvalidInputError, match="path of a storage must be text in the locale's"):
        optimize(study, lambda trial: 0.0, 1, devices="cpu:1", show_progress=False)


@pytest.mark.parametrize(
    ("message", "given"),
    [
        ("study must be an optuna.Study but got 'mine': make it", {"study": "mine"}),
        ("objective must be a function of a trial, .* but got 3.0: give", {"objective": 3.0}),
        ("objective must be .* but got None: give the function itself", {"objective": None}),
        ("callbacks must be a list .* but got <built-in function print>", {"callbacks": print}),
        ("callbacks must be .* but got \\('x',\\): write callbacks", {"callbacks": ["x"]}),
        ('must be given by its name but got .*: write "FILE.py:CLASS"', {"policy": Notes}),
    ],
)
def test_arguments_of_another_kind_are_named(
    storage_url: str, message: str, given: dict[str, Any]
) -> None:
    """Before any trial is opened, which would fail."""
    study = optuna.create_study(storage=storage_url)
    call = {"study": study, "objective": lambda trial: 0.0, "n_trials": 1, "devices": "cpu:1"}
    with pytest.raises(InvalidInputError, match=message):
        optimize(**{**call, **given}, show_progress=False)
    assert not study.trials


@pytest.mark.parametrize("given", [None, [print], (print,), iter([print])])
def test_callbacks(given: Any) -> None:
    """Any iterable of what can be called, or none."""
    assert _optimize._functions(given) == (() if given is None else (print,))


@pytest.mark.parametrize(
    ("name", "where"), [("s", ""), ("no-name-1f", " on the study named 'no-name-1f'")]
)
def test_an_early_end_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, notes: Notes, name: str, where: str
) -> None:
    """Suspended trials are counted, and the same call goes on; Optuna may have drawn the name."""
    trial = TrialResult(
        number=0, state="STORED", value=None, slices=1, suspensions=1, device_seconds=1.0, units=1
    )
    result = OptimizeResult(
        study=name,
        policy="hermes",
        devices=("cpu:0",),
        elapsed_seconds=1.0,
        device_seconds=1.0,
        spent_seconds=1.0,
        switches=0,
        overhead_fraction=0.0,
        overhead_seconds={},
        best=None,
        trials=(trial, trial),
    )
    monkeypatch.setattr(_optimize, "run_study", lambda *words: result)
    monkeypatch.setattr(_optimize, "start", lambda *words: contextlib.nullcontext())
    monkeypatch.setattr(_optimize, "make_progress", lambda show: notes)
    monkeypatch.setattr(_optimize, "_refuse_unshared", lambda study: None)
    optimize(optuna.create_study(), lambda trial: 0.0, 2)
    assert notes == [f"Stopped with 2 trials suspended: the same call{where} goes on with them."]
    lost = replace(trial, state="PENDING")
    not_begun = replace(lost, suspensions=0, units=0)
    ended_early = replace(result, trials=(trial, lost, not_begun))
    assert (result.begins_anew, ended_early.begins_anew) == (0, 1)
    assert ended_early.outlook == (
        "Stopped with 1 trial suspended and 1 trial to begin anew, without a checkpoint and "
        f"1 trial not begun: the same call{where} goes on with them."
    )
    ended = replace(result, problem="Trial 0: no checkpoint.")
    assert ended.outlook == "Stopped with 2 trials suspended."
    assert replace(ended, problem_may_pass=True).outlook == result.outlook


HOW = (
    "(Optuna stores none with a study): write study.pruner = HermesPruner() before optimize(), or "
    "HermesPruner(MedianPruner(...)) if it shall stop trials."
)


def test_a_pruner_that_would_stop_suspended_trials_is_refused(
    storage_url: str, notes: Notes
) -> None:
    """Before any of them is asked; one that is told not to stop any is taken."""
    study = optuna.create_study(storage=storage_url)
    _optuna.open_trial(study)
    with pytest.raises(InvalidInputError) as error:
        optimize(study, lambda trial: 0.0, 1, devices="cpu:1", show_progress=False)
    assert str(error.value) == (
        f"The study has 1 unfinished trial, which its pruner MedianPruner may stop for good {HOW}"
    )
    assert [trial.state.name for trial in study.trials] == ["RUNNING"]
    study.pruner = HermesPruner()
    _optimize._check_parts(study, notes)


def test_parts_of_a_study_that_know_of_no_turns_are_named(notes: Notes) -> None:
    """Those of a study that was just loaded, which are Optuna's own."""
    _optimize._check_parts(optuna.create_study(), notes)
    assert notes == [
        "The study's pruner MedianPruner stops trials for good, suspends none where they call "
        f"trial.should_prune(), and is refused once trials are suspended {HOW}",
        "The study's sampler TPESampler takes suspended trials for bad ones, or ignores them: "
        "write study.sampler = HermesSampler() before optimize(), or "
        "HermesSampler(TPESampler(...)).",
    ]


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("n_jobs", "the devices decide how many trials train at once, so leave it out"),
        ("catch", "a trial whose code raises is FAIL and the others go on, so leave it out"),
        ("gc_after_trial", "each trial has a process of its own, so leave it out"),
        ("show_progress_bar", "write show_progress"),
    ],
)
def test_options_that_only_optuna_has(name: str, instead: str) -> None:
    """A call is changed from ``study.optimize``: what has become of its other arguments."""
    given: dict[str, Any] = {name: 4}
    with pytest.raises(InvalidInputError) as error:
        optimize(optuna.create_study(), lambda trial: 0.0, 3, **given)
    assert str(error.value) == f"optimize() has no {name}: {instead}."


@pytest.mark.parametrize("pruner", [HermesPruner(), optuna.pruners.NopPruner()])
@pytest.mark.parametrize("sampler", [HermesSampler(), optuna.samplers.RandomSampler()])
def test_parts_of_a_study_that_do_no_harm_are_not_named(
    pruner: optuna.pruners.BasePruner, sampler: optuna.samplers.BaseSampler, notes: Notes
) -> None:
    """A pruner that stops nobody; a sampler that learns nothing, or is shown suspended trials."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        outer = optuna.samplers.PartialFixedSampler({}, sampler)
    _optimize._check_parts(optuna.create_study(pruner=pruner, sampler=outer), notes)
    several = optuna.create_study(directions=["minimize", "maximize"])
    _optimize._check_parts(several, notes)
    assert notes == []


class CountingSampler(optuna.samplers.RandomSampler):
    """It may learn from what it has counted."""


class CountingPruner(optuna.pruners.NopPruner):
    """Likewise."""


def test_parts_that_may_learn_in_themselves_are_named(notes: Notes) -> None:
    """Each trial has a copy of them, so what one has learned no other one knows."""
    sampler, pruner = HermesSampler(CountingSampler()), HermesPruner(CountingPruner())
    _optimize._check_parts(optuna.create_study(sampler=sampler, pruner=pruner), notes)
    assert notes == [
        f"Each trial has a copy of {kind} as it was when this call began. If it keeps what it "
        "learns in itself, and does not read it from the study, it learns nothing: run "
        "study.optimize() in place of optimize()."
        for kind in ("CountingSampler", "CountingPruner")
    ]


def test_a_study_that_cannot_be_sent_to_workers_is_refused() -> None:
    """The objective may have a lock where it is forked; sampler, pruner and storage may not."""
    study = optuna.create_study()
    study.sampler = sampler = HermesSampler()
    sampler.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(InvalidInputError) as error:
        _optuna.for_workers(study)
    assert str(error.value) == (
        "The study's sampler, pruner and storage must be picklable, since workers are other "
        "processes, but cannot pickle '_thread.lock' object. Create what cannot be (locks, open "
        "files) inside of their functions."
    )


def test_ctrl_c_says_what_a_second_one_does(notes: Notes) -> None:
    """The first suspends, the second ends."""
    running = driver(notes)
    running._stops.nothing_begun = False
    with running._stops.heeds_signals():
        signal.raise_signal(signal.SIGINT)
        assert running._should_stop(study_status())
        assert running._should_stop(study_status())
        assert notes == ["Suspending every live trial; press Ctrl-C again to end at once."]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.raise_signal(number)  # one Ctrl-C came twice, and others never end at once
        running._stops._signal_at -= 1.0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_while_the_objective_is_imported(notes: Notes) -> None:
    """Nothing was begun, which is said: there is nothing to go on with."""

    def wait(until: float) -> bool:
        raise KeyboardInterrupt

    pool: Any = types.SimpleNamespace(began=0.0, wait_until_ready=wait)
    screen: Any = notes
    running = Driver(optuna.create_study(), pool, OptimizeSettings(), screen)
    with pytest.raises(KeyboardInterrupt):
        running._is_imported()
    assert notes == ["Interrupted during the import of the objective: nothing was changed."]


def test_a_managers_signal_while_the_objective_is_imported(notes: Notes) -> None:
    """The call ends at once, and is to be made again."""

    def wait(until: float) -> bool:
        signal.raise_signal(signal.SIGUSR2)
        return True

    pool: Any = types.SimpleNamespace(began=0.0, wait_until_ready=wait)
    screen: Any = notes
    running = Driver(optuna.create_study(), pool, OptimizeSettings(), screen)
    with running._stops.heeds_signals():
        assert not running._is_imported()
    assert running._stops.from_outside
    assert notes == ["Interrupted during the import of the objective: nothing was changed."]


def test_a_study_of_another_process_while_the_objective_is_imported(
    notes: Notes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A signal ends the call, which does not say that the other's trials are suspended."""

    def wait(until: float) -> bool:
        signal.raise_signal(signal.SIGUSR2)
        return True

    seen = SimpleNamespace(study=lambda key: SimpleNamespace(driver_pid=7))
    monkeypatch.setattr(_taken, "broker_status", lambda **asked: seen)
    pool: Any = types.SimpleNamespace(began=0.0, wait_until_ready=wait)
    screen: Any = notes
    study = optuna.create_study(storage=f"sqlite:///{tmp_path}/s.db")
    _optuna.open_trial(study)
    result = Driver(study, pool, OptimizeSettings(), screen).run()
    assert result.outlook == "Stopped waiting: process 7 goes on with the study."
    assert [trial.state for trial in result.trials] == ["RUNNING"]


def test_brokers_that_end_at_once(
    notes: Notes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each is replaced with a word about it; after ten in a row its reason is the error."""

    def gone(role: str, devices: str, power: Any, on_silence: Any, as_before: Any) -> Any:
        raise BrokerError("It is gone.")

    monkeypatch.setattr(_driver, "connect_or_start", gone)
    study = optuna.create_study(storage=f"sqlite:///{tmp_path}/s.db")
    pool: Any = SimpleNamespace(began=0.0, has_job=True, status_of=lambda pid: None)
    screen: Any = notes
    running = Driver(study, pool, OptimizeSettings(), screen)
    with pytest.raises(BrokerError) as error:
        running._serve(SimpleNamespace(shared=False))  # type: ignore[arg-type]
    assert str(error.value) == (
        "It is gone. That was the 10th time in a row, so no other one is started."
    )
    assert notes == ["It is gone. Starting another one."] * 9


def test_fork_servers_that_are_killed_again_and_again(notes: Notes, tmp_path: Path) -> None:
    """Three are replaced with a word about it; then the error says how to go on."""

    def killed(until: float) -> bool:
        raise ServerKilledError("It has ended (SIGKILL)")

    pool: Any = SimpleNamespace(
        began=0.0,
        has_job=False,
        status_of=lambda pid: None,
        wait_until_ready=killed,
        restart=lambda study: True,
    )
    screen: Any = notes
    study = optuna.create_study(storage=f"sqlite:///{tmp_path}/s.db")
    running = Driver(study, pool, OptimizeSettings(), screen)
    ledger: Any = SimpleNamespace(shared=False, close=lambda: None)
    with pytest.raises(
        HermesError, match=r"^It has ended \(SIGKILL\): run the same command again\.$"
    ):
        running._serve(ledger)
    words = "It has ended (SIGKILL). Starting another one: trials go on from their checkpoints."
    assert notes == [words] * 3


def test_no_other_broker_is_started_once_the_call_is_to_end(
    notes: Notes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A signal, or the end of the call's time, is heeded while no broker comes."""
    ended: list[str] = []

    def gone(role: str, devices: str, power: Any, on_silence: Any, as_before: Any) -> Any:
        raise BrokerError("It did not listen.")

    monkeypatch.setattr(_driver, "connect_or_start", gone)
    study = optuna.create_study(storage=f"sqlite:///{tmp_path}/s.db")
    pool: Any = SimpleNamespace(
        began=0.0,
        has_job=True,
        status_of=lambda pid: None,
        kill_all=lambda: ended.append("all"),
    )
    screen: Any = notes
    running = Driver(study, pool, OptimizeSettings(timeout=0.001), screen)
    running._serve(SimpleNamespace(shared=False))  # type: ignore[arg-type]
    assert ended == ["all"]
    assert notes[-1] == "It did not listen. Not starting another one."


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (None, ": see above for the reason, then run"),
        (1, " (exit status 1): see above for the reason, then run"),
        (-9, " (SIGKILL, by the kernel, if memory has run out): run"),
        (-11, " (SIGSEGV): run"),
    ],
)
def test_a_fork_server_that_has_ended(status: int | None, words: str) -> None:
    """The error says that the reason is printed above, or by which signal it has ended."""

    def wait(timeout: float) -> None:
        if status is None:
            raise subprocess.TimeoutExpired("fork server", timeout)

    pool = WorkerPool.__new__(WorkerPool)
    pool._socket = types.SimpleNamespace(recv=lambda count: b"")  # type: ignore[assignment]
    pool._process = SimpleNamespace(wait=wait, returncode=status)  # type: ignore[assignment]
    with pytest.raises(HermesError) as error:
        pool._read()
    assert str(error.value) == (
        f"The process that workers are forked from has ended{words} the same command again."
    )


def test_a_fork_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed, and its workers with it: a call that is to end does."""
    monkeypatch.setattr(_worker_pool, "_KILLED_SECONDS", 0.01)
    killed: list[bool] = []
    pool = WorkerPool.__new__(WorkerPool)
    pool._alive, pool._asked = set(), 1
    pool._process = SimpleNamespace(kill=lambda: killed.append(True))  # type: ignore[assignment]
    pool._socket, other = socket.socketpair()
    with pool._socket, other, pytest.raises(HermesError) as error:
        pool.kill_all()
    assert killed
    assert str(error.value) == (
        "The process that workers are forked from does not answer, so it was killed: run the same "
        "command again."
    )


def test_an_objective_that_uses_a_gpu_at_its_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Code that must be moved is named before a worker is forked."""
    monkeypatch.setattr(_once, "used_accelerator", object)
    monkeypatch.setattr(_fork_server, "preload", lambda objective: None)
    with pytest.raises(ObjectiveError) as error:
        _fork_server._prepare(lambda: lambda trial: 0.0)
    assert str(error.value) == (
        "Importing the objective must not use an accelerator, since workers are forked after it: "
        "move what does into the objective."
    )


# -- workers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("of_device", [True, False], ids=["lost", "too small"])
def test_errors_that_are_the_device_s(
    of_device: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No trial fails for them: it goes on elsewhere, or with a device to itself."""

    def objective(trial: optuna.Trial) -> float:
        raise MemoryError("17 GiB")

    def leave(status: int) -> None:
        raise SystemExit(status)

    released: list[tuple[str, bool]] = []
    session: Any = types.SimpleNamespace(
        left=False,
        alone=False,
        release=lambda reason, outgrown: released.append((reason, outgrown)),
    )
    monkeypatch.setattr(_worker, "is_of_device", lambda error, devices: of_device)
    monkeypatch.setattr("os._exit", leave)
    study = optuna.create_study()
    execution = _worker._TrialExecution(None, study, session, None)  # type: ignore[arg-type]
    if of_device:
        with pytest.raises(SystemExit):
            execution._train(study.ask(), objective, None)  # type: ignore[arg-type]
        out = capsys.readouterr().out
        assert out == "Trial 0 goes on elsewhere: its device has failed.\n"
    else:
        execution._train(study.ask(), objective, None)  # type: ignore[arg-type]
        reason = "Trial 0 has outgrown its share of the device: 17 GiB"
        assert released == [(reason, True)]
    assert study.trials[0].state.name == "RUNNING"


def prunes(trial: optuna.Trial) -> float:
    raise optuna.TrialPruned


def ends_its_process(trial: optuna.Trial) -> float:
    raise SystemExit(1)


@pytest.mark.parametrize("then", [prunes, ends_its_process, lambda trial: float("inf")])
def test_an_objective_that_catches_a_suspension(
    then: Callable[[optuna.Trial], float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its trial is told nothing else, and the study's user what to write, once."""
    session: Any = types.SimpleNamespace(left=False)

    def objective(trial: optuna.Trial) -> float:
        session.left = True
        return then(trial)

    job: Any = types.SimpleNamespace(checkpoint_root=tmp_path)
    study = optuna.create_study()
    execution = _worker._TrialExecution(job, study, session, None)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(Suspended):
            execution._train(study.ask(), objective, None)  # type: ignore[arg-type]
    assert [trial.state.name for trial in study.trials] == ["RUNNING"] * 2
    said = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert said == [
        "Trial 0 is suspended and goes on later, but its objective has caught the exception by "
        "which it leaves its process: write `except Exception:` in place of `except:`, and no "
        "`return` in `finally:`."
    ]


class Proxy:
    """Asks for what is there in a request only, as Flask's ``current_app``."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise RuntimeError("Working outside of application context.")


APPLICATION = Proxy()
RESULTS: list[float] = []
SETTINGS = {"lr": 0.0}
best = 0.0


class Objective:
    """As people write it for one process."""

    def __init__(self) -> None:
        self.count = 0
        self.scores: list[float] = []
        self.trial: optuna.Trial | None = None
        self.rate: float | None = None

    def __call__(self, trial: optuna.Trial) -> float:
        global best
        assert APPLICATION is not None
        self.trial = self.present = trial
        SETTINGS["lr"] = SETTINGS["decay"] = best + 1.0
        self.rate = 1.0
        if trial.number:
            RESULTS.append(0.5)
            best = 0.5
            self.count += 1
            self.scores.append(0.5)
        if self.count > 1:
            raise Suspended("it goes on later")
        return 0.5


def test_what_a_trial_changes_in_its_script(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named once in a study, but for settings and objects that each trial sets itself."""
    session: Any = types.SimpleNamespace(left=False)
    job: Any = types.SimpleNamespace(checkpoint_root=tmp_path)
    study, objective = optuna.create_study(), Objective()
    execution = _worker._TrialExecution(job, study, session, None)  # type: ignore[arg-type]
    execution._run(study.ask(), objective)
    execution._run(study.ask(), objective)
    with pytest.raises(Suspended):
        execution._run(study.ask(), functools.partial(objective))
    said = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert said == [
        "Trial 1 changes RESULTS, best, self.count, self.scores in its own process: neither the "
        "script, nor the trial once it has come back from disk, has these changes. What is to "
        "be read later belongs into trial.set_user_attr(), a file or, in a loop, run.kept."
    ]


# -- checkpoints -------------------------------------------------------------------------------


def test_no_checkpoint_can_be_used(tmp_path: Path) -> None:
    """The error says what is wrong with each, and both ways out."""
    state = write(tmp_path, {"units": 1}, trial="trial 7", units=1)
    Path(state.path).unlink()
    with pytest.raises(CheckpointError) as error:
        read((state,), "trial 7", tmp_path)
    assert str(error.value) == (
        "No checkpoint of trial 7 can be used, and it is not started again in silence: "
        f"Checkpoint {state.path} of trial 7 cannot be read: No such file or directory. Bring such "
        "a file back, or close the trial: at its last value with `optuna-hermes finish NUMBER`, "
        "else with `optuna-hermes tell --trial-number NUMBER --state fail`."
    )


def test_a_trial_that_cannot_be_stored(tmp_path: Path) -> None:
    """It can still wait in memory."""
    state = Training()
    state.can_store = False
    with pytest.raises(SuspendError) as error:
        DiskTier(tmp_path, lambda: ()).suspend(state)
    assert str(error.value) == "Trial 7 cannot be stored from here: suspend it in memory."


# -- Optuna's storage --------------------------------------------------------------------------


def test_values_that_wait_longer_than_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial is not told before its values are written; what it waits for is said."""
    study = optuna.create_study()
    monkeypatch.setattr(_retrying_storage, "LONGEST_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(_retrying_storage, "flush_reports", lambda study, seconds: False)
    with pytest.raises(DatabaseOutageError) as error:
        _optuna.tell(study, study.ask(), 1.0, None)
    assert str(error.value) == (
        "The study's database does not answer: its last values wait for it. Bring it back, then "
        "run the same command again: nothing that was trained is lost."
    )
    assert study.trials[0].state.name == "RUNNING"


def test_values_in_a_file_that_is_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The file is named, and where the values can still be seen."""
    file = tmp_path / _journal.NAME
    file.write_bytes(msgspec.msgpack.encode({"unwritten": [["x", 1]]}))
    assert _journal.find(tmp_path) == _journal.Journal()
    assert caplog.messages == [
        f"{file} cannot be read, so units may be trained again, and `status` has values that "
        "Optuna misses: Expected `int`, got `str` - at `$.unwritten[0][0]`"
    ]


def test_a_study_that_is_not_there(tmp_path: Path) -> None:
    """The command that makes it is named, and what there is."""
    url = f"sqlite:///{tmp_path}/s.db"
    optuna.create_study(storage=url, study_name="digits")
    with pytest.raises(StorageError) as error:
        _optuna.load_study(url, "letters")
    assert str(error.value) == (
        f"No study 'letters' in {url} (there: 'digits'): create it with `optuna-hermes "
        f"create-study --storage {url} --study-name letters`."
    )


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (
            "nonsense",
            "cannot be used: no such file: make it, empty, for a journal, or give sqlite:",
        ),
        ("sqlite:////nowhere/s.db", "cannot be reached: .* whole, and you may read and write it"),
        ("oracle://u:pw@h/d", "cannot be used: .* Check the URL, and that what it needs is inst"),
    ],
)
def test_a_storage_that_is_not_there(url: str, words: str) -> None:
    """The error says what to check, and no password."""
    with pytest.raises(StorageError, match=f"^Storage .* {words}") as error:
        _optuna.load_study(url, "s")
    assert "pw" not in str(error.value)


@pytest.mark.parametrize("file", ["", "optuna-hermes", "optuna-hermes/ledgers"])
def test_a_state_folder_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """It and the variable that names another one are said, as for a daemon without a home."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "state" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "j.log"))
    study = optuna.create_study(storage=optuna.storages.JournalStorage(backend))
    with pytest.raises(StorageError, match=r"cannot be written \(.*\): set XDG_STATE_HOME"):
        _optuna.claim_ledger(study)


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As a container's, whose number is in no list of users."""

    def unknown(number: int) -> NoReturn:
        raise KeyError(number)

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(StorageError) as error:
        _optuna.state_dir()
    assert str(error.value) == (
        "A study without an SQLite file keeps its ledger or checkpoints in the user's home, and "
        "this user has none: set XDG_STATE_HOME to a folder that you may write to."
    )
    with monkeypatch.context() as older:
        older.setattr(platformdirs, "user_state_path", lambda name: Path("~/.local/state", name))
        with pytest.raises(StorageError, match="this user has none"):
            _optuna.state_dir()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert _optuna.state_dir() == tmp_path / "optuna-hermes"


@pytest.mark.parametrize("left", ["", "\n"])
def test_a_name_of_ledgers_that_was_not_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    """Another one is drawn, as after a full disk or a power cut: the study is claimed by it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = tmp_path / "optuna-hermes" / "ledgers" / "id"
    path.parent.mkdir(parents=True)
    path.write_text(left)
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "j.log"))
    study = optuna.create_study(storage=optuna.storages.JournalStorage(backend))
    _optuna.claim_ledger(study)
    assert study.user_attrs["hermes:ledger"] == path.read_text() != left
    assert [each.name for each in path.parent.iterdir()] == ["id"]


def test_a_name_of_ledgers_that_cannot_be_read_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, take_away: Callable[[Path], None]
) -> None:
    """No other one is drawn, by which the studies of the first would be another host's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = tmp_path / "optuna-hermes" / "ledgers" / "id"
    path.parent.mkdir(parents=True)
    path.write_text("n1:/home/ann 0a1b")
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "j.log"))
    study = optuna.create_study(storage=optuna.storages.JournalStorage(backend))
    take_away(path)
    with pytest.raises(StorageError, match=r"Stale file handle"):
        _optuna.claim_ledger(study)
    monkeypatch.undo()
    assert path.read_text() == "n1:/home/ann 0a1b"


def test_a_host_that_died_over_its_claim_is_waited_for_some_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are told how long; then the study is theirs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(_local_ledgers, "MEETING_SECONDS", 0.1)
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "j.log"))
    study = optuna.create_study(storage=optuna.storages.JournalStorage(backend))
    storage, id_ = study._storage, study._study_id
    storage.set_study_system_attr(id_, "hermes:ledger:n1:/home/ann 0a1b", time.time() - 500)
    with pytest.raises(StorageError, match=r"^n1:/home/ann claims study .* in 10 minutes"):
        _optuna.claim_ledger(study)
    storage.set_study_system_attr(id_, "hermes:ledger:n1:/home/ann 0a1b", time.time() - 700)
    _optuna.claim_ledger(study)
    assert study.user_attrs["hermes:ledger"]


def test_a_trial_that_somebody_else_finished() -> None:
    """It is named, so that the rest can be finished without it."""
    study = optuna.create_study()
    trial = study.ask()
    frozen = study.trials[0]
    study.tell(trial, 1.0)
    with pytest.raises(StorageError, match=r"^Trial 0 cannot be finished: .* Leave it out\.$"):
        _optuna.complete_trial(study, frozen, 2.0)


# -- the command line --------------------------------------------------------------------------


@pytest.fixture
def suspended(tmp_path: Path) -> Callable[..., int]:
    """``finish`` of a study with two trials: what was reported is in the second only."""
    url = f"sqlite:///{tmp_path}/s.db"
    study = optuna.create_study(storage=url, study_name="digits")
    for number in range(2):
        trial = _optuna.open_trial(study)
        if number:
            trial.report(1.0, 1)
    ledger = open_ledger(_optuna.ledger_url(study))
    ledger.save_trial(
        TrialRecord(study=_optuna.study_key(study), number=1, trial_id=1, state="stored")
    )
    ledger.close()

    def finish(*words: str) -> int:
        return run(["finish", "--storage", url, "--study-name", "digits", *words])

    return finish


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        ((), 2, "error: Name the trials to finish, or say --all for every suspended one.\n"),
        (("1", "--all"), 2, "error: Name the trials to finish, or say --all for every suspended"),
        (
            ("0", "1", "9"),
            2,
            "error: Nothing was finished: trial 0: nothing was reported: close it with "
            "`optuna-hermes tell --trial-number NUMBER --state fail`; trial 9: no such trial, see "
            "`optuna-hermes trials`.\n",
        ),
        (
            ("--all",),
            0,
            "Left as they are: trial 0: nothing was reported: close it with `optuna-hermes tell "
            "--trial-number NUMBER --state fail`.\n",
        ),
    ],
)
def test_what_finish_does_not_do(
    words: tuple[str, ...],
    status: int,
    told: str,
    suspended: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever is left as it is has a reason, and what can be done with it."""
    assert suspended(*words) == status
    assert capsys.readouterr().err.startswith(told)
