"""Studies that `optuna.copy_study` has made are studies of their own."""

from __future__ import annotations

import copy
import fcntl
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import optuna
import pytest
from optuna.storages import GrpcStorageProxy, JournalStorage
from optuna.storages.journal import JournalFileBackend

from optuna_hermes import _optuna
from optuna_hermes._optuna import _local_ledgers, _storages, _studies
from optuna_hermes._optuna._local_ledgers import delete_with_files
from optuna_hermes._optuna._studies import ledger_file
from optuna_hermes._optuna_tables import read_facts
from optuna_hermes.errors import InvalidInputError, StorageError
from optuna_hermes.ledger import is_other_file, open_ledger


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


def copied_to(
    first: str | optuna.storages.BaseStorage, other: str | optuna.storages.BaseStorage
) -> optuna.Study:
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


def journal(path: Path) -> JournalStorage:
    return JournalStorage(JournalFileBackend(str(path)))


def trained(study: optuna.Study) -> str:
    """The key of a study, which a broker has got."""
    return _optuna.study_spec(study, policy="fifo", slice_seconds=1.0).key


def test_a_copy_in_another_journal_has_a_key_of_its_own(tmp_path: Path) -> None:
    """Its id is the same there; to delete it removes nothing of the first one."""
    here, there = tmp_path / "here.log", tmp_path / "there.log"
    first = optuna.create_study(storage=journal(here), study_name="first")
    keys = [trained(first)]
    open_ledger(_optuna.ledger_url(first)).close()
    second = copied_to(journal(here), journal(there))
    assert _optuna.known_key(second) is None
    delete_with_files(second, lambda: None)
    assert ledger_file(keys[0]).exists()
    shutil.copy(here, tmp_path / "file.log")
    third = optuna.load_study(study_name="first", storage=journal(tmp_path / "file.log"))
    for each in (second, third):
        keys.append(trained(each))
        assert _optuna.known_key(each) == keys[-1]
    assert len(set(keys)) == 3
    assert trained(first) == keys[0]
    keys.append(trained(copied_to(journal(there), journal(tmp_path / "third.log"))))
    assert len(set(keys)) == 4


def test_a_study_whose_ledger_cannot_be_looked_at_is_not_deleted(
    tmp_path: Path, take_away: Callable[[Path], None]
) -> None:
    """Its ledger and its checkpoints would stay for good."""
    study = optuna.create_study(storage=journal(tmp_path / "study.log"))
    take_away(ledger_file(trained(study)))
    deleted: list[bool] = []
    with pytest.raises(StorageError, match="Stale file handle"):
        delete_with_files(study, lambda: deleted.append(True))
    assert not deleted


def test_a_journal_that_is_moved_keeps_its_key(tmp_path: Path) -> None:
    """As one whose folder has another name; its first place may be another study's by then."""
    here, there = tmp_path / "here.log", tmp_path / "there.log"
    key = trained(optuna.create_study(storage=journal(here), study_name="first"))
    link = tmp_path / "link.log"
    link.hardlink_to(here)
    assert trained(optuna.load_study(study_name="first", storage=journal(link))) == key
    link.unlink()
    here.rename(there)
    moved = optuna.load_study(study_name="first", storage=journal(there))
    assert _optuna.known_key(moved) == key
    assert trained(optuna.create_study(storage=journal(here), study_name="first")) != key
    assert trained(moved) == key


