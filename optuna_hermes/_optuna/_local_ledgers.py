"""Ledgers of studies without a database: each a file in a user's folder, or in a database.

Several hosts may reach such a study's storage (a journal file, a gRPC proxy), but not a file that
is its ledger: without a claim two of them would each train every trial.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import optuna

from optuna_hermes._optuna._studies import (
    LEDGER_ATTRIBUTE,
    checkpoint_root,
    ids_return,
    known_key,
    ledger_file,
    ledger_url,
    look_anew,
    named_ledger,
    only_here,
    shares_its_ledger,
    state_dir,
    state_errors,
)
from optuna_hermes.errors import InvalidInputError, LedgerError, StorageError
from optuna_hermes.ledger import open_ledger
from optuna_hermes.ledger._locks import UNLOCK_SECONDS, remove_ledger

MEETING_SECONDS = 10.0
"""Seconds in which hosts that claim a study at the same moment retry."""

CLAIM_SECONDS = 600.0
"""Age of a claim, which takes a moment, at which its host has died over it; clocks may differ."""

_CLAIM = "hermes:ledger:"
_LONGEST_PAUSE_SECONDS = 0.5


def claim_ledger(study: optuna.Study, url: str | None = None) -> None:
    """Claim a study that has no database for a ledger.

    Args:
        url: of the database that its ledger is in; None for that which it has, or else for that of
            this host and user.

    Raises:
        InvalidInputError: the study has a database of its own.
        StorageError: another ledger has claimed it.
    """
    if shares_its_ledger(study):
        if url is not None:
            raise InvalidInputError(
                f"ledger must be left out for study {study.study_name!r}, whose ledger is in its "
                "own database."
            )
        return
    look_anew()
    here = url or named_ledger(study) or _here()
    end = time.monotonic() + MEETING_SECONDS
    while not (marked := study.user_attrs.get(LEDGER_ATTRIBUTE)):
        others = _claimed(study, here)
        if others and time.monotonic() > end:
            raise StorageError(
                f"{_shown(others[0])} claims study {study.study_name!r} at this moment, or has "
                f"died over it: run the same command again in {CLAIM_SECONDS / 60:.0f} minutes."
            )
        if others:
            time.sleep(random.uniform(0.0, _LONGEST_PAUSE_SECONDS))
    if marked != here:
        raise _elsewhere(study, str(marked))


def delete_with_files(study: optuna.Study, delete: Callable[[], None]) -> list[str]:
    """Delete a study, with its ledger and its checkpoints if the ledger is a file of its own.

    Returns:
        Folders and URLs whose checkpoints stay: a process trains the study, or they are where its
        user has said.

    Raises:
        StorageError: a process trains the study, whose storage may give its ids to others; or its
            ledger cannot be looked for now.
    """
    key, apart = known_key(study), not shares_its_ledger(study)
    is_file = apart and named_ledger(study) is None
    # Keys come out of a storage: one must not lead out of the folders.
    if is_file and (key is None or "/" in key or not _is_there(ledger_file(key))):
        key = None
    if key is not None and ids_return(study):
        _refuse_trained(study, key)
    if key is None or not is_file:
        delete()
        return []
    file, root, places = ledger_file(key), checkpoint_root(study), set[str]()
    with (
        contextlib.suppress(LedgerError),  # one that cannot be read is removed all the same
        contextlib.closing(open_ledger(f"sqlite:///{file}")) as ledger,
    ):
        places = {row.checkpoint.path.rsplit("/", 2)[0] for row in ledger.load_checkpoints(key)}
    delete()
    if remove_ledger(str(file), key):
        shutil.rmtree(root, ignore_errors=True)
        places.discard(str(root))
    return sorted(places)


def _is_there(file: Path) -> bool:
    """True if there is a file, and an error if nobody can tell."""
    try:  # not by ``exists``, which is False since Python 3.14 where a mount is away
        file.stat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _unreadable(file, error) from error
    return True


def _unreadable(file: Path, error: OSError) -> StorageError:
    return StorageError(
        f"A study without a database has its ledger by {file}, which cannot be read "
        f"({error.strerror or error}): see that it can be, and try again."
    )


def _refuse_trained(study: optuna.Study, key: str) -> None:
    """Raise a ``StorageError`` if a process trains a study whose ledger is in an SQLite file."""
    with (
        contextlib.suppress(LedgerError),  # what cannot be read is trained by nobody
        contextlib.closing(open_ledger(ledger_url(study))) as ledger,
    ):
        if ledger.is_locked(key, UNLOCK_SECONDS):
            raise StorageError(
                f"A process trains study {study.study_name!r}, or {checkpoint_root(study).parent} "
                "is another user's: stop it, or delete the study as that user."
            )


def _claimed(study: optuna.Study, here: str) -> list[str]:
    """Mark a study unless others claim it at this moment; return those others."""
    # Each host claims first and reads then: of two at least one sees the other.
    storage, study_id = study._storage, study._study_id
    storage.set_study_system_attr(study_id, _CLAIM + here, time.time())
    claims = storage.get_study_system_attrs(study_id)
    others = [
        name.removeprefix(_CLAIM)
        for name, since in claims.items()
        if name.startswith(_CLAIM) and name != _CLAIM + here and _stands(since)
    ]
    # A host sets its mark before it withdraws its claim, so the mark is read after the claims.
    if not others and not study.user_attrs.get(LEDGER_ATTRIBUTE):
        study.set_user_attr(LEDGER_ATTRIBUTE, here)
    storage.set_study_system_attr(study_id, _CLAIM + here, False)
    return others


def _stands(since: object) -> bool:
    """True for a claim, by its time, that is not withdrawn, and not of a host that has died."""
    return isinstance(since, float) and time.time() - since < CLAIM_SECONDS


def _here() -> str:
    """The name of this user's ledgers on this host, drawn once and kept beside them."""
    # Not the host's name: containers change it, and two users of a host have two ledgers.
    path = state_dir() / "ledgers" / "id"
    with only_here(), state_errors():
        try:
            name = path.read_text()
        except (FileNotFoundError, NotADirectoryError):
            name = ""
        except PermissionError:
            raise  # told what to set
        except OSError as error:
            raise _unreadable(path, error) from error
        if not name.strip():  # the disk was full, or the power was cut
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            name = f"{socket.gethostname()}:{path.parent} {uuid.uuid4().hex[:8]}"
            partial = path.with_suffix(".partial")
            partial.write_text(name)
            partial.replace(path)
        return name


def _shown(mark: str) -> str:
    """The host and folder of a mark, without what was drawn."""
    return mark.rpartition(" ")[0] or mark


def _elsewhere(study: optuna.Study, marked: str) -> StorageError:
    return StorageError(
        f"A study without a database has one ledger, and that of {study.study_name!r} is in "
        f"{_shown(marked)}: go on there. A study of several hosts is kept in "
        "PostgreSQL or MySQL, or begins with --ledger. If that ledger is lost, with all that was "
        f"suspended, call study.set_user_attr({LEDGER_ATTRIBUTE!r}, '') and begin again."
    )
