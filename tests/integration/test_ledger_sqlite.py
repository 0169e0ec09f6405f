"""The ledger in a file of SQLite, beside Optuna and between processes."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import re
import sqlite3
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy import event

from optuna_hermes import _optuna
from optuna_hermes.errors import LedgerError, StaleEpochError, StorageError
from optuna_hermes.ledger import (
    SCHEMA_VERSION,
    LeaseRecord,
    Ledger,
    ReportRecord,
    TrialRecord,
    _locks,
    open_ledger,
)
from optuna_hermes.ledger._locks import StudyLocks

DEADLINE_SECONDS = 120
PASSWORD = "p@ss word"
TABLES = {
    f"hermes_{name}"
    for name in (
        "schema",
        "hosts",
        "trials",
        "reports",
        "leases",
        "checkpoints",
        "memory",
        "events",
    )
}

Work = Callable[[str, int, Barrier], object]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that is not there yet."""
    return tmp_path / "study.db"


@pytest.fixture
def url(file: Path) -> str:
    """Its URL."""
    return f"sqlite:///{file}"


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    """A ledger in the file."""
    with closing(open_ledger(url)) as ledger:
        yield ledger


def lease(epoch: int, host: str = "a") -> LeaseRecord:
    """A lease of one device."""
    return LeaseRecord(
        study="study", epoch=epoch, number=None, devices=("a/cpu:0",), host=host, started=0.0
    )


def query(file: Path, sql: str) -> list[Any]:
    """Run a statement on the file, without the package, and return its rows."""
    with closing(sqlite3.connect(file)) as connection, connection:
        return connection.execute(sql).fetchall()


