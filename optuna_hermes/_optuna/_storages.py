"""Storages: studies by name, errors in one line, copies for workers, idle connections."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import logging
import os
import pickle
import shlex
import sqlite3
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle
import optuna
from optuna.distributions import FloatDistribution
from optuna.storages import GrpcStorageProxy, JournalStorage, RDBStorage
from optuna.storages._cached_storage import _CachedStorage
from optuna.storages._rdb import storage as rdb
from optuna.storages._rdb.models import BaseModel, StudyModel
from optuna.storages.journal import (
    JournalFileBackend,
    JournalFileOpenLock,
    JournalFileSymlinkLock,
    JournalRedisBackend,
)
from optuna.trial import TrialState, create_trial

from optuna_hermes import ledger
from optuna_hermes._optuna_tables import is_empty
from optuna_hermes.errors import InvalidInputError, StorageError, refuse_undecoded, sentence
from optuna_hermes.ledger._secrets import redacted, without_password

if TYPE_CHECKING:
    from optuna_hermes._optuna._reports import Reports

RACE_SECONDS = 60.0
"""Seconds to retry while processes that start at once race to create a new database's tables."""

FULL_SECONDS = 330.0
"""Seconds to retry while a server has no connection left, as other hosts have them all."""

PROXY = "grpc://"
"""The beginning of a text that names a gRPC proxy, as in ``grpc://localhost:13000``."""

_PROXY_SECONDS = 10.0
_RACE_PAUSE_SECONDS = 0.05
_FULL_PAUSE_SECONDS = 1.0
_LIBRARIES = ("sqlalchemy", "sqlite3", "optuna", "alembic", "grpc", "redis")
_JOURNAL_BYTES = 1000
"""Bytes at the beginning of a file that tell a journal from others."""

_JOURNAL_PATHS = {"_file_path", "_lock_file", "_lock_target_file"}

log = logging.getLogger(__name__)

T = TypeVar("T")

_files: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""The files of engines whose URLs have relative paths."""

_read: weakref.WeakSet[optuna.Study] = weakref.WeakSet()
"""Studies whose trials are in the cache of their storage, as far as they had ended by then."""


def racing(call: Callable[..., T], *args: object, **named: object) -> T:
    """Retry a call, which may run twice, while it loses a race to create a database's tables.

    It waits longer, and says so, while the server has no connection left for it.

    Raises:
        Exception: the call's error, if it has another cause or lasts for too long.
    """
    begin, said = time.monotonic(), False
    while True:
        try:
            return call(*args, **named)
        except Exception as error:
            full = ledger.is_transient(error) and ledger.is_full(line(error))
            longest = FULL_SECONDS if full else RACE_SECONDS
            if not (full or ledger.lost_race(error)) or time.monotonic() > begin + longest:
                raise
            if full and not said:
                said = True
                log.warning(f"Waiting for the database. {ledger.FULL}")
        time.sleep(_FULL_PAUSE_SECONDS if full else _RACE_PAUSE_SECONDS)


def prepare_storages() -> None:
    """Do once what each fork of this process would do at its first look into a database."""
    # Else SQLAlchemy configures Optuna's mappers then, in every worker anew.
    BaseModel.registry.configure()


def open_storage(storage: str) -> Any:
    """The storage that a text names: a proxy, or what it names to Optuna's own command line."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return _opened(storage)


def _opened(storage: str) -> Any:
    if storage.startswith(PROXY):
        host, _, port = storage.removeprefix(PROXY).rpartition(":")
        if not (host and port.isdecimal()):
            raise ValueError(f"name its host and port, as in {PROXY}localhost:13000")
        proxy = GrpcStorageProxy(host=host, port=int(port))
        try:
            proxy.wait_server_ready(_PROXY_SECONDS)
        except ConnectionError:
            raise ConnectionError("no proxy answers there") from None
        return proxy
    if storage.startswith("redis"):
        return JournalStorage(JournalRedisBackend(storage))
    if "://" not in storage:
        check_journal(storage)
        return JournalStorage(JournalFileBackend(os.path.abspath(storage)))
    try:
        return optuna.storages.get_storage(storage)
    except RuntimeError as error:
        if type(error) is not RuntimeError:
            raise
        raise ValueError(str(error)) from error  # tables of another version of Optuna


def check_journal(path: str) -> None:
    """Raise a ``ValueError`` for a file that is no journal, or is not there.

    Optuna would write into the first, and take the path of the second for a URL.
    """
    if os.path.isdir(path):
        raise ValueError("it is a folder")
    if not os.path.isfile(path):
        if ":" in path:
            raise ValueError("it is no URL, and no such file is there")
        raise ValueError(f"no such file: make it, empty, for a journal, or give sqlite:///{path}")
    with open(path, "rb") as file:
        begin = file.read(_JOURNAL_BYTES)
    if begin.startswith(b"SQLite format 3\0"):
        raise ValueError(f"it is an SQLite file: give sqlite:///{path}")
    if begin and b'"op_code"' not in begin.splitlines()[0]:
        raise ValueError("it is no journal of Optuna's")


