"""A worker's use of Optuna's storage during an outage."""

from __future__ import annotations

import errno
import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import sqlalchemy.exc
from optuna.storages import GrpcStorageProxy, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from optuna_hermes import HermesPruner, _optuna
from optuna_hermes._optuna import _reports, _retry, _retrying_storage, _storages
from optuna_hermes._optuna._reports import Reports
from optuna_hermes.broker._client import _journal
from optuna_hermes.errors import DatabaseOutageError, LedgerOutageError, StorageError
from optuna_hermes.ledger import is_transient, lost_race

DEADLINE = 20.0


def lost() -> Exception:
    """Return the error that Optuna raises where SQLAlchemy lost its connection."""
    error = optuna.exceptions.StorageInternalError("An exception is raised during the commit.")
    error.__cause__ = sqlalchemy.exc.OperationalError("SELECT 1", {}, OSError("server closed"))
    return error


def test_a_transaction_whose_connection_was_lost_before_is_waited_for() -> None:
    """Optuna reads on in it after the first error; one that failed by itself is no such case."""
    for code, mended in (("8s2b", True), ("7s2a", False)):
        error = optuna.exceptions.StorageInternalError("An exception is raised during the commit.")
        error.__cause__ = sqlalchemy.exc.PendingRollbackError("Rollback first.", code=code)
        assert is_transient(error) is mended


def test_sqlite_without_room_for_its_journal_is_waited_for() -> None:
    """As at a quota of files; a path that is wrong fails before any statement."""
    cause = sqlite3.OperationalError("unable to open database file")
    for statement, mended in (("INSERT", True), (None, False)):
        error = sqlalchemy.exc.OperationalError(statement, {}, cause)  # type: ignore[arg-type]
        assert is_transient(error) is mended


def test_an_error_that_is_its_own_cause_is_gone_through_once() -> None:
    """``raise error from error`` is legal."""
    error = ValueError("lr")
    error.__cause__ = error
    assert not is_transient(error)


def test_a_server_that_is_read_only_for_now_is_waited_for() -> None:
    """As a standby that has not taken over yet, or one whose disk is full."""

    class ReadOnlyError(Exception):
        sqlstate = "25006"

    for cause, mended in ((ReadOnlyError("UPDATE"), True), (Exception("corrupt"), False)):
        assert is_transient(sqlalchemy.exc.InternalError("UPDATE", {}, cause)) is mended


@pytest.mark.parametrize(
    "refusal",
    [
        'connection to server at "db", port 5432 failed: fe_sendauth: no password supplied',
        'FATAL:  no pg_hba.conf entry for host "10.0.0.1", user "ann", no encryption',
        "(3159, 'Connections using insecure transport are prohibited')",
        """(1142, "CREATE command denied to user 'ann'@'10.0.0.1' for table 'hermes_trials'")""",
        """(1143, "SELECT command denied to user 'ann'@'10.0.0.1' for column 'a' in table 'b'")""",
    ],
)
def test_a_server_that_refuses_this_client_is_not_waited_for(refusal: str) -> None:
    """A password, a certificate or a right that is missing does not come by waiting."""
    assert not is_transient(sqlalchemy.exc.OperationalError("", {}, OSError(refusal)))


class ServerError(Exception):
    """A server's error, whose first argument is its code, as MySQL's are."""


CREATE, STAMP = "CREATE TABLE studies (...)", "INSERT INTO alembic_version VALUES (...)"
INSERT = "INSERT INTO trials VALUES (...)"


@pytest.mark.parametrize(
    ("cause", "statement", "lost"),
    [
        (sqlite3.OperationalError("table studies already exists"), CREATE, True),
        (sqlite3.IntegrityError("UNIQUE constraint failed: v.x"), STAMP, True),
        (sqlite3.IntegrityError("UNIQUE constraint failed: trials.x"), INSERT, False),
        (sqlite3.OperationalError("database is locked"), INSERT, True),
        (sqlite3.OperationalError("near CREATE: syntax error"), CREATE, False),
        (ServerError("42P07", "relation exists"), CREATE, True),
        (ServerError(1062, "Duplicate entry"), STAMP, True),
        (ServerError(1062, "Duplicate entry"), INSERT, False),
        (ServerError("42P07", "relation exists"), None, False),
        (ServerError("42601", "syntax error"), CREATE, False),
    ],
)
def test_who_creates_tables_that_another_has_created_tries_again(
    cause: Exception, statement: str, lost: bool
) -> None:
    """As where hosts begin a study at once; any other row that is there twice is an error."""
    error = optuna.exceptions.StorageInternalError("An exception is raised during the commit.")
    error.__cause__ = sqlalchemy.exc.OperationalError(statement, {}, cause)
    assert lost_race(error) is lost


