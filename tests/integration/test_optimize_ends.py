"""The end of a call of ``optimize`` whose workers do not end."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import psutil
import pytest

from optuna_hermes import HermesPruner, HermesSampler, _optuna, optimize, pruner
from optuna_hermes.errors import HermesError
from optuna_hermes.ledger import open_ledger
from optuna_hermes.pytorch import suspendable
from optuna_hermes.workers import _driver, _worker
from optuna_hermes.workers._optimize import OptimizeResult
from support.objectives import TRAINS_UNTIL_GO


@pytest.fixture
def study(storage_url: str) -> optuna.Study:
    return optuna.create_study(storage=storage_url, sampler=HermesSampler(), pruner=HermesPruner())


@pytest.fixture
def stop_when(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], bool]], None]:
    """``stop_when(condition)`` ends the call when a status of the study fulfils it."""

    def stop(condition: Callable[[Any], bool]) -> None:
        monkeypatch.setattr(_driver.Driver, "_should_stop", lambda self, mine: condition(mine))

    return stop


def run(study: optuna.Study, objective: Callable[[optuna.Trial], float]) -> OptimizeResult:
    return optimize(
        study, objective, n_trials=3, devices="cpu:1", slice_seconds=0.05, show_progress=False
    )


def test_a_worker_that_outlasts_the_call_is_ended_before_its_result_is_read(
    study: optuna.Study, stop_when: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A first batch that never ends leaves a trial to begin again, no process and no lease."""
    monkeypatch.setattr(_driver, "suspending_seconds", lambda grace_seconds: 0.2)
    mark = tmp_path / "pid"

    def endless(trial: optuna.Trial) -> float:
        mark.with_suffix(".new").write_text(str(os.getpid()))
        mark.with_suffix(".new").rename(mark)
        threading.Event().wait()
        return 0.0

    stop_when(lambda mine: mark.exists())
    result = run(study, endless)
    assert [trial.state for trial in result.trials] == ["PENDING"]
    assert result.unfinished == 1
    assert not psutil.pid_exists(int(mark.read_text()))
    ledger = open_ledger(_optuna.ledger_url(study))
    (known,) = ledger.load_trials(_optuna.study_key(study))
    (lease,) = ledger.load_leases()
    ledger.close()
    assert known.state == "pending"
    assert lease.ended is not None


class Closing:
    """An objective that has a tracker to close, also when its trial goes to disk."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder = folder
        self._seconds = seconds

    def __call__(self, trial: optuna.Trial) -> float:
        try:
            for _ in (run := suspendable(trial)).epochs(1_000_000):
                run.report(0.0)
            return 0.0
        finally:
            threading.Event().wait(self._seconds)
            (self._folder / f"closed-{trial.number}").touch()


def test_a_call_that_ends_waits_for_what_objectives_close(
    study: optuna.Study, stop_when: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As long as it would wait for trials to be suspended."""
    monkeypatch.setattr(_driver, "LEAVE_SECONDS", 0.1)
    stop_when(lambda mine: mine.best is not None)
    result = run(study, Closing(tmp_path, 1.0))
    stored = [trial.number for trial in result.trials if trial.state == "STORED"]
    assert stored
    assert all((tmp_path / f"closed-{number}").exists() for number in stored)


