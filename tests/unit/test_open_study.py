"""Message of a driver to a broker when it opens a study."""

from __future__ import annotations

import resource

import optuna
import pytest

from optuna_hermes.broker import StudySpec
from optuna_hermes.broker._protocol import frame
from optuna_hermes.model import MOST_COUNT
from optuna_hermes.workers import _open_study
from optuna_hermes.workers._open_study import descriptions, open_study_message
from support.memory_ledger import MemoryLedger


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
    assert (message.unstarted, message.limit) == (MOST_COUNT, MOST_COUNT)
    assert frame(message)


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