@pytest.fixture
def proxy() -> Iterator[Callable[[str], int]]:
    """``proxy(url)``: the port of a gRPC proxy before a database."""
    pytest.importorskip("grpc")
    from optuna.storages._grpc.server import make_server

    with ExitStack() as stops:

        def start(url: str) -> int:
            server = make_server(optuna.storages.get_storage(url), "localhost", 0)
            port: int = server.add_insecure_port("localhost:0")
            server.start()
            stops.callback(lambda: server.stop(0).wait())
            return port

        yield start


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_copy_behind_another_proxy_has_a_key_of_its_own(
    proxy: Callable[[str], int], tmp_path: Path
) -> None:
    """A study that two proxies, or two names of one, lead to has one key."""
    urls = f"sqlite:///{tmp_path}/here.db", f"sqlite:///{tmp_path}/there.db"
    here, same, there = map(proxy, (urls[0], *urls))
    first = optuna.create_study(study_name="first", storage=GrpcStorageProxy(port=here))
    key = trained(first)
    for host, port in (("127.0.0.1", here), ("localhost", same)):
        storage = GrpcStorageProxy(host=host, port=port)
        assert _optuna.known_key(optuna.load_study(study_name="first", storage=storage)) == key
    second = copied_to(GrpcStorageProxy(port=here), GrpcStorageProxy(port=there))
    assert _optuna.known_key(second) is None
    assert trained(second) != key
    assert trained(first) == key


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_proxy_that_is_gone_is_waited_for_once(
    proxy: Callable[[str], int], storage_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look at a study whose proxy has another address now would last as long."""
    study = optuna.create_study(storage=GrpcStorageProxy(port=proxy(storage_url)))
    key = _optuna.study_key(study)
    mark = f"{_studies._PLACE_ATTRIBUTE}{key}:grpc://127.0.0.1:1"
    study._storage.set_study_system_attr(study._study_id, mark, True)
    waits: list[object] = []
    wait = GrpcStorageProxy.wait_server_ready

    def counted(storage: GrpcStorageProxy, timeout: float) -> None:
        waits.append(timeout)
        wait(storage, timeout)

    monkeypatch.setattr(GrpcStorageProxy, "wait_server_ready", counted)
    monkeypatch.setattr(_storages, "_PROXY_SECONDS", 0.1)
    monkeypatch.setattr(_studies, "_gone", set())
    assert _optuna.known_key(study) == key
    assert trained(study) == key
    assert waits == [0.1]


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_copy_that_was_looked_at_in_an_outage_is_no_moved_study(
    proxy: Callable[[str], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To train it makes its place one of its key's for good: the original is looked for anew."""
    urls = f"sqlite:///{tmp_path}/here.db", f"sqlite:///{tmp_path}/there.db"
    here, there = map(proxy, urls)
    first = optuna.create_study(study_name="first", storage=GrpcStorageProxy(port=here))
    key = trained(first)
    second = copied_to(GrpcStorageProxy(port=here), GrpcStorageProxy(port=there))
    monkeypatch.setattr(_studies, "_gone", set())

    def refuse(storage: GrpcStorageProxy, timeout: float) -> None:
        raise ConnectionError("injected")

    with monkeypatch.context() as outage:
        outage.setattr(GrpcStorageProxy, "wait_server_ready", refuse)
        assert _optuna.known_key(second) == key
    _optuna.claim_ledger(second)
    assert trained(second) != key


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_study_behind_a_proxy_is_not_deleted_while_it_is_trained(
    proxy: Callable[[str], int], storage_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is behind it may give its ids to the next study, into which its workers would write."""
    monkeypatch.setattr(_local_ledgers, "UNLOCK_SECONDS", 0.1)
    study = optuna.create_study(storage=GrpcStorageProxy(port=proxy(storage_url)))
    file = ledger_file(key := trained(study))
    with closing(open_ledger(_optuna.ledger_url(study))) as ledger:
        ledger.lock_study(key)
    deleted: list[bool] = []
    with open(f"{file}.hermes/{key}.lock", "a") as trains:
        fcntl.flock(trains, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match="A process trains study"):
            delete_with_files(study, lambda: deleted.append(True))
    assert not deleted
    delete_with_files(study, lambda: deleted.append(True))
    assert deleted
    assert not file.exists()


def test_a_file_url_of_sqlite_is_refused(tmp_path: object) -> None:
    """Its ledger would be somewhere else, and another one in each folder."""
    url = f"sqlite:///file:{tmp_path}/study.db?uri=true"
    study = optuna.create_study(storage=url)
    with pytest.raises(InvalidInputError, match=r"sqlite:////PATH/TO/study\.db"):
        _optuna.study_key(study)


def test_one_file_of_a_ledger_may_have_several_urls(tmp_path: Path) -> None:
    """A broker that serves a study takes no other file for its ledger, but each name of its own."""
    file, link, copy = (tmp_path / name for name in ("study.db", "link.db", "copy.db"))
    file.touch()
    copy.touch()
    link.symlink_to(file)
    url = f"sqlite:///{file}"
    for same in (url, f"{url}?timeout=5", f"sqlite:///{link}", f"sqlite:///file:{file}?uri=true"):
        assert not is_other_file(url, same)
    assert is_other_file(url, f"sqlite:///{copy}")
    assert not is_other_file("mysql+pymysql://host/s", "mysql+pymysql://host.example.org/s")
    moved = file.rename(tmp_path / "moved.db")
    assert is_other_file(url, f"sqlite:///{moved}")
