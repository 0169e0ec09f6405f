"""One study, with plain Optuna's workers and this package's at the same time."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.storages._cached_storage import _CachedStorage
from optuna.trial import TrialState

from optuna_hermes import HermesPruner, HermesSampler, _optuna, optimize, suspendable
from optuna_hermes.workers import _driver

# Who has trained which trial is told by a file beside this one, to which both append.
OBJECTIVE = """
import os, time
from pathlib import Path

LOG = Path(__file__).with_name("log")


def train(trial, who):
    x = trial.suggest_float("x", -1, 1)
    with LOG.open("a") as log:
        log.write(f"{trial.number} {who}\\n")
    for unit in range(1, 6):
        time.sleep(0.05)
        trial.report(x * x + 1 / unit, unit)
        trial.should_prune()
    return x * x


def objective(trial):
    return train(trial, "ours")
"""

PLAIN = """
import sys, time, warnings
import optuna
import sqlalchemy
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from train import LOG, train

url, n_trials = sys.argv[1], int(sys.argv[2])
warnings.simplefilter("ignore")
storage = RDBStorage(
    url,
    heartbeat_interval=1,
    grace_period=2,
    heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(max_retry=1),
)
study = optuna.load_study(study_name="s", storage=storage)


def hang(trial):
    seen = sqlalchemy.text(f"SELECT 1 FROM trial_heartbeats WHERE trial_id = {trial._trial_id}")
    while True:  # without a first heartbeat nobody would ever call it stale
        with storage.engine.connect() as connection:
            if connection.scalar(seen):
                break
    LOG.with_name("hangs").touch()
    time.sleep(600)


def plain(trial):
    return train(trial, "plain")


study.optimize(plain if n_trials else hang, n_trials=n_trials or 1)
"""

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")

Start = Callable[[int], "subprocess.Popen[bytes]"]


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database with an empty study."""
    name = "storage_url" if request.param == "sqlite" else "postgres_url"
    url = str(request.getfixturevalue(name))
    with connected(url) as storage:
        optuna.create_study(study_name="s", storage=storage)
    (tmp_path / "train.py").write_text(OBJECTIVE)
    (tmp_path / "plain.py").write_text(PLAIN)
    return url


@pytest.fixture
def plain(url: str, tmp_path: Path) -> Iterator[Start]:
    """Start a plain worker for so many trials; with none it hangs in its first."""
    started: list[subprocess.Popen[bytes]] = []

    def start(n_trials: int) -> subprocess.Popen[bytes]:
        command = (sys.executable, tmp_path / "plain.py", url, str(n_trials))
        started.append(subprocess.Popen(command))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def command(url: str, n_trials: int) -> tuple[object, ...]:
    options = ("--storage", url, "--study-name", "s", "--n-trials", n_trials)
    schedule = ("--devices", "cpu:1", "--policy", "round-robin", "--slice-seconds", 0.05)
    return ("optimize", "train.py:objective", *options, *schedule, "--json")


@contextmanager
def connected(url: str) -> Iterator[RDBStorage]:
    """The storage as a plain worker has it, with its connections closed at the end."""
    storage = RDBStorage(url, heartbeat_interval=1, grace_period=2)
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


def states(url: str) -> dict[int, str]:
    with connected(url) as storage:
        trials = storage.get_all_trials(storage.get_study_id_from_name("s"), deepcopy=False)
    return {trial.number: trial.state.name for trial in trials}


def die_in_a_trial(plain: Start, tmp_path: Path, url: str, wait_for: Callable[..., Any]) -> int:
    """A plain worker is killed in the middle of a trial; which one, when Optuna calls it stale."""
    before, marker = states(url), tmp_path / "hangs"
    worker = plain(0)
    wait_for(marker.exists)
    worker.kill()
    marker.unlink()
    with connected(url) as storage:
        study_id = storage.get_study_id_from_name("s")
        wait_for(lambda: storage._get_stale_trial_ids(study_id))
    return next(number for number in states(url) if number not in before)


