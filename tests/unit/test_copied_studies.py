"""Studies that `optuna.copy_study` has made are studies of their own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from optuna_hermes import _optuna
from optuna_hermes._tables import read_facts
from optuna_hermes.errors import InvalidInputError


def copied(storage: optuna.storages.BaseStorage | str, name: str) -> optuna.Study:
    optuna.copy_study(
        from_study_name="first", from_storage=storage, to_storage=storage, to_study_name=name
    )
    return optuna.load_study(study_name=name, storage=storage)


def test_a_copy_has_a_key_of_its_own(storage_url: str) -> None:
    """Else reports of its trials would be told to those of the first one."""
    first = optuna.create_study(storage=storage_url, study_name="first")
    key = _optuna.study_key(first)
    second = copied(storage_url, "copy")
    assert _optuna.known_key(second) is None
    facts = read_facts(storage_url, "copy")
    assert facts is not None
    assert facts.key is None
    other = _optuna.study_key(second)
    assert other != key
    assert _optuna.study_key(copied(storage_url, "third")) not in (key, other)
    assert _optuna.study_keys(first) > {key, other}
    facts = read_facts(storage_url, "copy")
    assert facts is not None
    assert facts.key == other
    assert _optuna.study_key(first) == key


def copied_to(first: str | JournalStorage, other: str | JournalStorage) -> optuna.Study:
    optuna.copy_study(from_study_name="first", from_storage=first, to_storage=other)
    return optuna.load_study(study_name="first", storage=other)


def test_a_copy_in_another_storage_has_a_key_of_its_own(tmp_path: Path) -> None:
    """Its id is the same there: its database's ledger does not know the key."""
    here, there = f"sqlite:///{tmp_path}/here.db", f"sqlite:///{tmp_path}/there.db"
    journal = JournalStorage(JournalFileBackend(f"{tmp_path}/journal.log"))
    key = _optuna.study_key(optuna.create_study(storage=here, study_name="first"))
    second = copied_to(here, there)
    assert _optuna.known_key(second) is None
    assert (facts := read_facts(there, "first")) is not None
    assert facts.key is None
    keys = {key, other := _optuna.study_key(second), _optuna.study_key(copied_to(here, journal))}
    assert len(keys) == 3
    assert _optuna.study_key(second) == other
    assert (facts := read_facts(there, "first")) is not None
    assert facts.key == other
    again = copied_to(journal, f"sqlite:///{tmp_path}/third.db")
    assert _optuna.known_key(again) is None
    assert _optuna.study_key(again) not in keys


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda study: pickle.loads(pickle.dumps(study))], ids=["copy", "load"]
)
def test_a_copy_of_a_study_in_memory_has_a_key_of_its_own(
    copied: Callable[[optuna.Study], optuna.Study],
) -> None:
    """Else its first trial would be told that it has ended, in the ledger of the original."""
    study = optuna.create_study()
    key = _optuna.study_key(study)
    other = copied(study)
    assert _optuna.known_key(other) is None
    assert _optuna.study_key(other) != key
    assert _optuna.study_key(study) == key
    assert _optuna.study_key(copied(other)) not in (key, _optuna.study_key(other))


def test_a_copy_in_a_journal_has_a_key_of_its_own(tmp_path: object) -> None:
    """Its keys say that it is not in the database of its ledger."""
    storage = JournalStorage(JournalFileBackend(f"{tmp_path}/journal.log"))
    first = optuna.create_study(storage=storage, study_name="first")
    keys = {_optuna.study_key(first), _optuna.study_key(copied(storage, "copy"))}
    assert len(keys) == 2
    assert all(map(_optuna.is_apart, keys))


def test_a_file_url_of_sqlite_is_refused(tmp_path: object) -> None:
    """Its ledger would be somewhere else, and another one in each folder."""
    url = f"sqlite:///file:{tmp_path}/study.db?uri=true"
    study = optuna.create_study(storage=url)
    with pytest.raises(InvalidInputError, match=r"sqlite:////PATH/TO/study\.db"):
        _optuna.study_key(study)
