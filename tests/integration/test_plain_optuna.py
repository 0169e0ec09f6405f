"""Plain ``study.optimize`` with the sampler and the pruner alone, on a real broker."""

from __future__ import annotations

import gc
import json
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import optuna
import pytest

from optuna_hermes import HermesPruner, HermesSampler, _optuna, upkeep
from optuna_hermes.broker import connect
from optuna_hermes.broker._client import _reconnecting
from optuna_hermes.broker._protocol import SetOverrides
from optuna_hermes.cli import run
from optuna_hermes.cli._top import StudySource
from optuna_hermes.errors import BrokerError, InvalidInputError, UnsupportedPrunerError
from optuna_hermes.ledger import open_ledger
from optuna_hermes.model import MOST_COUNT
from optuna_hermes.view._web._source import PageReader

optuna.logging.set_verbosity(optuna.logging.WARNING)


class Gauge:
    """Counts how many objectives train at once."""

    def __init__(self) -> None:
        self.peak = 0
        self._busy = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self._busy += 1
            self.peak = max(self.peak, self._busy)

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._busy -= 1


def train(seconds: float) -> None:
    """Take device time, as a kernel does, so that slices end in the middle of trials."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


def make_study(storage: str | None, **sampler: object) -> optuna.Study:
    return optuna.create_study(
        storage=storage,
        sampler=HermesSampler(devices="cpu:2", slice_seconds=0.1, **sampler),  # type: ignore[arg-type]
        pruner=HermesPruner(),
    )


def objective_with(gauge: Gauge, units: int = 6):  # type: ignore[no-untyped-def]
    def objective(trial: optuna.Trial) -> float:
        x = trial.suggest_float("x", -5, 5)
        value = 0.0
        for unit in range(1, units + 1):
            with gauge:
                train(0.05)
            value = (x - 1) ** 2 + 1 / unit
            trial.report(value, unit)
            if trial.should_prune():
                raise optuna.TrialPruned
        return value

    return objective


def test_a_trial_that_two_threads_take_from_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them trains it, and the other one the next: SQLite gives it to both."""
    study = make_study(f"sqlite:///{tmp_path / 'study.db'}")
    study.enqueue_trial({"x": 3.0}, user_attrs={"queued": True})
    pop = optuna.Study._pop_waiting_trial_id
    taken = pop(study)
    both, popped = threading.Barrier(2), iter(range(2))

    def pop_twice(own: optuna.Study) -> int | None:
        if next(popped, None) is None:
            return pop(own)
        both.wait(timeout=30)
        return taken

    monkeypatch.setattr(optuna.Study, "_pop_waiting_trial_id", pop_twice)
    trained: list[int] = []
    told: list[int] = []

    def objective(trial: optuna.Trial) -> float:
        trained.append(trial.number)
        assert trial.user_attrs.get("queued") is (True if trial.number == 0 else None)
        return objective_with(Gauge(), units=3)(trial)

    study.optimize(
        objective,
        n_trials=3,
        n_jobs=2,
        callbacks=[lambda _, trial: told.append(trial.number)],
    )
    assert sorted(trained) == sorted(told) == [0, 1, 2]
    assert study.trials[0].params == {"x": 3.0}
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 3