def load_study(storage: str, name: str, **parts: Any) -> optuna.Study:
    """Load a study that exists; ``parts`` are as for ``optuna.load_study``.

    Raises:
        StorageError: the storage cannot be reached, or has no such study.
    """
    if is_empty(storage):
        raise no_such_study(storage, name, [])
    with storage_errors(storage):
        backend = racing(open_storage, storage)
        names = [study.study_name for study in backend.get_all_studies()]
    if name not in names:
        raise no_such_study(storage, name, names)
    return optuna.load_study(study_name=name, storage=backend, **parts)


def no_such_study(storage: str, name: str, names: list[str]) -> StorageError:
    """The error of a study that is not among ``names``, with the command that makes it."""
    url = without_password(storage)
    make = shlex.join(["optuna-hermes", "create-study", "--storage", url, "--study-name", name])
    there = ", ".join(map(repr, sorted(names)[:5])) + (", ..." if len(names) > 5 else "")
    return StorageError(
        f"No study {name!r} in {url} (there: {there or 'none'}): create it with `{make}`."
    )


def create_study(storage: str, name: str, **parts: Any) -> tuple[optuna.Study, bool]:
    """Load a study, or create it if there is none of this name.

    Processes that start at once on a new database all get the same one.

    Returns:
        The study, and True if this call has created it.

    Raises:
        StorageError: the storage cannot be reached.
    """
    with storage_errors(storage):
        backend = racing(open_storage, storage)
        # Not looked up first: another process may create it between the look and the call.
        try:
            return racing(optuna.create_study, study_name=name, storage=backend, **parts), True
        except optuna.exceptions.DuplicatedStudyError:
            return racing(optuna.load_study, study_name=name, storage=backend, **parts), False


def study_names(storage: str) -> list[str]:
    """The names of all studies of a storage.

    Raises:
        StorageError: the storage cannot be reached.
    """
    with storage_errors(storage):
        backend = racing(open_storage, storage)
        try:
            return sorted(optuna.get_all_study_names(backend))
        finally:
            _disconnect(_uncached(backend))


@contextlib.contextmanager
def storage_errors(storage: str) -> Iterator[None]:
    """Turn errors of Optuna and SQLAlchemy in this block into a ``StorageError`` of one line."""
    try:
        with database_errors(storage):
            yield
    except StorageError:
        raise
    except (ImportError, ValueError, OSError) as error:
        reason = redacted(line(error), storage)
        raise StorageError(
            f"Storage {without_password(storage)} cannot be used: {reason} Check the URL, and that "
            "what it needs is installed."
        ) from error


@contextlib.contextmanager
def database_errors(storage: str) -> Iterator[None]:
    """As ``storage_errors``, for errors of the database alone, for example a damaged file."""
    try:
        yield
    except Exception as error:
        if not of_database(error):
            raise
        raise StorageError(
            f"Storage {without_password(storage)} cannot be reached: "
            f"{redacted(line(error), storage)} Check the URL, and that its folder or server is "
            "there, its file whole, and you may read and write it."
        ) from error


def of_database(error: BaseException) -> bool:
    """True if the error was raised by a database, or by the libraries that reach it."""
    return type(error).__module__.split(".")[0] in _LIBRARIES


def line(error: Exception) -> str:
    """The first line of the text of an error's cause, or of its own."""
    cause = error.__cause__ or error
    details = getattr(cause, "details", None)  # gRPC's texts begin with the name of their class
    return sentence(cause, str(details() or "") if callable(details) else "")


def database_url(study: optuna.Study) -> Any:
    """The SQLAlchemy URL of a study's database; None for storages without a file or a server."""
    backend = backend_of(study)
    return _url_of(backend) if isinstance(backend, RDBStorage) else None


def _url_of(storage: RDBStorage) -> Any:
    """The URL of a storage for any working folder; None if no other process can reach it."""
    url = storage.engine.url
    if url.get_backend_name() != "sqlite":
        return url
    if url.database in (None, "", ":memory:"):
        return None
    if url.database.startswith("file:"):
        raise InvalidInputError(
            f"An SQLite storage must be named by its path but got {url.database!r}: give "
            "sqlite:////PATH/TO/study.db, without `file:` and `uri=true`."
        )
    # The broker has another working folder, and so has a worker whose objective changes it.
    return url.set(database=_file_of(storage.engine))


