"""A study's facts from Optuna's own tables, read without importing Optuna.

Importing Optuna and opening its storage takes longer than all else that ``status`` does. The
tables and columns used here are pinned by a test, like all else used of Optuna's internals.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from optuna_hermes.errors import LedgerError, StorageError

if TYPE_CHECKING:
    from optuna_hermes.ledger._database import Database


def key_attribute(study_id: int) -> str:
    """The name of the system attribute that holds a study's key.

    With the study's id: `copy_study` copies every attribute, but a copy is a study of its own. One
    in another database may have the same id: its ledger does not know the key.
    """
    return f"hermes:key:{study_id}"


_ENDS = {"COMPLETE": "done", "PRUNED": "done", "FAIL": "failed"}


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyFacts:
    """Facts of a study that Optuna stores and its ledger does not.

    Args:
        key: the study's key, None if this package never trained it.
        ledger_url: URL of its ledger, None without a key.
        sign: 1.0 where lower is better, -1.0 where values are maximised.
        ends: outcomes of ended trials, by number: ``done`` or ``failed``.
    """

    key: str | None
    ledger_url: str | None
    sign: float
    ends: Mapping[int, str]


def ends_of(states: Iterable[tuple[int, str]]) -> dict[int, str]:
    """Outcomes of ended trials by number, from Optuna's names of their states.

    Example:
        >>> ends_of([(0, "PRUNED"), (1, "FAIL"), (2, "RUNNING")])
        {0: 'done', 1: 'failed'}
    """
    return {number: _ENDS[state] for number, state in states if state in _ENDS}


def read_facts(storage: str, name: str) -> StudyFacts | None:
    """Read the facts of a study in a database; None where only Optuna can read or refuse it."""
    # A process with Optuna reads by Optuna.
    from optuna_hermes.ledger._database import Database

    try:
        with contextlib.closing(Database(storage)) as database:
            return _read(database, storage, name)
    except LedgerError:  # not a database, for example a journal, or not one of Optuna's
        return None


def is_empty(storage: str) -> bool:
    """True if a database lacks Optuna's tables, which Optuna would create to look for a study.

    Raises:
        StorageError: see ``is_there``.
    """
    from optuna_hermes.ledger._database import Database

    file = sqlite_file(storage)
    if file is not None and not is_there(file):
        return file.parent.is_dir()  # else Optuna says what is not there
    try:
        with contextlib.closing(Database(storage)) as database:
            return not database.has_table("studies")
    except LedgerError:  # Optuna says why
        return False


def _read(database: Database, storage: str, name: str) -> StudyFacts | None:
    from optuna_hermes.ledger._schema import knows

    found = database.values("studies", ("study_id", "study_name"), study_name=name)
    ids = [study_id for study_id, its_name in found if its_name == name]  # MySQL takes a for A
    if not ids:
        return None
    of_study = {"study_id": ids[0]}
    keys = database.values(
        "study_system_attributes", ("value_json",), key=key_attribute(ids[0]), **of_study
    )
    key = json.loads(keys[0][0]) if keys else None
    if key is not None and not knows(database, key):  # of a copy in another database
        key = None
    directions = database.values("study_directions", ("direction",), objective=0, **of_study)
    states = database.values("trials", ("number", "state"), **of_study)
    return StudyFacts(
        key=key,
        ledger_url=None if key is None else storage,
        sign=-1.0 if directions == [("MAXIMIZE",)] else 1.0,
        ends=ends_of(states),
    )


def sqlite_file(storage: str) -> Path | None:
    """The file of an SQLite URL; None for every other storage."""
    scheme, separator, path = storage.partition(":///")
    if not separator or scheme.split("+")[0] != "sqlite":
        return None
    return Path(path.partition("?")[0])


def is_there(file: Path) -> bool:
    """True if a file of SQLite exists.

    Raises:
        StorageError: this user may not enter its folder, or no file can have its name.
    """
    try:
        file.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        raise StorageError(
            f"File {str(file)!r} cannot be looked at ({error.strerror}): check the path in "
            "--storage, and that you may enter its folder."
        ) from error
    return True
