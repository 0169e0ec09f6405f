"""Facts about a study: its key, seed, ledger, checkpoints and direction, and the stop flag."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import optuna
import platformdirs
from optuna.storages import GrpcStorageProxy, InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages._rdb.models import StudySystemAttributeModel
from optuna.storages._rdb.storage import _create_scoped_session
from optuna.study import StudyDirection
from optuna.trial import TrialState

from optuna_hermes._optuna._retry import with_retry
from optuna_hermes._optuna._storages import (
    PROXY,
    at_once,
    backend_of,
    database_url,
    of_database,
    open_storage,
)
from optuna_hermes._optuna._trials import SEED_ATTRIBUTE, trial_states
from optuna_hermes._optuna_tables import StudyFacts, ends_of, key_attribute
from optuna_hermes.broker import StudyIdentity, StudySpec
from optuna_hermes.broker._imports import absolute_policy_name, import_folders
from optuna_hermes.errors import InvalidInputError, StorageError
from optuna_hermes.ledger import is_transient, knows, open_ledger, with_connect_args, with_password
from optuna_hermes.ledger._database import Database
from optuna_hermes.ledger._locks import remove_ledger
from optuna_hermes.ledger._secrets import without_password
from optuna_hermes.model import MOST_SECONDS

LEDGER_ATTRIBUTE = "hermes:ledger"
"""The user attribute with the place of its ledger, of a study that has no database."""

_APART = "apart-"
"""The beginning of keys of studies that are in no database, whatever their ledger is in."""

_PLACE_ATTRIBUTE = "hermes:place:"
"""The beginning of attributes of such a study: its key, and a place that it was trained at.

`copy_study` copies them, too, so that a copy at another place is told from the study itself.
"""

_OFFERING_SECONDS = 1.0
"""Time in which all hosts that have seen no value have offered theirs."""

_giving = threading.Lock()

_known: set[tuple[str, str]] = set()
"""Databases, each with a key that its ledger is known to have; places, each with a study's own."""

_gone: set[str] = set()
"""Proxies at earlier places of studies that do not answer, until a study is about to be trained."""

_places: weakref.WeakKeyDictionary[object, object] = weakref.WeakKeyDictionary()
"""Places of storages, by the objects that open them."""

_in_memory: weakref.WeakKeyDictionary[InMemoryStorage, dict[int, str]] = weakref.WeakKeyDictionary()
"""Keys of studies in memory, by their ids.

They are in no attribute: a storage that was copied, or pickled and loaded, has studies of its own.
"""

_Counts = Callable[[Any], bool]

Study = optuna.Study
"""Alias for annotations in modules that do not import Optuna themselves."""


def study_key(study: optuna.Study) -> str:
    """The study's key, drawn once: a study created again under the same name gets another one."""
    known = known_key(study)
    if known is not None:
        return known
    name = key_attribute(study._study_id)
    if not shares_its_ledger(study):
        backend, drawn = backend_of(study), f"{_APART}{uuid.uuid4().hex[:16]}"
        if isinstance(backend, InMemoryStorage):
            with _giving:
                key = _in_memory.setdefault(backend, {}).setdefault(study._study_id, drawn)
        else:
            key = str(_given(study, name, drawn, partial(_is_own, study)))
        if not shared(study):
            weakref.finalize(backend, _remove_own, key, ledger_file(key), os.getpid())
        return key
    url, fresh = _database_of(study), uuid.uuid4().hex[:16]
    # First of all: a key that the ledger does not know is taken for that of a copied study.
    with contextlib.closing(open_ledger(url)) as ledger:
        ledger.add_study(fresh)
        _known.add((url, fresh))
        key = str(_given(study, name, fresh, partial(_is_in, url)))
        if key != fresh:  # another process was faster
            ledger.forget_study(fresh)
    return key


def known_key(study: optuna.Study) -> str | None:
    """The study's key, None if it has none yet; draws none."""
    backend = backend_of(study)
    if isinstance(backend, InMemoryStorage):
        return _in_memory.get(backend, {}).get(study._study_id)
    url = _database_of(study) if shares_its_ledger(study) else None
    counts = partial(_is_own, study) if url is None else partial(_is_in, url)
    key = _offered(study, key_attribute(study._study_id), counts)
    return None if key is None else str(key)