@pytest.mark.slow
def test_neither_hurts_the_other(
    url: str,
    plain: Start,
    start_cli: Callable[..., Any],
    cli: Callable[..., Any],
    tmp_path: Path,
    wait_for: Callable[..., Any],
) -> None:
    """Stale trials fail and are retried, suspended ones stay, and each is trained by one."""
    running = start_cli(*command(url, 4))
    wait_for(lambda: len(states(url)) >= 2, 60)
    running.send(signal.SIGINT)
    assert running.wait(30).returncode == 130, running.stderr
    suspended = {number for number, state in states(url).items() if state == "RUNNING"}
    assert suspended, "nothing was left to suspend"
    ours = set(states(url))

    dead = die_in_a_trial(plain, tmp_path, url, wait_for)
    assert plain(2).wait(60) == 0
    found = states(url)
    assert found.pop(dead) == "FAIL"
    assert {number for number, state in found.items() if state == "RUNNING"} == suspended
    retried = [number for number in found if number > dead]
    assert [found[number] for number in retried] == ["COMPLETE"] * 2

    dead_too = die_in_a_trial(plain, tmp_path, url, wait_for)
    beside = plain(3)
    total = len(states(url)) + 2
    done = cli(*command(url, total))
    assert done.returncode == 0, done.stderr
    assert beside.wait(60) == 0
    assert Counter(states(url).values()) == {"FAIL": 2, "COMPLETE": len(states(url)) - 2}
    assert {number for number, state in states(url).items() if state == "FAIL"} == {dead, dead_too}
    trained: dict[int, set[str]] = {}
    for line in (tmp_path / "log").read_text().splitlines():
        number, who = line.split()
        trained.setdefault(int(number), set()).add(who)
    assert all(len(who) == 1 for who in trained.values()), trained
    assert {number for number in ours if trained[number] != {"ours"}} == set()
    assert {number for number in retried if trained[number] != {"plain"}} == set()
    assert len(trained) == len(states(url)) - 2
    # What plain workers open later comes on top of the two that were lacking.
    opened = {number for number, who in trained.items() if who == {"ours"}} - ours
    assert len(opened) <= 2
    assert len(states(url)) >= total


def test_progress_counts_towards_what_is_ours(
    storage_url: str, tmp_path: Path, cli: Callable[..., Any]
) -> None:
    """Trials of plain Optuna count for ``--n-trials``, but are neither ended nor to come."""
    (tmp_path / "train.py").write_text(OBJECTIVE)
    study = optuna.create_study(study_name="s", storage=storage_url)
    study.add_trials([optuna.trial.create_trial(value=1.0)] * 3)
    done = cli(*command(storage_url, 5))
    assert done.returncode == 0, done.stderr
    assert "s: 0 of 2 ended, " in done.stderr


@pytest.fixture
def with_heartbeats(storage_url: str) -> Iterator[optuna.Study]:
    """A study whose storage fails trials that have had no heartbeat for a second, and retries."""
    storage = RDBStorage(
        storage_url,
        heartbeat_interval=1,
        grace_period=1,
        heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(max_retry=1),
    )
    yield optuna.create_study(
        study_name="s", storage=storage, sampler=HermesSampler(), pruner=HermesPruner()
    )
    storage.remove_session()
    storage.engine.dispose()


def make_stale(study: optuna.Study, trial_id: int) -> None:
    """Give a trial a heartbeat of long ago."""
    storage: Any = study._storage
    storage = getattr(storage, "_backend", storage)
    storage.record_heartbeat(trial_id)
    long_ago = sqlalchemy.text(
        f"UPDATE trial_heartbeats SET heartbeat = '2020-01-01' WHERE trial_id = {trial_id}"
    )
    with storage.engine.begin() as connection:
        connection.execute(long_ago)


def short(trial: optuna.Trial) -> float:
    x = trial.suggest_float("x", -1, 1)
    trial.report(x, 1)
    trial.should_prune()
    return x


def test_a_trial_whose_plain_process_has_died_is_tried_again(with_heartbeats: optuna.Study) -> None:
    """As under plain Optuna: the storage's callback puts it into the queue."""
    with pytest.warns(UserWarning, match="Heartbeat of storage"):
        dead = with_heartbeats.ask({"x": optuna.distributions.FloatDistribution(-1, 1)})
    make_stale(with_heartbeats, dead._trial_id)
    optimize(with_heartbeats, short, n_trials=2, devices="cpu:1", show_progress=False)
    found = {trial.number: trial for trial in with_heartbeats.trials}
    assert {number: each.state.name for number, each in found.items()} == {
        0: "FAIL",
        1: "COMPLETE",
    }
    assert found[1].params == dead.params


@pytest.mark.parametrize("plain", [False, True])
def test_a_retry_has_no_notes_of_the_dead_trial(plain: bool, with_heartbeats: optuna.Study) -> None:
    """Optuna's callback copies them, and dashboards would show them while it trains."""
    with pytest.warns(UserWarning, match="Heartbeat of storage"):
        dead = with_heartbeats.ask({"x": optuna.distributions.FloatDistribution(-1, 1)})
    dead.set_user_attr(_optuna.STATE_ATTRIBUTE, "parked")
    dead.set_user_attr(_optuna.SECONDS_ATTRIBUTE, 3.0)
    dead.set_user_attr("mine", 3)
    make_stale(with_heartbeats, dead._trial_id)

    def objective(trial: optuna.Trial) -> float:
        trial.set_user_attr("seen", trial.study.trials[trial.number].user_attrs)
        return short(trial)

    with_heartbeats.sampler = HermesSampler(devices="cpu:1")
    if plain:
        with_heartbeats.optimize(objective, n_trials=1)
    else:
        optimize(with_heartbeats, objective, n_trials=2, show_progress=False)
    seen = with_heartbeats.trials[1].user_attrs["seen"]
    assert seen == {
        _optuna.STATE_ATTRIBUTE: "running",
        _optuna.SECONDS_ATTRIBUTE: 0.0,
        "mine": 3,
    }