def test_only_errors_of_statements_can_be_of_another_process() -> None:
    """Neither an error without a database is one, nor one without a statement."""
    assert not lost_race(ValueError("database is locked"))
    assert not lost_race(sqlalchemy.exc.InvalidRequestError("database is locked"))


@pytest.mark.parametrize(
    ("number", "mended"),
    [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, True), (errno.EACCES, False)],
)
def test_the_disk_of_a_journal_is_waited_for(number: int, mended: bool) -> None:
    """As that of SQLite; a file that may not be written is none of these cases."""
    assert is_transient(OSError(number, os.strerror(number))) is mended
    error = StorageError("Storage study.log cannot be used.")
    error.__cause__ = OSError(number, os.strerror(number))
    assert is_transient(error) is mended


def error_of(library: str, *names: str) -> type[Exception]:
    """An error class with the names of a library's, of which each is the base of the next."""
    made: type[Exception] = Exception
    for name in names:
        made = type(name, (made,), {"__module__": library})
    return made


@pytest.mark.parametrize(
    ("names", "mended"),
    [
        (["ConnectionError"], True),
        (["ConnectionError", "BusyLoadingError"], True),
        (["TimeoutError"], True),
        (["ConnectionError", "AuthenticationError"], False),
        (["ResponseError"], False),
    ],
)
def test_redis_is_waited_for(names: list[str], mended: bool) -> None:
    """But not if it refuses a password."""
    assert is_transient(error_of("redis.exceptions", *names)("refused")) is mended