def identity(study: optuna.Study) -> StudyIdentity:
    """Return an identity of a study among those of this process, the same for all its objects."""
    backend = backend_of(study)
    # Once for each storage: it is asked at every report, and an objective may change its folder.
    if backend not in _places and (place := _place(study, backend)) is not None:
        _places[backend] = place
    return _places.get(backend, backend), study._study_id


def _place(study: optuna.Study, backend: object) -> object | None:
    """Place of a storage, the same for all objects that open it; None if it is this object."""
    with contextlib.suppress(InvalidInputError):  # of a URL that is refused where a key is drawn
        url: str | None = database_url(study)
        if url:
            return url
    if isinstance(backend, JournalStorage):
        log: object = backend._backend
        file, server = getattr(log, "_file_path", None), getattr(log, "_url", None)
        if file:
            return os.path.realpath(str(file))
        prefix = getattr(log, "_prefix", "")
        if server:
            return (server, prefix) if prefix else str(server)
        return log
    if isinstance(backend, GrpcStorageProxy):
        return f"{PROXY}{backend._host}:{backend._port}"
    return None


def _address(study: optuna.Study) -> str | None:
    """The place of a study in no database, as for ``open_storage``; None if that opens it not."""
    place = None if shares_its_ledger(study) else identity(study)[0]
    return without_password(place) if isinstance(place, str) else None


def _is_own(study: optuna.Study, key: str) -> bool:
    """True if a study in no database has this key for its own, unlike one that was copied."""
    place = _address(study)
    if not is_apart(key) or place is None or (place, key) in _known:
        return is_apart(key)
    attributes = study._storage.get_study_system_attrs(study._study_id)
    marks = [
        name.removeprefix(_PLACE_ATTRIBUTE).partition(":")[::2]
        for name, stands in attributes.items()
        if stands and name.startswith(_PLACE_ATTRIBUTE)
    ]
    places = [where for of, where in marks if of == key]
    if place in places or not places:  # or not trained yet
        return True
    if any(where == place for _, where in marks):  # with the key that the copy has got
        return False
    return not any(_is_copied(study, key, place, each) for each in places)


def _is_copied(study: optuna.Study, key: str, place: str, other: str) -> bool:
    """True if a study has a key from one that is still at another place, False if it was moved."""
    if other in _gone:  # each look takes seconds
        return False
    are_files = os.path.isabs(other) and os.path.isabs(place)
    try:
        if are_files and os.path.samefile(other, place):
            return False
        storage = open_storage(other)
        if not any(key in each.system_attrs.values() for each in storage.get_all_studies()):
            return False
    except Exception:  # nothing that can be read is there
        if not os.path.isabs(other):
            _gone.add(other)
        return False
    if are_files:
        return True
    # A server may have several names: what is written here is there, too, if it is the same.
    name = f"{_PLACE_ATTRIBUTE}{key}:{place}"
    study._storage.set_study_system_attr(study._study_id, name, True)
    if any(each.system_attrs.get(name) for each in storage.get_all_studies()):
        return False
    study._storage.set_study_system_attr(study._study_id, name, False)
    return True


def look_anew() -> None:
    """Ask proxies anew that did not answer: to train a study makes its place one of its own."""
    _gone.clear()


def _mark_place(study: optuna.Study, key: str) -> None:
    """Add the place of a study in no database to those at which its key is its own."""
    place = _address(study)
    if place is not None and (place, key) not in _known:
        name = f"{_PLACE_ATTRIBUTE}{key}:{place}"
        study._storage.set_study_system_attr(study._study_id, name, True)
        _known.add((place, key))


def facts(study: optuna.Study, states: Mapping[int, TrialState] | None = None) -> StudyFacts:
    """The facts of a study that its ledger lacks; ``states`` are its trials', if known."""
    key = known_key(study)
    states = trial_states(study) if states is None else states
    return StudyFacts(
        key=key,
        ledger_url=None if key is None else ledger_url(study),
        sign=sign(study),
        ends=ends_of((number, state.name) for number, state in states.items()),
    )