def _file_of(engine: Any) -> str:
    """The absolute path of an engine's SQLite file, in any working folder."""
    path: str = engine.url.database
    if os.path.isabs(path):
        refuse_undecoded(path, "The path of a storage")
        return path
    if engine not in _files:
        here = os.path.abspath(path)
        refuse_undecoded(here, "The path of a storage")
        with engine.connect() as connection:
            opened = connection.exec_driver_sql("PRAGMA database_list").fetchone()[2]
        # Its spelling here, with links, as others give it; the engine has resolved it when made.
        _files[engine] = here if os.path.realpath(here) == os.path.realpath(opened) else opened
    return _files[engine]


class WholeJournal(JournalFileBackend):
    """A journal's file in which no line follows one that a full disk, or a power cut, has cut off.

    Optuna reads no journal in which one does.
    """

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append lines; what is cut off goes."""
        if not self._ends():  # rarely: for a look the lock is not needed
            self._lock.acquire()
            try:
                self._cut()
            finally:
                self._lock.release()
        super().append_logs(logs)

    def _ends(self) -> bool:
        with contextlib.suppress(FileNotFoundError), open(self._file_path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            return file.read() in (b"", b"\n")
        return True

    def _cut(self) -> None:
        with open(self._file_path, "rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def keep_whole(study: optuna.Study) -> None:
    """Have a study in a journal written to as to a ``WholeJournal``."""
    log = getattr(backend_of(study), "_backend", None)
    if type(log) is JournalFileBackend:
        log.__class__ = WholeJournal  # the user's own object, with its lock and what it has read


def is_late(study: optuna.Study) -> bool:
    """True if reports wait for the study's database; always False without ``retrying``."""
    reports = _reports_of(study)
    return reports is not None and reports.late


def settle_reports(study: Any) -> None:
    """Wait until each value that was reported is in the study's database, or in the journal.

    Raises:
        Exception: the error of writing a value.
    """
    reports = _reports_of(study)
    if reports is not None:  # without ``retrying`` values are written where they are reported
        reports.check()


@contextlib.contextmanager
def beside(study: Any) -> Iterator[None]:
    """Have values that are reported inside the block written while training goes on."""
    reports = _reports_of(study)
    if reports is None:
        yield
        return
    reports.beside = True
    try:
        yield
    finally:
        reports.beside = False


def _reports_of(study: Any) -> Reports | None:
    # The study of a ``FixedTrial`` is None.
    return getattr(getattr(study, "_storage", None), "reports", None)


def at_once(study: optuna.Study) -> Any:
    """The study's storage without the retries of ``retrying``."""
    return getattr(study._storage, "inner", study._storage)


def backend_of(study: optuna.Study) -> Any:
    """A study's storage without the wrappers around it, Optuna's or this package's."""
    return _uncached(at_once(study))


def _uncached(storage: Any) -> Any:
    return storage._backend if isinstance(storage, _CachedStorage) else storage


def for_workers(study: optuna.Study) -> bytes:
    """A study, pickled for many processes: each keeps few connections to a server.

    Raises:
        InvalidInputError: it cannot be pickled.
    """
    backend = backend_of(study)
    if not isinstance(backend, RDBStorage) or backend.engine.dialect.name == "sqlite":
        return _pickled(study)
    chosen = backend.engine_kwargs
    # The study keeps its own setting: it is changed for the time of pickling only.
    backend.engine_kwargs = ledger.few_connections(chosen)
    try:
        return _pickled(study)
    finally:
        backend.engine_kwargs = chosen


def is_inheritable(study: optuna.Study) -> bool:
    """True if the forks of a process may all use the study that it has loaded: of a database."""
    # A journal takes what forks have written for its own lines, and a channel of gRPC has threads.
    return isinstance(backend_of(study), RDBStorage)


def _pickled(study: optuna.Study) -> bytes:
    content = io.BytesIO()
    try:
        _Pickler(content).dump(study)
    except Exception as error:
        raise InvalidInputError(
            "The study's sampler, pruner and storage must be picklable, since workers are other "
            f"processes, but {line(error)} Create what cannot be (locks, open files) inside of "
            "their functions."
        ) from error
    return content.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles a storage: its file's path is absolute, and loading it skips the check of tables."""

    def reducer_override(self, obj: Any) -> Any:
        # For that check Optuna imports alembic, which is more than half of a worker's start time.
        if type(obj) is RDBStorage:
            url = _url_of(obj)
            text = obj.url if url is None else url.render_as_string(hide_password=False)
            return _with_tables, ({**obj.__getstate__(), "url": text},)
        if isinstance(obj, (JournalFileBackend, JournalFileSymlinkLock, JournalFileOpenLock)):
            # A journal opens its file for each value, where the objective's folder may be another.
            copied = copy.copy(obj)
            for name in _JOURNAL_PATHS & vars(copied).keys():
                setattr(copied, name, os.path.abspath(getattr(copied, name)))
            return copied.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)