@pytest.mark.parametrize(
    ("pruned", "state"), [(False, "RUNNING"), (False, "COMPLETE"), (True, "RUNNING")]
)
def test_a_trial_that_is_taken_from_the_queue_after_its_end(
    pruned: bool,
    state: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A thread that saw it wait, and sets it to RUNNING as late as that, loses no result.

    Nor does one that set it just before, and begins with it now.
    """
    url = f"sqlite:///{tmp_path / 'study.db'}"
    study = make_study(url)
    study.enqueue_trial({"x": 3.0})

    def objective(trial: optuna.Trial) -> float:
        value = objective_with(Gauge(), units=2)(trial)
        if pruned and trial.number == 0:
            raise optuna.TrialPruned
        return value

    study.optimize(objective, n_trials=1)
    first = study.trials[0]
    assert first.user_attrs["hermes:state"] == "done"
    with closing(sqlite3.connect(tmp_path / "study.db")) as database, database:
        database.execute("UPDATE trials SET state = ?", (state,))
    late = [first._trial_id]
    monkeypatch.setattr(
        optuna.Study, "_pop_waiting_trial_id", lambda self: late.pop() if late else None
    )
    again = optuna.load_study(
        study_name=study.study_name, storage=url, sampler=study.sampler, pruner=study.pruner
    )
    again.optimize(objective, n_trials=1)
    kept, other = again.trials
    assert (kept.state, kept.values, kept.user_attrs) == (
        first.state,
        first.values,
        first.user_attrs,
    )
    assert other.state.name == "COMPLETE"
    assert "Trial 0 had been taken from the queue before: another one is begun." in caplog.text


@pytest.mark.parametrize(
    "policy", ["hermes", "fifo", pytest.param("round-robin", marks=pytest.mark.slow)]
)
def test_never_more_objectives_train_than_there_are_devices(storage_url: str, policy: str) -> None:
    """Twelve trials in six threads on two devices: at most two train at once, all complete."""
    gauge = Gauge()
    study = make_study(storage_url, policy=policy)
    study.optimize(objective_with(gauge), n_trials=12, n_jobs=6)
    assert gauge.peak == 2
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 12
    leases = open_ledger(_optuna.ledger_url(study)).load_leases()
    assert all(lease.ended is not None for lease in leases)
    assert policy == "fifo" or len(leases) > 12, "some trial was suspended and came back"


def test_a_study_in_memory_keeps_its_ledger_in_a_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    runtime_dir: Path,
    wait_for: Callable[..., Any],
) -> None:
    """It is removed with the study's storage, by the broker, which still has it open then."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    study, other = make_study(None), make_study(None)
    for each in (study, other):
        each.optimize(objective_with(Gauge(), units=2), n_trials=3)
        assert len(each.trials) == 3
    kept = Path(_optuna.ledger_url(other).removeprefix("sqlite:///"))
    assert len(list(kept.parent.glob("*.db"))) == 2
    del study, each
    gc.collect()
    wait_for(lambda: sorted(kept.parent.iterdir()) == [kept, Path(f"{kept}.hermes")])
    assert "cannot be used" not in (runtime_dir / "broker.log").read_text()


def test_a_ledger_of_a_study_in_memory_ends_with_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_for: Callable[..., Any]
) -> None:
    """It is that of the process which made it: the end of a child of a fork changes nothing."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    script = (
        "import os, sys, optuna\n"
        "from pathlib import Path\n"
        "from optuna_hermes import HermesPruner, HermesSampler, _optuna\n"
        "sampler = HermesSampler(devices='cpu:1')\n"
        "study = optuna.create_study(sampler=sampler, pruner=HermesPruner())\n"
        "study.optimize(lambda trial: trial.suggest_float('x', 0, 1), n_trials=1)\n"
        "if os.fork() == 0: sys.exit()\n"
        "assert os.wait()[1] == 0\n"
        "assert Path(_optuna.ledger_url(study).removeprefix('sqlite:///')).exists()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wait_for(lambda: not any((tmp_path / "optuna-hermes" / "ledgers").iterdir()))


def test_a_trial_that_reports_nothing_has_only_its_own_attributes(storage_url: str) -> None:
    """State and device time are noted of a trial that can be suspended, and of no other one."""
    study = make_study(storage_url)
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
    study.optimize(objective_with(Gauge(), units=1), n_trials=1)
    silent, reports = study.trials
    assert silent.user_attrs == {}
    assert reports.user_attrs["hermes:state"] == "done"


def test_maximised_values_are_turned_round(storage_url: str, wait_for: Callable[..., Any]) -> None:
    """The broker sees lower-is-better values, its status shows the user's own."""
    study = optuna.create_study(
        storage=storage_url,
        direction="maximize",
        sampler=HermesSampler(devices="cpu:1"),
        pruner=HermesPruner(),
    )
    trial = study.ask()
    trial.report(0.75, 1)
    assert not trial.should_prune()
    watcher = connect("viewer")
    shown = watcher.ask_status().studies[0]
    watcher.close()
    study.tell(trial, 0.75)
    assert shown.trials[0].value == 0.75
    ledger = open_ledger(_optuna.ledger_url(study))
    curves = wait_for(lambda: ledger.load_curves(_optuna.study_key(study)))  # reports may wait
    assert curves[0].values == (-0.75,)


def test_steps_may_be_larger_than_what_a_message_holds(
    storage_url: str, wait_for: Callable[..., Any]
) -> None:
    """A trial that reports at the time in nanoseconds takes its turns like others, and ends."""

    def timed(trial: optuna.Trial) -> float:
        for value in (0.75, 0.5):
            trial.report(value, time.time_ns())
            assert not trial.should_prune()
        return 0.5

    study = make_study(storage_url)
    study.optimize(timed, n_trials=2)
    ledger, key = open_ledger(_optuna.ledger_url(study)), _optuna.study_key(study)
    wait_for(lambda: [each.units for each in ledger.load_curves(key).values()] == [2, 2])
    curves = ledger.load_curves(key)
    assert {curve.values for curve in curves.values()} == {(0.75, 0.5)}
    assert {curve.steps for curve in curves.values()} == {(MOST_COUNT, MOST_COUNT)}