def study_keys(study: optuna.Study) -> set[str]:
    """The keys of all studies of a study's database that have one."""
    studies = study._storage.get_all_studies()
    keys = (each.system_attrs.get(key_attribute(each._study_id)) for each in studies)
    return {str(key) for key in keys if key is not None}


def shares_its_ledger(study: optuna.Study) -> bool:
    """True if the ledger of a study is that of all studies of its storage."""
    return database_url(study) is not None


def ids_return(study: optuna.Study) -> bool:
    """True if a study's storage may give the ids of a deleted study and its trials to others."""
    url = database_url(study)
    if url is None:  # behind a proxy may be SQLite
        return isinstance(backend_of(study), GrpcStorageProxy)
    return bool(url.get_backend_name() == "sqlite")


def is_apart(key: str) -> bool:
    """True for the key of a study that is in another storage than its ledger."""
    return key.startswith(_APART)


def study_seed(study: optuna.Study, seed: int | None, first: int | None = None) -> int:
    """The seed from which every trial's is derived: ``seed``, else the stored one.

    A study without any gets ``first``, or a fresh one. Unlike ``seed`` that changes no stored one:
    samplers on several hosts may have several seeds, but a trial has the same on each.
    """
    storage, study_id = study._storage, study._study_id
    known = _offered(study, SEED_ATTRIBUTE)
    if seed is None:
        if first is None:
            first = np.random.SeedSequence().generate_state(1)[0]
        return int(_given(study, SEED_ATTRIBUTE, int(first)) if known is None else known)
    seed = int(seed)  # one of NumPy's is no JSON
    if seed != known:
        storage.set_study_system_attr(study_id, SEED_ATTRIBUTE, seed)
    return seed


def _given(study: optuna.Study, name: str, value: Any, counts: _Counts = lambda _: True) -> Any:
    """Set a system attribute if it is not set; return the value that all processes now see.

    A value that does not count is taken for none.
    """
    # Of several processes that draw a value at once all must use the same one.
    storage, study_id, backend = study._storage, study._study_id, backend_of(study)
    if isinstance(backend, RDBStorage):
        with_retry(_add_attribute, backend, study_id, name, value)
        there = storage.get_study_system_attrs(study_id)[name]
        if not counts(there):
            with_retry(_replace_attribute, backend, study_id, name, there, value)
        return storage.get_study_system_attrs(study_id)[name]
    with only_here():
        if _offered(study, name, counts) is None:
            # Other hosts may do so at the same moment: none may replace what another one uses.
            storage.set_study_system_attr(study_id, f"{name}:{value}", value)
            if not isinstance(backend, JournalStorage):
                time.sleep(_OFFERING_SECONDS)
    return _offered(study, name, counts)


def _offered(study: optuna.Study, name: str, counts: _Counts = lambda _: True) -> Any:
    """The value of a system attribute, or of those offered for it the one that all hosts take.

    None if there is none that counts.
    """
    attributes = study._storage.get_study_system_attrs(study._study_id)
    if name in attributes and counts(attributes[name]):
        return attributes[name]
    offered = [value for each, value in attributes.items() if each.startswith(f"{name}:")]
    counting = [value for value in offered if counts(value)]
    if isinstance(backend_of(study), JournalStorage):  # in the order of the log, for all readers
        return counting[0] if counting else None
    return min(counting, default=None)


def _database_of(study: optuna.Study) -> str:
    """The URL of the study's own database, with its storage's arguments for connections.

    Raises:
        InvalidInputError: a URL cannot hold one of them.
    """
    url = database_url(study)
    if url.get_backend_name() != "sqlite":
        url = with_connect_args(url, backend_of(study).engine_kwargs)
    return str(url.render_as_string(hide_password=False))