def test_what_is_not_closed_in_time_is_told(
    study: optuna.Study,
    stop_when: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """The trial is on disk all the same."""
    monkeypatch.setattr(_driver, "LEAVE_SECONDS", 0.1)
    monkeypatch.setattr(_driver, "suspending_seconds", lambda grace_seconds: 10.0)
    stop_when(lambda mine: mine.best is not None)
    result = run(study, Closing(tmp_path, 1_000_000.0))
    assert "STORED" in {trial.state for trial in result.trials}
    assert "had not left the objective in time" in caplog.text
    assert not any(tmp_path.glob("closed-*"))


@pytest.mark.parametrize("ends", ["exits", "hangs"])
def test_runs_of_wandb_end_with_their_trials(
    study: optuna.Study, stop_when: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ends: str
) -> None:
    """As at Python's exit, which there is none of; only an error of the objective is a failure."""
    monkeypatch.setattr(_worker, "_WANDB_SECONDS", 0.2)

    def logs(trial: optuna.Trial) -> float:
        file = (tmp_path / f"{trial.number}").open("a")

        def teardown(code: int) -> None:
            print(code, file=file, flush=True)
            if ends == "exits":
                sys.exit(2)
            threading.Event().wait()

        setup = SimpleNamespace(_singleton=SimpleNamespace(_pid=os.getpid()))
        sys.modules["wandb"] = SimpleNamespace(teardown=teardown)  # type: ignore[assignment]
        sys.modules["wandb.sdk.wandb_setup"] = setup  # type: ignore[assignment]
        for _ in (run := suspendable(trial)).epochs(1_000_000):
            run.report(0.0)
            if is_short and trial.number == 1:
                raise ValueError("no good")
            if is_short:
                break
        return 0.0

    is_short = False
    stop_when(lambda mine: mine.best is not None)
    first = run(study, logs)
    assert "STORED" in {trial.state for trial in first.trials}
    is_short = True
    stop_when(lambda mine: False)
    run(study, logs)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL", "COMPLETE"]
    codes = [(tmp_path / f"{number}").read_text().split() for number in range(3)]
    assert [each[-1] for each in codes] == ["0", "1", "0"]
    assert {code for each in codes for code in each[:-1]} <= {"0"}


def test_a_run_of_wandb_that_the_script_has_begun_goes_on(
    study: optuna.Study, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Trials inherit it, and do not end it."""
    torn = tmp_path / "torn"
    setup = SimpleNamespace(_singleton=SimpleNamespace(_pid=os.getpid()))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(teardown=lambda code: torn.touch()))
    monkeypatch.setitem(sys.modules, "wandb.sdk.wandb_setup", setup)
    run(study, lambda trial: 0.0)
    assert not torn.exists()


def test_processes_of_joblib_end_with_their_trials(study: optuna.Study, tmp_path: Path) -> None:
    """As scikit-learn starts them for ``n_jobs``; each trial has its own."""
    joblib = pytest.importorskip("joblib")

    def begins_a_pool(trial: optuna.Trial) -> float:
        pids = joblib.Parallel(n_jobs=2)(joblib.delayed(os.getpid)() for _ in range(2))
        (tmp_path / f"pids-{trial.number}").write_text(" ".join(map(str, pids)))
        return 0.0

    run(study, begins_a_pool)
    pids = [int(pid) for each in tmp_path.glob("pids-*") for pid in each.read_text().split()]
    assert len(pids) == 6
    assert not any(map(psutil.pid_exists, pids))


# A process that is forked from this one takes warnings for errors, too.
@pytest.mark.filterwarnings("ignore:The reported value is ignored")
def test_a_trial_that_can_only_wait_in_memory_begins_again(
    study: optuna.Study, stop_when: Any, tmp_path: Path
) -> None:
    """The end of the call is the end of its process, and the result says what that leaves."""
    mark = tmp_path / "short"

    def forgetful(trial: optuna.Trial) -> float:
        for unit in range(1, 3 if mark.exists() else 1_000_000):
            trial.report(1 / unit, unit)
            if trial.should_prune():
                raise optuna.TrialPruned
        return 0.0

    stop_when(lambda mine: mine.counts.parked > 0)
    first = run(study, forgetful)
    assert {trial.state for trial in first.trials} == {"PENDING"}
    begun = sum(trial.units > 0 for trial in first.trials)
    assert begun
    assert f" and {begun} trial{'s' * (begun > 1)} to begin anew, without a checkp" in first.outlook
    mark.touch()
    stop_when(lambda mine: False)
    again = run(study, forgetful)
    assert [trial.state for trial in again.trials] == ["COMPLETE"] * 3


def test_a_loop_over_a_generator_is_warned_of(
    study: optuna.Study, stop_when: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The console says once that no checkpoint is made, and the log of each trial."""

    def endless(trial: optuna.Trial) -> float:
        logging.getLogger().handlers.clear()  # those of pytest
        run = suspendable(trial)
        for _ in run.epochs(1_000_000):
            for _ in run.batches(iter([1.0, 2.0])):
                pass
            run.report(1.0)
        return 0.0

    stop_when(lambda mine: mine.counts.parked > 1)
    result = run(study, endless)
    assert "to begin anew, without a checkpoint" in result.outlook
    assert capfd.readouterr().err.count("can only wait in memory: its loader") == 1
    logs = [path.read_text() for path in tmp_path.rglob("output.log")]
    assert sum("can only wait in memory: its loader" in text for text in logs) > 1


# As above.
@pytest.mark.filterwarnings("ignore:The reported value is ignored")
def test_a_long_trial_that_only_reports_is_warned_of(
    study: optuna.Study,
    stop_when: Any,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The console says once that it has no checkpoint; most trials are too short to lose much."""

    def endless(trial: optuna.Trial, long_seconds: float = 0.0) -> float:
        pruner.LONG_SECONDS = long_seconds  # here: the process may be a new Python's
        for step in itertools.count():
            trial.report(1.0, step)
            trial.should_prune()
        return 0.0

    stop_when(lambda mine: mine.counts.parked > 1)
    run(study, partial(endless, long_seconds=pruner.LONG_SECONDS))
    assert "can only wait in memory" not in capfd.readouterr().err
    run(study, endless)
    assert capfd.readouterr().err.count("can only wait in memory: it only calls trial") == 1


def test_an_objective_that_catches_all(study: optuna.Study, stop_when: Any, tmp_path: Path) -> None:
    """Its trials are suspended all the same, not pruned, and go on with the next call."""
    mark = tmp_path / "short"

    def careless(trial: optuna.Trial) -> float:
        run = suspendable(trial)
        try:
            for _ in run.epochs(3 if mark.exists() else 1_000_000):
                run.report(1.0)
        except:  # noqa: E722
            raise optuna.TrialPruned from None
        return 0.0

    stop_when(lambda mine: mine.counts.parked > 0)
    first = run(study, careless)
    assert "STORED" in {trial.state for trial in first.trials}
    assert {trial.state.name for trial in study.trials} == {"RUNNING"}
    mark.touch()
    stop_when(lambda mine: False)
    assert [trial.state for trial in run(study, careless).trials] == ["COMPLETE"] * 3


def test_an_alarm_stands_still_while_its_trial_waits(study: optuna.Study) -> None:
    """Scripts limit by it how long a trial may train; three trials share a device here."""

    def limited(trial: optuna.Trial) -> float:
        run = suspendable(trial)
        began = None
        for _ in run.epochs(1000):
            if began is None and len(trial.study.get_trials(deepcopy=False)) == 3:
                began = time.monotonic()  # from here on they wait for each other
                signal.setitimer(signal.ITIMER_REAL, 1000.0)
            threading.Event().wait(0.1)
            run.report(0.0)
            if began is not None and time.monotonic() > began + 2.0:
                break
        assert began is not None
        gone = 1000.0 - signal.setitimer(signal.ITIMER_REAL, 0.0)[0]
        return gone / (time.monotonic() - began)

    call = partial(optimize, study, limited, policy="round-robin", slice_seconds=0.05)
    result = call(n_trials=3, devices="cpu:1", show_progress=False)
    assert [trial.state for trial in result.trials] == ["COMPLETE"] * 3
    assert 0.0 < min(trial.value for trial in study.trials) < 0.7


def leaves(trial: optuna.Trial) -> float:
    sys.exit("no data")


def offers_others(trial: optuna.Trial) -> float:
    return float(trial.suggest_categorical("way", ["a", "b", "c"]) == "c")


def test_a_script_that_raises_before_a_suspended_trial_goes_on(
    study: optuna.Study, stop_when: Any, tmp_path: Path
) -> None:
    """The study ends with the error and the trial is as it was; it goes on once that is mended.

    What it is first suggested then is drawn anew.
    """
    mark = tmp_path / "short"

    def objective(trial: optuna.Trial) -> float:
        x = trial.suggest_float("x", 0, 1)
        trial.suggest_categorical("way", ["a", "b"])
        run = suspendable(trial)
        for epoch in run.epochs(1_000_000):
            run.report(x)
            if epoch == 3 and not mark.exists():
                mark.touch()
            elif epoch > 3 and trial.user_attrs.get("resumes"):
                break
        trial.suggest_float("later", 0, 1)
        return x

    def call(objective: Callable[[optuna.Trial], float]) -> OptimizeResult:
        return optimize(study, objective, n_trials=1, devices="cpu:1", show_progress=False)

    stop_when(lambda mine: mark.exists())
    assert [trial.state for trial in call(objective).trials] == ["STORED"]
    stop_when(lambda mine: False)
    for wrong, reason in ((leaves, "no data"), (offers_others, "dynamic value space")):
        with pytest.raises(HermesError, match=f"Trial 0 was suspended.*{reason}.*mend that"):
            call(wrong)
        assert [trial.state.name for trial in study.trials] == ["RUNNING"]
    study._storage.set_trial_user_attr(study.trials[0]._trial_id, "resumes", True)
    assert [trial.state for trial in call(objective).trials] == ["COMPLETE"]
    (params,) = [trial.params for trial in study.trials]
    assert params["x"] != params["later"]


def test_a_trial_that_raises_before_it_goes_on_does_not_keep_others_from_it(
    study: optuna.Study, stop_when: Any, tmp_path: Path
) -> None:
    """It stays suspended, and the other one is trained."""
    mark = tmp_path / "mended"

    def objective(trial: optuna.Trial) -> float:
        if mark.exists() and trial.number == 0:
            sys.exit("no data")
        run = suspendable(trial)
        for _ in run.epochs(1_000_000):
            run.report(1.0)
            if mark.exists():  # it has trained in this call
                break
        return 0.0

    def call() -> list[str]:
        ended = optimize(
            study, objective, n_trials=2, devices="cpu:1", slice_seconds=0.05, show_progress=False
        )
        return [trial.state for trial in ended.trials]

    stop_when(lambda mine: mine.counts.parked > 0)
    assert call() == ["STORED", "STORED"]
    mark.touch()
    stop_when(lambda mine: mine.counts.done == 1)
    assert call() == ["STORED", "COMPLETE"]


@pytest.fixture
def proxy_port(storage_url: str) -> Iterator[int]:
    """The port of a gRPC proxy before an SQLite file."""
    pytest.importorskip("grpc")
    from optuna.storages._grpc.server import make_server

    server = make_server(optuna.storages.get_storage(storage_url), "localhost", 0)
    port: int = server.add_insecure_port("localhost:0")
    server.start()
    yield port
    server.stop(0).wait()


@pytest.mark.parametrize(
    ("again", "go", "proxied"),
    [(False, True, False), (True, True, False), (True, False, False), (True, True, True)],
)
def test_a_study_that_is_deleted_while_it_is_trained(
    again: bool,
    go: bool,
    proxied: bool,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    storage_url: str,
    start_cli: Callable[..., Any],
    without_torch: dict[str, str],
    wait_for: Callable[..., Any],
) -> None:
    """The call ends with one line; trials of a study that has its ids by then are left as they are.

    So it is behind a gRPC proxy, too.
    """
    (tmp_path / "train.py").write_text(TRAINS_UNTIL_GO)
    port = request.getfixturevalue("proxy_port") if proxied else 0
    url = f"grpc://localhost:{port}" if proxied else storage_url
    place = ("--storage", url, "--study-name", "s", "--devices", "cpu:2")
    call = start_cli("optimize", "train.py:objective", *place, "--n-trials", 8, env=without_torch)
    wait_for(lambda: len([*tmp_path.glob("begun-*")]) >= 2, 120)
    study = optuna.load_study(study_name="s", storage=storage_url)
    wait_for(lambda: all(trial.params for trial in study.trials))  # what is suggested is written
    optuna.delete_study(study_name="s", storage=storage_url)
    if again:
        other = optuna.create_study(study_name="s", storage=storage_url)
        asked = {other.ask()._trial_id for _ in range(2)}
    if go:
        (tmp_path / "go").touch()
    ended = call.wait()
    assert ended.returncode == 2, ended.stderr
    assert "error: Study s was deleted while it ran: make it anew" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert optuna.get_all_study_names(storage_url) == ["s"] * again
    if again:
        # A trial that was opened during the deletion may have outlasted it, as it does in Optuna.
        trials = [trial for trial in other.trials if trial._trial_id in asked]
        assert [(trial.state.name, trial.params) for trial in trials] == [("RUNNING", {})] * 2
        assert len(other.trials) <= 3  # one is opened at a time