def in_processes(work: Work, url: str, count: int) -> list[Any]:
    """Return the results of ``work`` in ``count`` processes, all started and all reaped."""
    context = multiprocessing.get_context("spawn")
    start, answers = context.Barrier(count), context.SimpleQueue()
    processes = [
        context.Process(target=_work, args=(work, url, index, start, answers))
        for index in range(count)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(DEADLINE_SECONDS)
            assert process.exitcode == 0
        return [answer for _, answer in sorted(answers.get() for _ in processes)]
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
        answers.close()


def _work(work: Work, url: str, index: int, start: Barrier, answers: Any) -> None:
    answers.put((index, work(url, index, start)))


def race_for_epochs(url: str, index: int, start: Barrier) -> list[int]:
    """Commit epoch after epoch, as fast as it goes; which ones were won."""
    won = []
    with closing(open_ledger(url)) as ledger:
        for epoch in range(1, 31):
            start.wait(DEADLINE_SECONDS)
            try:
                ledger.commit_lease(lease(epoch, host=str(index)))
                won.append(epoch)
            except StaleEpochError:
                pass
    return won


def open_at_once(url: str, index: int, start: Barrier) -> int:
    """Open the new ledger with the others, and use it."""
    start.wait(DEADLINE_SECONDS)
    with closing(open_ledger(url)) as ledger:
        ledger.save_trial(TrialRecord(study="study", number=index, trial_id=index, state="pending"))
        ledger.save_trial(TrialRecord(study="study", number=-1, trial_id=-1, state="pending"))
        return len(ledger.load_trials("study"))


def write_beside_optuna(url: str, index: int, start: Barrier) -> str:
    """One process reports through Optuna while the others write to the ledger."""
    study = optuna.load_study(study_name="study", storage=url)
    with closing(open_ledger(url)) as ledger:
        start.wait(DEADLINE_SECONDS)
        trial = study.ask()
        for step in range(10):
            trial.report(step, step)
            ledger.add_report(
                ReportRecord(
                    study="study",
                    number=trial.number,
                    unit=step + 1,
                    step=step,
                    value=step,
                    device_seconds=step,
                    at=step,
                )
            )
        study.tell(trial, 0.0)
    return "done"


def test_of_two_processes_one_wins_each_epoch(url: str, file: Path) -> None:
    """Two brokers that race for thirty epochs share them: none is lost, none is won twice."""
    won = in_processes(race_for_epochs, url, 2)
    assert sorted(won[0] + won[1]) == list(range(1, 31))
    held = query(file, "SELECT epoch, host FROM hermes_leases ORDER BY epoch")
    assert held == [(epoch, str(int(epoch in won[1]))) for epoch in range(1, 31)]


def test_processes_open_a_new_ledger_at_once(url: str, file: Path) -> None:
    """Whoever makes the tables, every process finds them, and there is one version row."""
    assert all(trials >= 2 for trials in in_processes(open_at_once, url, 4))
    assert query(file, "SELECT schema_version FROM hermes_schema") == [(SCHEMA_VERSION,)]
    assert query(file, "SELECT count(*) FROM hermes_trials") == [(5,)]


def test_optuna_and_the_ledger_write_at_the_same_time(url: str) -> None:
    """Neither makes the other fail with a locked database, and no report is lost."""
    optuna.create_study(study_name="study", storage=url)
    assert in_processes(write_beside_optuna, url, 2) == ["done", "done"]
    trials = optuna.load_study(study_name="study", storage=url).trials
    with closing(open_ledger(url)) as ledger:
        curves = ledger.load_curves("study")
    for trial in trials:
        assert curves[trial.number].values == tuple(trial.intermediate_values.values())


def test_optuna_lives_beside_the_tables(url: str, file: Path, ledger: Ledger) -> None:
    """Studies are made and deleted as if the ledger were not there, and the ledger stays."""
    study = optuna.create_study(study_name="study", storage=url)
    study.optimize(lambda trial: trial.suggest_float("x", 0.0, 1.0), n_trials=1)
    ledger.save_trial(TrialRecord(study="study", number=0, trial_id=1, state="done"))
    migrated = query(file, "SELECT * FROM alembic_version")
    optuna.delete_study(study_name="study", storage=url)
    optuna.create_study(study_name="study", storage=url)
    assert query(file, "SELECT count(*) FROM trials") == [(0,)]
    assert len(ledger.load_trials("study")) == 1
    assert query(file, "SELECT * FROM alembic_version") == migrated


def test_a_ledger_adds_nothing_but_its_tables(url: str, file: Path) -> None:
    """Optuna's tables are the same before and after, and every new one says whose it is."""
    optuna.create_study(study_name="study", storage=url)
    tables = "SELECT name, sql FROM sqlite_master WHERE type = 'table'"
    before = set(query(file, tables))
    open_ledger(url).close()
    after = set(query(file, tables))
    assert before < after
    assert {name for name, _ in after - before} == TABLES


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_the_journal_mode_stays(url: str, file: Path, mode: str) -> None:
    """The file is the user's: how it keeps its journal is not changed."""
    query(file, f"PRAGMA journal_mode = {mode}")
    with closing(open_ledger(url)) as ledger:
        ledger.commit_lease(lease(1))
        assert query(file, "PRAGMA journal_mode") == [(mode,)]


def test_a_half_made_ledger_is_finished(url: str, file: Path) -> None:
    """Tables whose maker died before it wrote the version are completed by the next process."""
    open_ledger(url).close()
    query(file, "DELETE FROM hermes_schema")
    query(file, "DROP TABLE hermes_events")
    with closing(open_ledger(url)) as ledger:
        assert ledger.load_events("study") == []
    assert query(file, "SELECT schema_version FROM hermes_schema") == [(SCHEMA_VERSION,)]


def test_a_missing_folder_is_made_for_its_user_alone(tmp_path: Path) -> None:
    """The folder of a new ledger is private."""
    open_ledger(f"sqlite:///{tmp_path}/state/hermes/ledger.db").close()
    assert stat.S_IMODE((tmp_path / "state" / "hermes").stat().st_mode) == 0o700


def test_a_change_of_folder_keeps_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative URL names the file of the moment it was opened."""
    monkeypatch.chdir(tmp_path)
    with closing(open_ledger("sqlite:///here.db")) as ledger:
        monkeypatch.chdir("/")
        ledger.close()  # so that the next call connects anew
        ledger.commit_lease(lease(1))
    assert query(tmp_path / "here.db", "SELECT count(*) FROM hermes_leases") == [(1,)]


def test_a_file_that_was_made_anew_is_opened_again(ledger: Ledger, url: str, file: Path) -> None:
    """The rows of the old file are gone with it; a file that is still there is kept open."""
    ledger.commit_lease(lease(2))
    ledger.reopen()
    assert ledger.last_epoch() == 2
    file.unlink()
    with closing(open_ledger(url)) as other:
        other.commit_lease(lease(1))
        ledger.reopen()
        assert ledger.last_epoch() == 1
    file.unlink()
    ledger.reopen()
    ledger.commit_lease(lease(1))
    assert len(query(file, "SELECT * FROM hermes_leases")) == 1


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python sets no limit of SQLite")
def test_an_old_sqlite_takes_few_variables(url: str) -> None:
    """More trials than that may be finished at once, each of which may have lost steps."""
    with closing(open_ledger(url)) as ledger:
        of: dict[str, Any] = {
            "study": "s",
            "number": 0,
            "value": 0.5,
            "device_seconds": 1.0,
            "at": 1.0,
        }
        for unit, step in ((1, 10), (2, 20), (1, 15)):
            ledger.add_report(ReportRecord(**of, unit=unit, step=step))
        database: Any = ledger

        def limit(connection: Any, _: object) -> None:
            connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 999)

        event.listen(database._database._engine, "connect", limit)
        database._database._engine.dispose()
        values = {10: None, 20: None, 15: 0.5}
        assert ledger.load_step_values("s", range(1000)) == {0: values}
        assert ledger.load_step_values("s", range(1, 1001)) == {}


def test_a_forked_process_is_told_to_open_its_own(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection is never shared across a fork."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(LedgerError, match="Open the ledger again after a fork"):
            ledger.last_epoch()
    assert ledger.last_epoch() == 0


def test_the_file_is_not_a_database(url: str, file: Path) -> None:
    """Some other file is refused in one line that names it, and stays as it was."""
    file.write_text("These are my notes, do not touch them. " * 100)
    with pytest.raises(LedgerError, match=rf"^The ledger at {url} cannot be used: .*$") as caught:
        open_ledger(url)
    assert caught.value.__cause__ is not None
    assert file.read_text().startswith("These are my notes")


def test_the_folder_cannot_be_made(tmp_path: Path) -> None:
    """A path below a file is refused in one line."""
    (tmp_path / "file").touch()
    with pytest.raises(LedgerError, match="cannot be used"):
        open_ledger(f"sqlite:///{tmp_path}/file/ledger.db")


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "sqlite:///file:x?mode=memory"])
def test_a_database_in_memory_is_refused(url: str) -> None:
    """A ledger must outlive its process, so the error names what does."""
    with pytest.raises(LedgerError, match="Name a file"):
        open_ledger(url)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://ann:p%40ss word@127.0.0.1:1/study?connect_timeout=1",
        "postgresql+nodriver://ann:p%40ss word@127.0.0.1/study",
        "nosuchdatabase://ann:p%40ss word@127.0.0.1/study",
        "mysql+pymysql://ann:p%40ss word@127.0.0.1:1/study?password=p%40ss word",
        "postgresql://ann:p%40ss word@127.0.0.1:port/study",
        "p@ss word",
    ],
)
def test_a_database_out_of_reach_is_one_line_without_the_password(url: str) -> None:
    """Whatever is wrong, the message is one line, says what to do, and keeps the secret."""
    with pytest.raises(LedgerError) as caught:
        open_ledger(url)
    message = str(caught.value)
    assert "\n" not in message
    assert "URL" in message
    for secret in (PASSWORD, "p%40ss"):
        assert secret not in message
        assert secret not in str(caught.value.__cause__)
    assert caught.value.__cause__ is not None or re.search("cannot be read|must name", message)


def test_a_database_that_no_ledger_can_live_in_is_refused() -> None:
    """The error names the databases that can be used."""
    with pytest.raises(
        LedgerError, match=r"must name SQLite, PostgreSQL.* got 'oracle'\. Keep the study in one"
    ):
        open_ledger("oracle://ann@host/study")


def test_a_repr_has_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger in a traceback or a log keeps the secret."""
    pytest.importorskip("psycopg", reason="needs psycopg: pip install 'psycopg[binary]'")
    monkeypatch.setattr("optuna_hermes.ledger._ledger.create_tables", lambda database: None)
    with closing(Ledger("postgresql+psycopg://ann:p%40ss word@host/study?key=x")) as ledger:
        assert repr(ledger) == "Ledger('postgresql+psycopg://ann:***@host/study')"


def test_a_write_that_is_refused_is_one_line(url: str, file: Path) -> None:
    """A file that stays locked is a ledger error without a page of SQL, and can be tried again."""
    with closing(open_ledger(f"{url}?timeout=0")) as ledger:
        with closing(sqlite3.connect(file)) as other:
            other.execute("BEGIN EXCLUSIVE")
            with pytest.raises(LedgerError, match=r"cannot be used: database is locked\. Check"):
                ledger.commit_lease(lease(1))
        ledger.commit_lease(lease(1))
        assert ledger.last_epoch() == 1


def test_a_study_that_was_moved_while_it_trained_is_named_as_such(tmp_path: Path) -> None:
    """Its own broker has it still locked at the old place, until it ends."""
    (tmp_path / "old").mkdir()
    with closing(open_ledger(f"sqlite:///{tmp_path}/old/s.db")) as before:
        before.lock_study("s")
        (tmp_path / "old").rename(tmp_path / "new")
        with closing(open_ledger(f"sqlite:///{tmp_path}/new/s.db")) as ledger:
            with pytest.raises(LedgerError, match="`optuna-hermes broker --stop`"):
                ledger.lock_study("s")
            before.unlock_study("s")
            ledger.lock_study("s")


def test_a_disk_without_a_lock_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A study in a file trains there without a lock; for one that is in none, it is said."""

    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(fcntl, "flock", refuse)
    StudyLocks(str(tmp_path / "study.db")).lock("s")
    journal = JournalFileBackend(str(tmp_path / "study.log"))
    study = optuna.create_study(storage=JournalStorage(journal))
    with pytest.raises(StorageError, match="No locks available"):
        _optuna.study_key(study)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("mode", [0o644, 0o600])
def test_another_user_is_kept_out_of_a_study_that_trains(mode: int) -> None:
    """Who may write the file may lock it; who may not is told while somebody trains it."""
    with tempfile.TemporaryDirectory() as folder, _of_everybody(Path(folder)) as file:
        file.chmod(0o666)
        locks = StudyLocks(str(file))
        locks.lock("s")
        path = Path(f"{file}.hermes", "s.lock")
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
        assert _as_nobody(lambda: StudyLocks(str(file)).lock("s")) == "LedgerError: A study"
        path.parent.chmod(0o755)
        path.chmod(mode)
        assert _as_nobody(lambda: StudyLocks(str(file)).lock("s")) == f"LedgerError: {path} cannot"
        assert _as_nobody(lambda: StudyLocks(str(file)).is_locked("s")) == "True"
        locks.unlock("s")
        assert _as_nobody(lambda: StudyLocks(str(file)).is_locked("s")) == str(mode == 0o600)
        path.chmod(0o666)
        assert _as_nobody(lambda: StudyLocks(str(file)).lock("s")) == "None"


@contextmanager
def _of_everybody(folder: Path) -> Iterator[Path]:
    """A database of one's own in a folder where all may read, and the folder of its locks."""
    folder.chmod(0o755)
    file = folder / "s.db"
    Path(f"{file}.hermes").mkdir(mode=0o755)
    file.touch()
    yield file


def _as_nobody(call: Callable[[], object]) -> str:
    """What a call returns, or the begin of what it raises, in a process of another user."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            _locks._held.clear()  # as in a process of its own
            try:
                told = str(call())
            except Exception as error:
                told = f"{type(error).__name__}: {' '.join(str(error).split()[:2])}"
            os.write(write, told.encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as answer:
        told = answer.read()
    os.waitpid(pid, 0)
    return told