def _is_in(url: str, key: str) -> bool:
    """True if the ledger in a database knows a key, unlike that of a study copied into it."""
    if is_apart(key):
        return False
    if (url, key) not in _known:
        with contextlib.closing(Database(url)) as database:
            if not knows(database, key):
                return False
        _known.add((url, key))
    return True


def _add_attribute(backend: RDBStorage, study_id: int, name: str, value: Any) -> None:
    """Insert an attribute's row; the unique constraint lets only the first process succeed."""
    # Optuna's own call would replace a value that another process uses already.
    row = StudySystemAttributeModel(study_id=study_id, key=name, value_json=json.dumps(value))
    with _create_scoped_session(backend.scoped_session, ignore_integrity_error=True) as session:
        session.add(row)


def _replace_attribute(backend: RDBStorage, study_id: int, name: str, old: Any, value: Any) -> None:
    """Replace an attribute's value, unless another process has done so."""
    row = {"study_id": study_id, "key": name, "value_json": json.dumps(old)}
    with _create_scoped_session(backend.scoped_session) as session:
        found = session.query(StudySystemAttributeModel).filter_by(**row)
        found.update({"value_json": json.dumps(value)})


@contextlib.contextmanager
def only_here() -> Iterator[None]:
    """Lock among all threads and processes of this user, for storages without a database."""
    folder = state_dir()
    with _giving, contextlib.ExitStack() as locked:
        with state_errors():
            folder.mkdir(parents=True, exist_ok=True)
            locked.enter_context(filelock.FileLock(folder / "attributes.lock"))
        yield


@contextlib.contextmanager
def state_errors() -> Iterator[None]:
    """Turn an ``OSError`` of ``state_dir`` in this block into a ``StorageError`` of one line."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"A study without a database keeps its ledger in {state_dir()}, which cannot be "
            f"written ({error.strerror or error}): set XDG_STATE_HOME to a folder that you may "
            "write to."
        ) from error


def study_spec(
    study: optuna.Study,
    *,
    policy: str,
    slice_seconds: float,
    seed: int = 0,
    hang_seconds: float | None = None,
    sets_up: bool = False,
) -> StudySpec:
    """The description of a study for a broker."""
    key = study_key(study)
    _mark_place(study, key)  # now: hosts that meet the study at once agree on its key by then
    return StudySpec(
        key=key,
        name=study.study_name,
        ledger_url=with_password(ledger_url(study)),
        policy=absolute_policy_name(policy),
        folders=import_folders() if ":" in policy else (),
        slice_seconds=min(slice_seconds, MOST_SECONDS),
        seed=seed,
        maximize=sign(study) < 0,
        hang_seconds=hang_seconds,
        sets_up=sets_up,
    )


def named_ledger(study: optuna.Study) -> str | None:
    """The URL of the database in which a study without one has its ledger; None for a file."""
    place = str(study.user_attrs.get(LEDGER_ATTRIBUTE, ""))
    return place if "://" in place else None


def ledger_url(study: optuna.Study) -> str:
    """The URL of the study's ledger: its own database, one that it names, or a file."""
    url = database_url(study)
    if url is None and (named := named_ledger(study)) is not None:
        return named
    if url is None:
        return f"sqlite:///{ledger_file(study_key(study))}"
    return _database_of(study)


def ledger_file(key: str) -> Path:
    """The file with the ledger of a study that is in no database, and that names none."""
    return state_dir() / "ledgers" / f"{key}.db"


def _remove_own(key: str, file: Path, pid: int) -> None:
    """Remove the ledger of a study in memory, which has ended with its storage or process."""
    # The children of a fork have copies of both.
    if os.getpid() == pid:
        remove_ledger(str(file), key)


def checkpoint_root(study: optuna.Study, chosen: Path | None = None) -> Path:
    """The folder of a study's checkpoints: one per study, also where several share ``chosen``.

    The default is beside an SQLite file, else in ``state_dir``.
    """
    url = database_url(study)
    if chosen is not None:
        folder = chosen
    elif url is not None and url.get_backend_name() == "sqlite":
        folder = Path(url.database + ".hermes")
    else:
        folder = state_dir() / "checkpoints"
    return folder.absolute() / study_key(study)


