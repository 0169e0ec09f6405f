"""Optuna's own upkeep of a database in which a ledger lives too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from subprocess import CompletedProcess
from typing import Any

import optuna
import pytest
import sqlalchemy
from optuna.storages import RDBStorage
from sqlalchemy import text

from optuna_hermes import _optuna
from optuna_hermes.ledger import open_ledger
from support.records import checkpoint, event, lease, report, trial_record

Cli = Callable[..., "CompletedProcess[str]"]

BEFORE_LAST = "v3.0.0.d"
"""The revision before Optuna's newest, which makes this index."""
INDEX = "trials_study_id_key"


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    """An empty database."""
    name = "storage_url" if request.param == "sqlite" else "postgres_url"
    return str(request.getfixturevalue(name))


@contextmanager
def opened(url: str, **options: Any) -> Iterator[RDBStorage]:
    """Optuna's storage, with its connections closed at the end."""
    storage = RDBStorage(url, **options)
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


def make_study(url: str, name: str) -> str:
    """A study with a finished trial and a ledger; its key."""
    with opened(url) as storage:
        study = optuna.create_study(study_name=name, storage=storage)
        study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
        key = _optuna.study_key(study)
    with closing(open_ledger(url)) as ledger:
        epoch = ledger.last_epoch() + 1
        ledger.save_trial(trial_record(0, study=key, state="stored"))
        ledger.add_report(report(1, 0.5, study=key))
        ledger.commit_lease(lease(epoch, study=key))
        ledger.save_checkpoint(checkpoint("/a", study=key))
        ledger.save_memory(key, {"a": 1})
        ledger.add_event(event("stored", study=key))
    return key


def rows(url: str) -> dict[str, list[Any]]:
    """Every row of every table of the ledger, and the tables' columns."""
    engine = sqlalchemy.create_engine(url)
    inspector = sqlalchemy.inspect(engine)
    names = [name for name in inspector.get_table_names() if name.startswith("hermes_")]
    with engine.connect() as connection:
        found: dict[str, list[Any]] = {
            name: [
                [column["name"] for column in inspector.get_columns(name)],
                *connection.execute(text(f"SELECT * FROM {name}")),
            ]
            for name in names
        }
    engine.dispose()
    return found


def execute(url: str, statement: str) -> None:
    engine = sqlalchemy.create_engine(url)
    with engine.begin() as connection:
        connection.execute(text(statement))
    engine.dispose()


def keys_without_a_study(url: str) -> list[str]:
    """Return the studies of the ledger that Optuna does not have, which ``gc`` looks for."""
    with opened(url) as storage, closing(open_ledger(url)) as ledger:
        names = optuna.get_all_study_names(storage)
        studies = [optuna.load_study(study_name=name, storage=storage) for name in names]
        known = {_optuna.known_key(study) for study in studies}
        return [key for key in ledger.load_studies() if key not in known]


@pytest.mark.parametrize("by", ["cli", "api"])
def test_a_storage_is_upgraded_and_the_ledger_stays(url: str, cli: Cli, by: str) -> None:
    """Optuna brings its own tables up from an earlier revision and leaves ours as they are."""
    make_study(url, "study")
    before = rows(url)
    assert len(before) == 8
    execute(url, f"UPDATE alembic_version SET version_num = '{BEFORE_LAST}'")
    with opened(url, skip_compatibility_check=True) as storage:
        assert storage.get_current_version() != storage.get_head_version()
    if by == "cli":
        done = cli("storage", "upgrade", "--storage", url)
        assert done.returncode == 0, done.stderr
    else:
        with opened(url, skip_compatibility_check=True) as storage:
            storage.upgrade()
    with opened(url) as storage:
        assert storage.get_current_version() == storage.get_head_version()
        assert len(optuna.load_study(study_name="study", storage=storage).trials) == 1
        indices = sqlalchemy.inspect(storage.engine).get_indexes("trials")
        assert INDEX in {index["name"] for index in indices}
    assert rows(url) == before


@pytest.mark.parametrize("by", ["cli", "api"])
def test_a_study_is_deleted_and_what_it_left_can_be_found(url: str, cli: Cli, by: str) -> None:
    """Optuna's deletion works as ever; its ledger's rows are found by their key, and cleared."""
    kept, gone = make_study(url, "kept"), make_study(url, "gone")
    assert keys_without_a_study(url) == []
    if by == "cli":
        done = cli("delete-study", "--storage", url, "--study-name", "gone")
        assert done.returncode == 0, done.stderr
    else:
        with opened(url) as storage:
            optuna.delete_study(study_name="gone", storage=storage)
    with opened(url) as storage:
        assert optuna.get_all_study_names(storage) == ["kept"]
        trials = storage.get_all_trials(storage.get_study_id_from_name("kept"))
        assert len(trials) == 1
    assert keys_without_a_study(url) == [gone]
    with closing(open_ledger(url)) as ledger:
        left = len(ledger.load_trials(kept))
        ledger.forget_study(gone)
        assert ledger.load_studies() == [kept]
        assert len(ledger.load_trials(kept)) == left == 1
        assert ledger.last_epoch() == 2


def test_a_study_made_again_under_a_deleted_ones_name_begins_anew(url: str) -> None:
    """It has another key, so the old one's runs are not taken for its own."""
    old = make_study(url, "study")
    with opened(url) as storage:
        optuna.delete_study(study_name="study", storage=storage)
        new = _optuna.study_key(optuna.create_study(study_name="study", storage=storage))
    assert new != old
    with closing(open_ledger(url)) as ledger:
        assert ledger.load_trials(new) == []
        assert len(ledger.load_trials(old)) == 1
