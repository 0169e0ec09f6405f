"""Processes that meet a new study at once go by one key."""

from __future__ import annotations

import multiprocessing
import types
import uuid
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend

from optuna_hermes import _optuna
from optuna_hermes._optuna import _studies

N_PROCESSES = 2
DEADLINE_SECONDS = 60.0


def storage_at(place: str) -> Any:
    return RDBStorage(place) if "://" in place else JournalStorage(JournalFileBackend(place))


def meet(place: str, barrier: Any, answers: Any) -> None:
    """Ask for the key of a study; nobody writes one before all have seen that there is none."""
    study = optuna.load_study(study_name="s", storage=storage_at(place))

    def draw_together() -> uuid.UUID:
        barrier.wait(DEADLINE_SECONDS)
        return uuid.uuid4()

    _studies.uuid = types.SimpleNamespace(uuid4=draw_together)  # type: ignore[assignment]
    key = _optuna.study_key(study)
    barrier.wait(DEADLINE_SECONDS)
    answers.put((key, _optuna.study_seed(study, None), _optuna.study_key(study)))


@pytest.fixture(params=["SQLite", "PostgreSQL", "journal"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A storage with a study that this package has never met."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    if request.param == "PostgreSQL":
        found: str = request.getfixturevalue("postgres_url")
    else:
        found = f"sqlite:///{tmp_path}/s.db" if request.param == "SQLite" else f"{tmp_path}/journal"
    storage = storage_at(found)
    optuna.create_study(study_name="s", storage=storage)
    if isinstance(storage, RDBStorage):
        storage.engine.dispose()
    return found


def test_processes_that_meet_a_study_at_once_agree_on_its_key(place: str) -> None:
    """All have seen that there is no key; the first one that is written is everybody's."""
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(N_PROCESSES), context.SimpleQueue()
    processes = [
        context.Process(target=meet, args=(place, barrier, answers)) for _ in range(N_PROCESSES)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE_SECONDS)
        assert process.exitcode == 0
        process.close()
    heard = {answers.get() for _ in range(N_PROCESSES)}
    assert len(heard) == 1
    ((first, _, later),) = heard
    assert first == later