def trial_folder(number: int) -> str:
    """The name of a trial's folder in that of its study's checkpoints."""
    return f"trial-{number:05d}"


def checkpoint_url(study: optuna.Study, chosen: str) -> str:
    """The place of a study's checkpoints in a store: one per study, as ``checkpoint_root``."""
    return f"{chosen.rstrip('/')}/{study_key(study)}"


def state_dir() -> Path:
    """The user's state folder: for ledgers and checkpoints of studies without an SQLite file.

    Raises:
        StorageError: this user has no home, as in a container that does not know its number.
    """
    path = Path("~")
    with contextlib.suppress(RuntimeError):  # older platformdirs leave the "~"
        path = Path(platformdirs.user_state_path("optuna-hermes"))
    if path.parts[0] == "~":
        raise StorageError(
            "A study without an SQLite file keeps its ledger or checkpoints in the user's home, "
            "and this user has none: set XDG_STATE_HOME to a folder that you may write to."
        )
    return path


def shared(study: optuna.Study) -> bool:
    """True if other processes can reach the study's storage."""
    backend = backend_of(study)
    if isinstance(backend, InMemoryStorage):
        return False
    return not isinstance(backend, RDBStorage) or database_url(study) is not None


def is_deleted(study: optuna.Study, key: str | None) -> bool:
    """True if the study is no longer in its storage; False while that does not answer.

    A study made since with the same id has not its ``key``, which is None if it had none yet.
    """
    try:
        known = at_once(study).get_study_system_attrs(study._study_id)  # names are cached
    except KeyError:
        return True
    except Exception as error:
        if not (of_database(error) or is_transient(error)):
            raise
        return False
    return key is not None and key not in known.values()


def is_locked(study: optuna.Study) -> bool:
    """True if the study's file of SQLite is locked just now: to read it may take seconds."""
    url = database_url(study)
    if url is None or url.get_backend_name() != "sqlite":
        return False
    file = f"{Path(url.database).absolute().as_uri()}?mode=ro"  # one that is gone is not made anew
    try:
        with contextlib.closing(sqlite3.connect(file, timeout=0.0, uri=True)) as connection:
            connection.execute("PRAGMA schema_version")
    except sqlite3.OperationalError as error:
        return "locked" in str(error)  # else it is gone, say
    return False


def sign(study_or_trial: Any) -> float:
    """1.0 where lower is better, as in no study; -1.0 where values are maximised."""
    study = getattr(study_or_trial, "study", study_or_trial)
    directions = getattr(study, "directions", (StudyDirection.MINIMIZE,))
    return -1.0 if directions[0] == StudyDirection.MAXIMIZE else 1.0


@contextlib.contextmanager
def optimize_loop(study: optuna.Study) -> Iterator[None]:
    """Allow ``study.stop()`` in this block, as in ``study.optimize``."""
    outer = study._thread_local.in_optimize_loop  # a callback may call optimize() itself
    study._stop_flag = outer and study._stop_flag
    study._thread_local.in_optimize_loop = True
    try:
        yield
    finally:
        study._thread_local.in_optimize_loop = outer


@contextlib.contextmanager
def stopped_by_copies(study: optuna.Study) -> Iterator[None]:
    """Let ``stop()`` of a copy of the study stop it, in this block.

    An objective may call it of the script's own study, of which a worker process has a copy that
    is in no loop of Optuna's.
    """
    stop = optuna.Study.stop

    def stop_study(other: optuna.Study) -> None:
        is_copy = (other._study_id, other.study_name) == (study._study_id, study.study_name)
        # A study of another storage may have both: one that the objective optimizes has a loop.
        apart = other._thread_local.in_optimize_loop and identity(other) != identity(study)
        stop(study if is_copy and not apart else other)

    optuna.Study.stop = stop_study  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        optuna.Study.stop = stop  # type: ignore[method-assign]


def asked_to_stop(study: optuna.Study) -> bool:
    """True if ``study.stop()`` was called."""
    return bool(study._stop_flag)