@pytest.mark.parametrize(
    ("code", "details", "mended"),
    [
        ("UNAVAILABLE", "Connection refused (111).", True),
        (
            "UNKNOWN",
            "Exception calling ...: An exception is raised during the commit.",
            True,
        ),
        ("UNKNOWN", "Exception calling application: lr", False),
    ],
)
def test_a_proxy_is_waited_for(code: str, details: str, mended: bool) -> None:
    """Also where its own database does not answer it; what is said of it is what gRPC says."""

    class InactiveError(error_of("grpc", "RpcError")):  # type: ignore[misc]  # made above
        def code(self) -> SimpleNamespace:
            return SimpleNamespace(name=code)

        def details(self) -> str:
            return details

    error = InactiveError(f"<_InactiveRpcError of RPC that terminated with:\n\t{details}")
    assert is_transient(error) is mended
    assert _storages.line(error) == details.rstrip(".") + "."


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_what_the_database_of_a_proxy_refuses_is_no_outage(
    storage_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both the proxy says the same: without an answer values wait, what is refused is raised."""
    pytest.importorskip("grpc")
    from optuna.storages._grpc.server import make_server

    monkeypatch.setattr(_reports, "LATE_SECONDS", 0.01)
    monkeypatch.setattr(_retrying_storage, "_PAUSES_SECONDS", (0.0, 0.0))
    behind = RDBStorage(storage_url, engine_kwargs={"connect_args": {"timeout": 0.01}})
    server = make_server(behind, "localhost", 0)
    proxy = GrpcStorageProxy(port=server.add_insecure_port("localhost:0"))
    server.start()
    study = optuna.create_study(storage=proxy)
    file = sqlite3.connect(storage_url.removeprefix("sqlite:///"), isolation_level=None)
    with closing(file), _optuna.retrying(study):
        trial = study.ask()
        file.execute("BEGIN IMMEDIATE")
        trial.report(0.5, 1)
        assert _optuna.is_late(study)
        file.execute("ROLLBACK")
        assert _optuna.flush_reports(study, DEADLINE)
        monkeypatch.setattr(_reports, "LATE_SECONDS", DEADLINE)
        for table in ("user_attributes", "intermediate_values"):
            file.execute(
                f"CREATE TRIGGER no_{table} BEFORE INSERT ON trial_{table} "
                "BEGIN SELECT abs(-9223372036854775807 - 1); END"
            )
        with pytest.raises(optuna.exceptions.StorageInternalError, match="invalid data"):
            trial.set_user_attr("text", "too long")
        with pytest.raises(optuna.exceptions.StorageInternalError, match="invalid data"):
            trial.report(0.25, 2)
    assert study.trials[0].intermediate_values == {1: 0.5}
    server.stop(0).wait()


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_lock_that_only_one_table_of_a_proxy_has_is_waited_for(
    storage_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other values are taken meanwhile, as where a database ends one of two transactions."""
    pytest.importorskip("grpc")
    from optuna.storages._grpc.server import make_server

    monkeypatch.setattr(_retrying_storage, "_PAUSES_SECONDS", (0.01, 0.01, 0.2))
    behind = RDBStorage(storage_url)
    write, refused = behind.set_trial_intermediate_value, list[float]()

    def locked(*value: Any) -> None:
        if not refused or time.monotonic() < refused[0] + 0.2:
            refused.append(time.monotonic())
            raise lost()
        write(*value)

    monkeypatch.setattr(behind, "set_trial_intermediate_value", locked)
    server = make_server(behind, "localhost", 0)
    proxy = GrpcStorageProxy(port=server.add_insecure_port("localhost:0"))
    server.start()
    study = optuna.create_study(storage=proxy)
    with _optuna.retrying(study):
        study.ask().report(0.5, 1)
        assert _optuna.flush_reports(study, DEADLINE)
    assert study.trials[0].intermediate_values == {1: 0.5}
    assert refused
    server.stop(0).wait()


def test_no_line_of_a_journal_follows_one_that_is_cut_off(tmp_path: Path) -> None:
    """Optuna could not read on: what a full disk has left of a line goes before the next one."""
    file = tmp_path / "study.log"
    made = optuna.create_study(storage=JournalStorage(JournalFileBackend(str(file))))
    trial = made.ask()
    with file.open("ab") as log:
        log.write(b'{"op_code":7,"worker')
    with _optuna.retrying(made):
        trial.report(0.5, 1)
        trial.report(0.25, 2)
    again = optuna.load_study(
        study_name=made.study_name, storage=JournalStorage(JournalFileBackend(str(file)))
    )
    assert again.trials[0].intermediate_values == {1: 0.5, 2: 0.25}


def test_a_server_without_room_is_waited_for_at_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other hosts may have all its connections for a moment; the wait is said once, and ends."""
    monkeypatch.setattr(_storages, "_FULL_PAUSE_SECONDS", 0.001)
    full = sqlalchemy.exc.OperationalError("", {}, OSError("FATAL: too many connections for role"))
    answers: list[Exception | str] = [full, full, "storage"]

    def call() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert _storages.racing(call) == "storage"
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "Waiting for the database. It takes no more connections"
    ]
    monkeypatch.setattr(_storages, "FULL_SECONDS", 0.0)
    answers += [full, full]
    with pytest.raises(sqlalchemy.exc.OperationalError):
        _storages.racing(call)
    answers[:] = [sqlalchemy.exc.OperationalError("", {}, OSError("no such host"))]
    with pytest.raises(sqlalchemy.exc.OperationalError):
        _storages.racing(call)


class Flaky:
    """A storage in memory whose calls fail on command, before or after they take effect."""

    def __init__(self) -> None:
        self.inner = optuna.storages.InMemoryStorage()
        self.before: dict[str, list[Exception]] = {}
        self.after: dict[str, list[Exception]] = {}
        self.open = threading.Event()
        self.open.set()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.inner, name)

        def guarded(*args: Any, **named: Any) -> Any:
            assert self.open.wait(DEADLINE)
            if self.before.get(name):
                raise self.before[name].pop()
            answer = call(*args, **named)
            if self.after.get(name):
                raise self.after[name].pop()
            return answer

        return guarded


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses too short to notice."""
    monkeypatch.setattr(_retry, "FIRST_PAUSE_SECONDS", 0.001)


@pytest.fixture
def flaky() -> Flaky:
    return Flaky()


@pytest.fixture
def study(flaky: Flaky) -> Iterator[optuna.Study]:
    made = optuna.create_study(storage=flaky.inner, pruner=HermesPruner())
    made._storage = flaky  # type: ignore[assignment]
    with _optuna.retrying(made):
        yield made
        flaky.open.set()
        _optuna.flush_reports(made, DEADLINE)


def test_what_does_not_mend_is_raised_at_once() -> None:
    """A mistake is no reason to wait."""
    with pytest.raises(ZeroDivisionError):
        _optuna.with_retry(lambda: 1 / 0)


def test_a_database_that_stays_away_is_an_error_that_says_what_to_do() -> None:
    """Patience ends, with one line."""

    def call() -> None:
        raise lost()

    words = "does not answer: .*Bring it back, then run the same"
    with pytest.raises(DatabaseOutageError, match=words):
        _optuna.with_retry(call, seconds=0.0)


def test_patience_may_begin_before_the_first_error() -> None:
    """A server that drops packets has used it up by then, and is not asked again."""
    asked = []

    def call() -> None:
        asked.append(1)
        raise lost()

    with pytest.raises(DatabaseOutageError):
        _optuna.with_retry(call, seconds=5.0, since=time.monotonic() - 6.0)
    assert len(asked) == 1


def test_a_storage_that_is_waited_for_is_named() -> None:
    """Its URL may be wrong, so it is said which one, and what to look at."""
    error = StorageError("Storage postgresql://me:***@db/x cannot be reached: refused.")
    error.__cause__ = lost()
    for said in (_retry.outage_warning(error), str(_retry.outage_error(error))):
        assert f"does not answer: {error}" in said


def test_our_own_ledger_counts_too() -> None:
    """The driver waits for a ledger as for Optuna's tables."""
    failures: list[Exception] = [LedgerOutageError("locked")]

    def call() -> str:
        if failures:
            raise failures.pop()
        return "there"

    assert _optuna.with_retry(call) == "there"


def test_calls_are_repeated_until_they_succeed(flaky: Flaky, study: optuna.Study) -> None:
    """Suggestions, attributes and reading wait for the database."""
    trial = _optuna.open_trial(study)
    flaky.before = {name: [lost(), lost()] for name in ("set_trial_param", "get_all_trials")}
    trial.suggest_float("x", 0, 1)
    assert len(study.get_trials()) == 1
    assert study.trials[0].params == trial.params


@pytest.mark.parametrize("moment", ["before", "after"])
def test_no_second_trial_is_made(flaky: Flaky, study: optuna.Study, moment: str) -> None:
    """There is one trial, made by the broken call or not."""
    setattr(flaky, moment, {"create_new_trial": [lost()]})
    trial = _optuna.open_trial(study)
    assert [each.number for each in study.trials] == [trial.number]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_enqueued_trial_is_taken_once(flaky: Flaky, study: optuna.Study, moment: str) -> None:
    """The first that waits is the one, although the answer was lost."""
    study.enqueue_trial({"x": 0.1})
    study.enqueue_trial({"x": 0.2})
    setattr(flaky, moment, {"set_trial_state_values": [lost()]})
    assert _optuna.open_trial(study).number == 0
    assert [each.state for each in study.trials] == [TrialState.RUNNING, TrialState.WAITING]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_trial_is_told_once(flaky: Flaky, study: optuna.Study, moment: str) -> None:
    """A trial is told, after its values, also if the broken call has done so already."""
    trial = _optuna.open_trial(study)
    trial.report(0.5, 1)
    setattr(flaky, moment, {"set_trial_state_values": [lost()]})
    told = _optuna.tell(study, trial, 0.5, None)
    assert (told.state, told.value) == (TrialState.COMPLETE, 0.5)
    assert study.trials[0].intermediate_values == {1: 0.5}


def test_a_mistake_in_telling_is_raised(study: optuna.Study) -> None:
    """Telling a trial twice is refused as Optuna refuses it."""
    trial = _optuna.open_trial(study)
    _optuna.tell(study, trial, 0.5, None)
    with pytest.raises(ValueError, match="Cannot tell"):
        _optuna.tell(study, trial, 0.5, None)


@pytest.fixture
def late_trial(
    flaky: Flaky, study: optuna.Study, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> optuna.Trial:
    """A trial whose database hangs, which is noticed at once, and whose journal is in a folder."""
    monkeypatch.setattr(_reports, "LATE_SECONDS", 0.01)
    trial = _optuna.open_trial(study)
    _optuna.keep_reports(study, _optuna.trial_id(trial), tmp_path)
    flaky.open.clear()
    return trial


def test_training_goes_on_while_values_wait(
    flaky: Flaky, study: optuna.Study, late_trial: optuna.Trial, tmp_path: Path
) -> None:
    """A report returns although the database hangs, nobody is pruned, and all comes in order."""
    for unit in (1, 2, 3):
        late_trial.report(1 / unit, unit)
        assert not late_trial.should_prune()
    assert _optuna.is_late(study)
    assert _journal.find(tmp_path).unwritten == ((1, 1.0), (2, 0.5), (3, 1 / 3))
    assert not _optuna.flush_reports(study, 0.01)
    flaky.open.set()
    assert _optuna.flush_reports(study, DEADLINE)
    assert study.trials[0].intermediate_values == {1: 1.0, 2: 0.5, 3: 1 / 3}
    assert not _optuna.is_late(study)
    assert list(tmp_path.iterdir()) == []


def test_a_wrapped_pruner_is_not_asked_what_it_cannot_know(
    flaky: Flaky, study: optuna.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the values of others cannot be read nobody is stopped."""

    class Always(optuna.pruners.NopPruner):
        def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
            return True

    study.pruner = HermesPruner(Always())
    monkeypatch.setattr(_reports, "LATE_SECONDS", 0.01)
    trial = _optuna.open_trial(study)
    flaky.open.clear()
    trial.report(1.0, 1)
    assert not trial.should_prune()
    flaky.open.set()
    assert _optuna.flush_reports(study, DEADLINE)
    assert trial.should_prune()


def test_values_of_a_process_that_died_are_written_by_the_next(tmp_path: Path) -> None:
    """Values kept in its file are reported before anything else, whatever numbers they are."""
    _journal.change(tmp_path, unwritten=((3, 0.5), (4, math.nan)))
    written: list[tuple[int, int, float]] = []
    reports = Reports(lambda *each: written.append(each))
    reports.keep_in(tmp_path, 7)
    reports.put(7, 5, 0.25)
    assert reports.flush(DEADLINE)
    assert [step for _, step, _ in written] == [3, 4, 5]
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_read_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is in it, the trial goes on, and says so."""
    (tmp_path / _journal.NAME).write_bytes(b"[[3,")
    Reports(lambda *each: None).keep_in(tmp_path, 7)
    assert f"{_journal.NAME} cannot be read" in caplog.text


def test_an_error_that_does_not_mend_reaches_whoever_reports(study: optuna.Study) -> None:
    """A trial that somebody has finished takes no more values; of a loop the next report tells."""
    trial = _optuna.open_trial(study)
    study._storage.inner.set_trial_state_values(trial._trial_id, TrialState.FAIL)  # type: ignore[attr-defined]
    with pytest.raises(optuna.exceptions.UpdateFinishedTrialError):
        trial.report(1.0, 1)
    _optuna.report(trial, 1.0, 1)
    with pytest.raises(optuna.exceptions.UpdateFinishedTrialError):
        _optuna.report(trial, 1.0, 2)
    _optuna.report(trial, 1.0, 3)
    with pytest.raises(optuna.exceptions.UpdateFinishedTrialError):
        _optuna.settle_reports(study)  # before a checkpoint, which would be ahead of Optuna


def test_a_report_does_not_wait_until_it_is_written(
    flaky: Flaky, study: optuna.Study, tmp_path: Path
) -> None:
    """The device would wait too; what must not be ahead of the database settles before."""
    trial = _optuna.open_trial(study)
    _optuna.keep_reports(study, _optuna.trial_id(trial), tmp_path)
    flaky.open.clear()
    _optuna.report(trial, 1.0, 1)
    assert not _optuna.is_late(study)
    flaky.open.set()
    _optuna.settle_reports(study)
    assert study.trials[0].intermediate_values == {1: 1.0}


def test_what_does_not_settle_is_in_the_journal(
    flaky: Flaky, study: optuna.Study, late_trial: optuna.Trial, tmp_path: Path
) -> None:
    """A checkpoint may be written during an outage: the next process has the value all the same."""
    _optuna.report(late_trial, 1.0, 1)
    _optuna.settle_reports(study)
    assert _journal.find(tmp_path).unwritten == ((1, 1.0),)
    flaky.open.set()
    assert _optuna.flush_reports(study, DEADLINE)
    assert list(tmp_path.iterdir()) == []


def test_notes_for_dashboards_are_dropped(flaky: Flaky, study: optuna.Study) -> None:
    """They are not worth waiting for."""

    class Session:
        device_seconds = 1.0

    trial = _optuna.open_trial(study)
    flaky.before = {"set_trial_user_attr": [lost()]}
    note: Callable[[Any], None] = _optuna.Note(study, _optuna.trial_id(trial), Session())  # type: ignore[arg-type]
    note("parked")
    assert study.trials[0].user_attrs == {}
    note("running")
    assert study.trials[0].user_attrs["hermes:state"] == "running"


def test_the_study_is_as_it_was_afterwards(flaky: Flaky) -> None:
    """A driver's study is its user's."""
    made = optuna.create_study(storage=flaky.inner)
    inner = made._storage
    with _optuna.retrying(made):
        assert made._storage is not inner
    assert made._storage is inner