def _with_tables(state: dict[str, Any]) -> RDBStorage:
    """A storage of a database that has its tables."""
    module: Any = rdb
    # Its constructor would check and upgrade the tables.
    storage = RDBStorage.__new__(RDBStorage)
    # Whoever pickles it again takes its version manager out of its state.
    storage.__dict__.update(state, _version_manager=None)
    storage.engine = module.sqlalchemy.engine.create_engine(storage.url, **storage.engine_kwargs)
    made = module.sqlalchemy_orm.sessionmaker(bind=storage.engine)
    storage.scoped_session = module.sqlalchemy_orm.scoped_session(made)
    return storage


def read_trials(study: optuna.Study) -> None:
    """Read the trials of a study in a file into its cache, for the forks of this process.

    A file only: a server that does not answer would hold this process up.
    """
    backend = backend_of(study)
    if not isinstance(backend, RDBStorage) or backend.engine.dialect.name != "sqlite":
        return
    try:
        study.get_trials(deepcopy=False)
        if (
            study not in _read
            and backend.engine.driver == "pysqlite"
            and type(backend) is RDBStorage
        ):
            with contextlib.suppress(Exception):  # it saves time only
                _compile_statements(backend)
        _read.add(study)
    except Exception as error:
        # A study that was deleted is a KeyError: workers and their driver see it.
        if not (of_database(error) or isinstance(error, KeyError)):
            raise
    finally:
        backend.scoped_session.remove()
        backend.engine.dispose()  # forks must not share a connection, nor a file's locks


def _compile_statements(backend: RDBStorage) -> None:
    """Compile the statements with which workers read and write a trial, in an empty database.

    Else SQLAlchemy does in every worker anew, for longer than SQLite takes to run them.
    """
    module: Any = rdb
    engine = backend.engine
    pool = engine.pool
    engine.pool = module.sqlalchemy.pool.StaticPool(partial(sqlite3.connect, ":memory:"))
    try:
        BaseModel.metadata.create_all(engine)
        with engine.begin() as connection:  # not Optuna's call, which says so on the console
            connection.execute(StudyModel.__table__.insert().values(study_name=""))
        study_id = backend.get_study_id_from_name("")
        begun = create_trial(state=TrialState.RUNNING, system_attrs={"name": ""})
        trial_id = backend.create_new_trial(study_id, begun)
        for name in "xy":
            backend.set_trial_param(trial_id, name, 0.0, FloatDistribution(0.0, 1.0))
        for step in (1, 1, 2):  # as new, and in place of another
            backend.set_trial_intermediate_value(trial_id, step, 0.0)
            backend.set_trial_user_attr(trial_id, "name", step)
            backend.set_trial_system_attr(trial_id, "name", step)
        backend.get_all_trials(study_id)
        backend.get_trial(trial_id)
        backend.set_trial_state_values(trial_id, TrialState.COMPLETE, [0.0])
    finally:
        backend.scoped_session.remove()
        engine.pool.dispose()
        engine.pool = pool


def read_trials_once(study: optuna.Study) -> None:
    """Read the trials of a study, unless ``read_trials`` has, in this process or in its parent."""
    if study not in _read:
        study.get_trials(deepcopy=False)


def close_connections(study: optuna.Study) -> bool:
    """Close connections to a study's database before a fork; False if there may be others."""
    backend = backend_of(study)
    if not isinstance(backend, RDBStorage):
        return False
    url = backend.engine.url
    is_file = url.get_backend_name() == "sqlite"
    named = is_file and url.database and not url.database.startswith((":memory:", "file:"))
    file = os.path.realpath(_file_of(backend.engine)) if named else ""
    backend.scoped_session.remove()
    backend.engine.dispose()
    if not named:
        return not is_file
    if not _is_open(file):
        return True
    gc.collect()  # a study that nothing refers to any more may wait for it, with its connection
    return not _is_open(file)


def _is_open(file: str) -> bool:
    """True if this process has an SQLite file open, or one that belongs to it."""
    return any(path == file or path.startswith(f"{file}-") for path in _open_files())


def _open_files() -> Iterator[str]:
    """The paths of the files that this process has open."""
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them is closed by now
            yield os.readlink(f"/proc/self/fd/{number}")


def rest(study: optuna.Study) -> None:
    """Close connections to a study's server whenever this process leaves them idle for a while."""
    backend = backend_of(study)
    if isinstance(backend, RDBStorage):
        ledger.rest_when_idle(backend.engine)


def disconnect(study: optuna.Study) -> None:
    """Close this process's pooled connections to a study's server."""
    _disconnect(backend_of(study))


def _disconnect(backend: Any) -> None:
    if isinstance(backend, RDBStorage) and backend.engine.dialect.name != "sqlite":
        backend.engine.dispose()
