"""Checks of a study's database, and of the checkpoints that its ledger names."""

from __future__ import annotations

import os
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from optuna_hermes.cli._checks import Check, judged
from optuna_hermes.cli._checks._host import NETWORK_KINDS, kind_of
from optuna_hermes.cli._studies import check_file, facts_reader, study_and_ledger
from optuna_hermes.view.formats import plural, ranges

COMMITS = 20
SLOW_COMMIT_SECONDS = 0.02


def storage(url: str) -> Iterator[Check]:
    """Check that a storage answers, and that its ledger's tables have a known version."""
    from optuna_hermes import _optuna
    from optuna_hermes._optuna_tables import is_empty, sqlite_file

    check_file(url)
    names = [] if is_empty(url) else _optuna.study_names(url)
    file = sqlite_file(url)
    if file is not None:
        closed = [each for each in (file.absolute().parent, file) if not os.access(each, os.W_OK)]
        if closed:
            problem = f"Let this user write {closed[0]}: SQLite makes files beside its own."
            yield judged("storage", f"{file} cannot be written", problem, "fail")
        else:
            yield commit_time(file.absolute().parent, f"beside {file.name}", "storage")
        place, kind = file.absolute().parent, kind_of(file.absolute())
        problem = (
            "SQLite's locks may fail on a network, and hosts cannot share it: use PostgreSQL."
            if kind in NETWORK_KINDS
            else ""
        )
        yield judged("its folder", f"{place} ({kind or 'unknown'})", problem)
    yield judged(
        "studies", f"{plural(len(names), 'study', 'studies')} in {_optuna.without_password(url)}"
    )
    yield from _ledger(url)


def study(url: str, name: str) -> Iterator[Check]:
    """Check that the newest checkpoints of a study's stored trials exist."""
    from optuna_hermes import _optuna

    if facts_reader(url, name)().ledger_url is None:
        yield judged(f"study {name!r}", "not trained yet: `optimize` makes its ledger")
        return
    with study_and_ledger(url, name) as (found, ledger):
        key = _optuna.study_key(found)
        records = ledger.load_trials(key)
        newest = {row.number: row.checkpoint.path for row in ledger.load_checkpoints(key)}
        root = _optuna.checkpoint_root(found)
    stored = [each.number for each in records if each.state == "stored" and each.number in newest]
    gone = [
        number
        for number in stored
        if not _is_there(newest[number], root / _optuna.trial_folder(number))
    ]
    who = f"{'trial' if len(gone) == 1 else 'trials'} {ranges(gone)}"
    problem = (
        f"The newest checkpoint of {who} is not there, as {newest[gone[0]]}: mount "
        "its folder, bring it back, or close them with `optuna-hermes finish`."
        if gone
        else ""
    )
    words = f"{plural(len(records), 'trial')}, {len(stored)} stored on disk"
    yield judged(f"study {name!r}", words, problem, "fail")


def _is_there(place: str, folder: Path) -> bool:
    """True if a checkpoint is there, or in its trial's present folder; a store is asked.

    Raises:
        CheckpointError: the store cannot be reached.
    """
    from optuna_hermes.suspend._tiers import _remote
    from optuna_hermes.suspend._tiers._disk import moved_file

    if _remote.is_url(place):
        return _remote.exists(place)
    return Path(place).is_file() or moved_file(folder, place) is not None


def _ledger(url: str) -> Iterator[Check]:
    from optuna_hermes.errors import LedgerError
    from optuna_hermes.ledger import SCHEMA_VERSION, is_database, schema_version

    try:
        version = schema_version(url)
    except LedgerError as error:
        if is_database(url):
            yield judged("ledger", "it cannot be used", str(error), "fail")
        else:
            # A journal, or a proxy, has no tables.
            yield judged("ledger", "each study has its own: a file, or the database of --ledger")
        return
    if version is None:
        yield judged("ledger", "none yet; `optimize` makes it")
        return
    other = (
        ""
        if version == SCHEMA_VERSION
        else f"This optuna-hermes reads version {SCHEMA_VERSION}: use the one that made it."
    )
    yield judged("ledger", f"schema version {version}", other, "fail")


def commit_time(folder: Path, where: str, name: str = "SQLite commit") -> Check:
    """Measure a commit of SQLite in a folder."""
    # The ledger makes one for every lease.
    place = folder if os.access(folder, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as temporary:
        seconds = statistics.median(_commits(Path(temporary, "doctor.db")))
    slow = seconds > SLOW_COMMIT_SECONDS
    problem = "Put the study on a local disk, or use longer slices." if slow else ""
    where = where if place else "in the folder for temporary files"
    return judged(name, f"{1000 * seconds:.1f} ms a commit {where}", problem)


def _commits(path: Path) -> Iterator[float]:
    connection = sqlite3.connect(path)
    try:
        connection.execute("create table entries (number integer)")
        for number in range(COMMITS):
            begin = time.perf_counter()
            connection.execute("insert into entries values (?)", (number,))
            connection.commit()
            yield time.perf_counter() - begin
    finally:
        connection.close()