@pytest.mark.parametrize("call", ["set_trial_state_values", "create_new_trial"])
def test_each_dead_trial_is_tried_again_though_the_database_is_away_for_a_moment(
    call: str, with_heartbeats: optuna.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was failed before the outage is enqueued after it."""
    with pytest.warns(UserWarning, match="Heartbeat of storage"):
        dead = [with_heartbeats.ask() for _ in range(3)]
    for trial in dead:
        make_stale(with_heartbeats, trial._trial_id)
    inner, calls = getattr(_CachedStorage, call), list[Any]()

    def away_once(*args: Any, **named: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise sqlalchemy.exc.OperationalError("", {}, OSError("server closed"))
        return inner(*args, **named)

    monkeypatch.setattr(_CachedStorage, call, away_once)
    _optuna.fail_dead_trials(with_heartbeats, lambda: ())
    states = [trial.state.name for trial in with_heartbeats.trials]
    assert states == ["FAIL"] * 3 + ["WAITING"] * 3


def test_a_suspended_trial_that_had_a_heartbeat_is_not_dead(
    with_heartbeats: optuna.Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began under plain Optuna, as any process then tells: it has no process now."""
    study, ends = with_heartbeats, tmp_path / "ends"

    def objective(trial: optuna.Trial) -> float:
        run = suspendable(trial)
        for unit in run.epochs(10 if ends.exists() else 1_000_000):
            for _ in run.batches(range(2)):
                pass
            run.report(1 / (1 + unit))
        return 1.0

    def call() -> None:
        optimize(study, objective, 2, devices="cpu:1", slice_seconds=0.05, show_progress=False)

    with monkeypatch.context() as patch:
        patch.setattr(_driver.Driver, "_should_stop", lambda self, mine: mine.switches > 2)
        call()
    suspended = study.get_trials(states=(TrialState.RUNNING,))
    assert suspended
    for trial in suspended:
        make_stale(study, trial._trial_id)
    ends.touch()
    call()
    assert {trial.number: trial.state.name for trial in study.trials} == {
        0: "COMPLETE",
        1: "COMPLETE",
    }


class Race:
    """A storage in which another worker takes a trial just before it is marked by ours."""

    def __init__(self, study: optuna.Study, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken: list[optuna.Trial] = []
        self.finish = False
        self._other = optuna.load_study(study_name="s", storage=url)
        self._mark = study._storage.set_trial_system_attr
        monkeypatch.setattr(study._storage, "set_trial_system_attr", self.mark)

    def mark(self, trial_id: int, key: str, value: Any) -> None:
        if not self.taken:
            self.taken.append(self._other.ask())
            if self.finish:
                self._other.tell(self.taken[0], 1.0)
        self._mark(trial_id, key, value)


@pytest.fixture
def race(storage_url: str, monkeypatch: pytest.MonkeyPatch) -> tuple[optuna.Study, Race]:
    """A study with one trial in its queue, for which we are too late."""
    optuna.create_study(study_name="s", storage=storage_url).enqueue_trial({"x": 0.5})
    study = optuna.load_study(study_name="s", storage=RDBStorage(storage_url))
    return study, Race(study, storage_url, monkeypatch)


def test_a_trial_that_a_plain_worker_took_first_is_not_ours(
    race: tuple[optuna.Study, Race],
) -> None:
    """Whoever loses the race for an enqueued trial opens another and leaves no mark on that one."""
    study, rival = race
    mine = _optuna.open_trial(study)
    assert mine.number != rival.taken[0].number
    assert [_optuna.ours(trial) for trial in study.get_trials()] == [False, True]


def test_a_trial_that_was_taken_and_finished_is_no_error(race: tuple[optuna.Study, Race]) -> None:
    """The queue as it was read may be long over."""
    study, rival = race
    rival.finish = True
    mine = _optuna.open_trial(study)
    assert mine.number == 1
    assert study.trials[0].state == TrialState.COMPLETE


def test_a_trial_of_the_queue_is_ours_once_it_was_taken(storage_url: str) -> None:
    """It has a mark of its own, and is not ours any more when it is over."""
    study = optuna.create_study(study_name="s", storage=storage_url)
    study.enqueue_trial({"x": 0.5})
    mine = _optuna.open_trial(study)
    assert mine.number == 0
    assert _optuna.ours(study.trials[0])
    study.tell(mine, 1.0)
    assert not _optuna.ours(study.trials[0])
