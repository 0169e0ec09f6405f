"""Processes that meet a new study at once go by one key."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import types
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import filelock
import optuna
import pytest
from optuna.storages import (
    GrpcStorageProxy,
    JournalStorage,
    RDBStorage,
    run_grpc_proxy_server,
)
from optuna.storages.journal import JournalFileBackend

from optuna_hermes import _optuna
from optuna_hermes._optuna import _studies
from optuna_hermes.ledger import open_ledger

N_PROCESSES = 2
DEADLINE_SECONDS = 60.0


def storage_at(place: str) -> Any:
    """The storage of a URL, of a journal's path, or behind the gRPC proxy of a port."""
    if place.isdigit():
        return GrpcStorageProxy(host="localhost", port=int(place))
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


def meet_from_a_host(place: str, barrier: Any, answers: Any) -> None:
    """As ``meet``, of a host that sees no other one's lock: it writes once another has its key."""
    os.environ["XDG_STATE_HOME"] = f"{place}-state-{os.getpid()}"
    study = optuna.load_study(study_name="s", storage=storage_at(place))
    write, turn = study._storage.set_study_system_attr, filelock.FileLock(f"{place}.turn")

    def write_in_turn(*words: Any) -> None:
        barrier.wait(DEADLINE_SECONDS)  # all have seen that there is none
        turn.acquire(DEADLINE_SECONDS)
        write(*words)

    study._storage.set_study_system_attr = write_in_turn  # type: ignore[method-assign]
    key = _optuna.study_key(study)
    turn.release()
    seed = _optuna.study_seed(study, None)
    turn.release()
    barrier.wait(DEADLINE_SECONDS)
    answers.put((key, seed, _optuna.study_key(study)))


def meet_behind_a_proxy(place: str, barrier: Any, answers: Any) -> None:
    """As ``meet``, of a host whose lock no other one sees: all write at once."""
    os.environ["XDG_STATE_HOME"] += f"-{os.getpid()}"
    study = optuna.load_study(study_name="s", storage=storage_at(place))
    write = study._storage.set_study_system_attr

    def write_together(*words: Any) -> None:
        barrier.wait(DEADLINE_SECONDS)
        write(*words)

    study._storage.set_study_system_attr = write_together  # type: ignore[method-assign]
    key, seed = _optuna.study_key(study), _optuna.study_seed(study, None)
    barrier.wait(DEADLINE_SECONDS)
    answers.put((key, seed, _optuna.study_key(study)))


def serve(path: str, port: int) -> None:
    run_grpc_proxy_server(storage_at(path), host="localhost", port=port)


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[str]:
    """The port of a gRPC proxy before a journal."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = int(free.getsockname()[1])
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=serve, args=(f"{tmp_path}/journal", port))
    process.start()
    storage_at(str(port)).wait_server_ready(timeout=DEADLINE_SECONDS)
    yield str(port)
    process.kill()
    process.join()


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A storage with a study that this package has never met."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    if request.param == "PostgreSQL":
        found: str = request.getfixturevalue("postgres_url")
    elif request.param == "proxy":
        found = request.getfixturevalue("proxy")
    else:
        found = f"sqlite:///{tmp_path}/s.db" if request.param == "SQLite" else f"{tmp_path}/journal"
    storage = storage_at(found)
    optuna.create_study(study_name="s", storage=storage)
    if isinstance(storage, RDBStorage):
        storage.engine.dispose()
    return found


def test_threads_that_meet_a_study_in_memory_agree_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No other process can offer a key for it: nobody waits for one."""
    monkeypatch.setattr(_studies, "time", None)
    study = optuna.create_study()
    with ThreadPoolExecutor(N_PROCESSES) as pool:
        keys = {*pool.map(_optuna.study_key, [study] * N_PROCESSES)}
    assert keys == {_optuna.known_key(study)}


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize(
    ("place", "target"),
    [
        *[(kind, meet) for kind in ("SQLite", "PostgreSQL", "journal")],
        ("journal", meet_from_a_host),
        ("proxy", meet_behind_a_proxy),
    ],
    indirect=["place"],
)
def test_processes_that_meet_a_study_at_once_agree_on_its_key(
    place: str, target: Callable[..., None]
) -> None:
    """All have seen that there is no key; the first one that is written is everybody's."""
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(N_PROCESSES), context.SimpleQueue()
    processes = [
        context.Process(target=target, args=(place, barrier, answers)) for _ in range(N_PROCESSES)
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
    if "://" in place:  # a database, which has the ledger as well
        storage = RDBStorage(place)
        study = optuna.load_study(study_name="s", storage=storage)
        with contextlib.closing(open_ledger(_optuna.ledger_url(study))) as ledger:
            assert ledger.load_studies() == [first]
        storage.engine.dispose()
