"""Message of a driver to a broker when it opens a study."""

from __future__ import annotations

import resource
from typing import Any

import optuna
import pytest

from optuna_hermes import _optuna
from optuna_hermes.broker import StudySpec
from optuna_hermes.broker._protocol import Begin, frame
from optuna_hermes.ledger import LeaseRecord
from optuna_hermes.model import MOST_COUNT
from optuna_hermes.workers import _open_study
from optuna_hermes.workers._open_study import descriptions, open_study_message
from support.broker import FakeBroker
from support.memory_ledger import MemoryLedger


def opened(
    study: optuna.Study, *, n_trials: int, shared: bool, workers: int = 3
) -> tuple[FakeBroker, dict[int, Any]]:
    """A broker whose driver has opened a study, and the grants of its workers."""
    broker = FakeBroker(devices=3, ledger=MemoryLedger(shared=shared))
    spec = StudySpec(key="s", name="s", ledger_url="memory:", policy="fifo")
    terms: dict[str, Any] = {"n_trials": n_trials, "max_alive": workers}
    message = open_study_message(study, spec, broker.ledger, "h", **terms)
    broker.read(broker.connect("driver"), message)
    started = [broker.worker() for _ in range(workers)]
    return broker, {worker: broker.last(worker, "Grant") for worker in started}


def test_parameters_may_be_long_texts() -> None:
    """Each message is one that a broker takes, and together they tell of all trials."""
    study = optuna.create_study()
    choices = [f"{n} " + 20_000 * "\u20ac" for n in range(3)]
    space = {"prompt": optuna.distributions.CategoricalDistribution(choices)}
    for number in range(200):
        params = {"prompt": choices[number % 3]}
        trial = optuna.trial.create_trial(value=0.0, params=params, distributions=space)
        study.add_trial(trial)
    messages = list(descriptions(study, "s"))
    assert all(map(frame, messages))
    told = {number: params for each in messages for number, params in each.params.items()}
    assert told == {trial.number: trial.params for trial in study.trials}


def test_any_number_of_trials_may_be_asked_for() -> None:
    """``sys.maxsize`` stands for no bound; a message holds smaller numbers."""
    study, spec = optuna.create_study(), StudySpec(key="s", name="s", ledger_url="memory:")
    message = open_study_message(study, spec, MemoryLedger(), "a", n_trials=10**25, max_alive=1)
    assert message.limit == MOST_COUNT
    assert frame(message)


@pytest.mark.parametrize("shared", [True, False])
def test_trials_that_no_ledger_will_know_count(shared: bool) -> None:
    """Finished ones of a copied study, which bear the marks of their openings, are not replaced."""
    source, study = optuna.create_study(), optuna.create_study()
    source.tell(_optuna.open_trial(source), 0.0)
    study.add_trials(source.trials)
    broker, grants = opened(study, n_trials=3, shared=shared)
    assert [grants[worker] is not None for worker in sorted(grants)] == [True, True, False]
    assert (broker.races, broker.unstarted()) == (0, 0)


@pytest.mark.parametrize(("key", "adopted"), [("s", {}), ("original", {0: 0})])
def test_a_trial_that_another_host_begins_is_left_to_it(key: str, adopted: dict[int, int]) -> None:
    """But not that of a copied study, whose original had a lease of the same epoch."""
    study, ledger = optuna.create_study(), MemoryLedger(shared=True)
    _optuna.open_trial(study, name=_optuna.opening(key, 7))
    ledger.commit_lease(
        LeaseRecord(
            study="s",
            epoch=7,
            number=None,
            devices=("cpu:0",),
            host="h",
            started=0.0,
            owner="other",
        )
    )
    spec = StudySpec(key="s", name="s", ledger_url="memory:")
    message = open_study_message(study, spec, ledger, "own", n_trials=1, max_alive=1)
    assert message.adopted == adopted


@pytest.mark.parametrize("shared", [True, False])
def test_a_plain_trial_that_registers_late_counts_once(shared: bool) -> None:
    """It had begun when the driver counted, and its broker hears of it only then."""
    study = optuna.create_study()
    study.ask()
    broker, grants = opened(study, n_trials=3, shared=shared, workers=1)
    broker.plain(0)
    (worker,) = grants
    epoch = broker.last(worker, "Grant").epoch
    broker.say(worker, Begin(epoch=epoch, number=1, trial_id=1))
    assert broker.unstarted() == 1
    late = broker.worker()
    assert broker.last(late, "Grant").number is None
    assert (broker.races, broker.unstarted()) == (0, 0)


@pytest.mark.parametrize(
    ("limit", "workers"), [(256, 96), (1024, 128), (64, 9), (resource.RLIM_INFINITY, 128)]
)
def test_workers_leave_their_broker_files_to_open(
    monkeypatch: pytest.MonkeyPatch, limit: int, workers: int
) -> None:
    """Each takes two of those that the broker may have open."""
    monkeypatch.setattr(_open_study, "available_bytes", lambda: 10**12)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert _open_study.most_alive([f"cpu:{n}" for n in range(8)]) == workers


def test_few_open_files_are_said_where_memory_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials that go to disk for them make a study slow; a small study needs no more."""
    devices, memory = ["cpu:0", "cpu:1"], 10**12
    monkeypatch.setattr(_open_study, "available_bytes", lambda: memory)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    assert _open_study.few_files(devices, None) == (
        "The limit of open files (64) keeps 3 processes alive at most, so that suspended trials go "
        "to disk sooner: have root raise `ulimit -Hn` to 128."
    )
    assert _open_study.few_files(devices, 3) is None
    memory = 10**9
    assert _open_study.few_files(devices, 30) is None
    memory = 10**12
    for limit in (128, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert _open_study.few_files(devices, 30) is None