def test_a_copy_of_a_study_that_trains_is_another_study(
    tmp_path: Path, storage_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both have one key: the copy's values do not reach the original, nor does what is wanted."""
    reported, may_end = threading.Event(), threading.Event()

    def objective(trial: optuna.Trial) -> float:
        trial.report(0.5, 1)
        assert not trial.should_prune()
        reported.set()
        assert may_end.wait(60)
        return 0.5

    study = make_study(storage_url)
    pool = ThreadPoolExecutor(1)
    training = pool.submit(study.optimize, objective, n_trials=1)
    assert reported.wait(60)
    file = tmp_path / "copy.db"
    with (
        closing(sqlite3.connect(tmp_path / "study.db")) as it,
        closing(sqlite3.connect(file)) as to,
    ):
        it.backup(to)
    copy = optuna.load_study(
        study_name=study.study_name,
        storage=f"sqlite:///{file}",
        sampler=study.sampler,
        pruner=study.pruner,
    )
    key = _optuna.study_key(copy)
    assert key == _optuna.study_key(study)
    with closing(open_ledger(_optuna.ledger_url(copy))) as ledger:
        upkeep.want(copy, ledger, SetOverrides(study=key, numbers=(0,), override="held"))
        assert ledger.load_overrides(key) == {0: "held"}
    # What is shown of it is its own, and no key of `top` reaches the original.
    with closing(StudySource(f"sqlite:///{file}", study.study_name)) as source:
        for _ in range(2):
            picture = source.look("")
            assert picture.read_only
            assert [trial.state for trial in picture.trials] == ["pending"]
    with closing(PageReader(study.study_name, lambda: _optuna.facts(copy))) as pages:
        for _ in range(2):
            page = pages.look()
            assert page["live"]["is"] == "still"
            holders = [each["holder"] for each in page["devices"] if each["holder"]]
            assert [each["own"] for each in holders] == [False]
    capsys.readouterr()
    named = ["--storage", f"sqlite:///{file}", "--study-name", study.study_name, "--json"]
    assert run(["status", *named]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["study"]["counts"] == {"pending": 1}
    assert [each["key"] == key for each in shown["broker"]["studies"]] == [False]
    assert run(["status", "0", *named]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "pending"
    with pytest.raises(BrokerError, match=r"copy\.db has that of .* it serves in .*study\.db"):
        copy.optimize(objective, n_trials=1)
    may_end.set()
    training.result(60)
    assert [trial.value for trial in study.trials] == [0.5]
    with closing(open_ledger(_optuna.ledger_url(study))) as ledger:
        assert ledger.load_overrides(key) == {}
        assert [trial.number for trial in ledger.load_trials(key)] == [0]
    copy.optimize(lambda trial: 0.25, n_trials=1)
    assert copy.trials[-1].value == 0.25


def test_a_trial_outlives_its_broker(storage_url: str, runtime_dir: Path) -> None:
    """A trial whose broker is killed waits for the next one's turn and goes on."""
    study = make_study(storage_url)
    trial = study.ask()
    assert not trial.should_prune()  # its first turn
    watcher = connect("viewer")
    os.kill(watcher.welcome.pid, signal.SIGKILL)
    with pytest.raises(BrokerError):
        watcher.receive()
    watcher.close()
    trial.report(0.5, 1)
    assert not trial.should_prune()
    trial.report(0.4, 2)
    assert not trial.should_prune()
    study.tell(trial, 0.4)
    assert study.best_value == 0.4


def test_without_the_pruner_the_sampler_only_samples(storage_url: str, runtime_dir: Path) -> None:
    """With another pruner nothing waits, and no broker is started."""
    study = optuna.create_study(storage=storage_url, sampler=HermesSampler())
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=3)
    assert not list(runtime_dir.iterdir())


def test_a_wrapped_pruner_still_stops_trials(storage_url: str) -> None:
    """The answer of ``should_prune`` is the wrapped pruner's."""
    study = optuna.create_study(
        storage=storage_url,
        sampler=HermesSampler(devices="cpu:1"),
        pruner=HermesPruner(optuna.pruners.ThresholdPruner(upper=1.0)),
    )
    trial = study.ask()
    trial.report(2.0, 1)
    assert trial.should_prune()
    study.tell(trial, state=optuna.trial.TrialState.PRUNED)


@pytest.mark.parametrize("given", [optuna.pruners.MedianPruner, "median"])
def test_what_is_no_pruner_is_refused(given: Any) -> None:
    """At once: it would make one trial after another fail."""
    with pytest.raises(InvalidInputError, match="wrapped must be a pruner of Optuna or None"):
        HermesPruner(given)


def test_hyperband_is_refused() -> None:
    """Wrapping HyperbandPruner would silently break its brackets."""
    with pytest.raises(UnsupportedPrunerError, match="bracket"):
        HermesPruner(optuna.pruners.HyperbandPruner())


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_pruner_whose_steps_are_instances_is_refused() -> None:
    """Trials would be compared by their instance of the highest number, also inside of patience."""
    pruner = optuna.pruners.WilcoxonPruner()
    for wrapped in (pruner, optuna.pruners.PatientPruner(pruner, patience=1)):
        with pytest.raises(UnsupportedPrunerError, match="its steps are instances"):
            HermesPruner(wrapped)


def test_a_value_is_reported_once(storage_url: str) -> None:
    """However often a trial asks after it: each row would count as a unit, and cost a wait."""

    def objective(trial: optuna.Trial) -> float:
        for unit in (1, 2):
            trial.report(1 / unit, unit)
            assert not any(trial.should_prune() for _ in range(3))
        trial.report(7.0, 2)  # Optuna ignores it
        assert not trial.should_prune()
        return 0.5

    with pytest.warns(UserWarning, match="already reported"):
        (study := make_study(storage_url)).optimize(objective, n_trials=1)
    with closing(open_ledger(_optuna.ledger_url(study))) as ledger:
        key = _optuna.study_key(study)
        assert [trial.units for trial in ledger.load_trials(key)] == [2]
        assert [report.unit for _, report in ledger.load_reports(key)] == [1, 2]


def test_a_study_in_memory_goes_on_where_it_was_pickled() -> None:
    """Trials that its original has trained since are none of it."""
    study = make_study(None)
    study.optimize(objective_with(Gauge(), units=1), n_trials=1)
    pickled = pickle.dumps(study)
    study.optimize(objective_with(Gauge(), units=1), n_trials=1)
    (loaded := pickle.loads(pickled)).optimize(objective_with(Gauge(), units=1), n_trials=2)
    assert [trial.state.name for trial in loaded.trials] == ["COMPLETE"] * 3


def test_a_trial_that_ends_without_any_broker_keeps_no_device(
    storage_url: str, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process goes on and tells the next broker, which has waited for it, before it asks."""
    monkeypatch.setattr(_reconnecting, "BROKER_SEARCH_SECONDS", 0.3)
    study = optuna.create_study(
        storage=storage_url,
        sampler=HermesSampler(devices="cpu:1"),
        pruner=HermesPruner(),
    )

    def objective(trial: optuna.Trial) -> float:
        trial.report(0.5, 1)
        trial.should_prune()
        if trial.number == 0:
            os.kill(json.loads((runtime_dir / "broker.json").read_text())["pid"], signal.SIGKILL)
            runtime_dir.chmod(0o755)  # no broker starts there
        return 1.0

    def open_again(study: optuna.Study, trial: Any) -> None:
        runtime_dir.chmod(0o700)

    thread = threading.Thread(
        target=lambda: study.optimize(objective, n_trials=2, callbacks=[open_again]), daemon=True
    )
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the second trial waits for a device that nobody uses"
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 2
    ledger = open_ledger(_optuna.ledger_url(study))
    assert [(run.state, run.units) for run in ledger.load_trials(_optuna.study_key(study))] == [
        ("done", 1)
    ] * 2
    assert ledger.load_leases(_optuna.study_key(study), live=True) == []
    ledger.close()


def test_a_policy_that_raises_ends_a_plain_study_with_its_words(
    storage_url: str, tmp_path: Path
) -> None:
    """Its trials would wait for ever, for there is no driver that would tell of it."""
    (tmp_path / "mine.py").write_text(
        "from optuna_hermes.policies import Fifo\n\n\n"
        "class Mine(Fifo):\n"
        "    def decide(self, snapshot):\n"
        "        if any(trial.curve.units for trial in snapshot.trials):\n"
        "            raise RuntimeError('no idea')\n"
        "        return super().decide(snapshot)\n"
    )
    study = make_study(storage_url, policy=f"{tmp_path}/mine.py:Mine")
    with pytest.raises(BrokerError, match="no idea"):
        study.optimize(objective_with(Gauge()), n_trials=4, n_jobs=3)
