"""Claim of a study without a database by one ledger: a file in a user's folder, or a database.

Several hosts may reach such a study's storage (a journal file, a gRPC proxy), but not a file that
is its ledger: without the claim two of them would each train every trial.
"""

from __future__ import annotations

import random
import socket
import time
import uuid

import optuna

from optuna_hermes._optuna._studies import (
    LEDGER_ATTRIBUTE,
    named_ledger,
    only_here,
    shares_its_ledger,
    state_dir,
)
from optuna_hermes.errors import InvalidInputError, StorageError

MEETING_SECONDS = 10.0
"""Seconds in which hosts that claim a study at the same moment retry."""

_CLAIM = "hermes:ledger:"
_LONGEST_PAUSE_SECONDS = 0.5


def claim_ledger(study: optuna.Study, url: str | None = None) -> None:
    """Claim a study that has no database for a ledger.

    Args:
        study: the study.
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
    here = url or named_ledger(study) or _here()
    end = time.monotonic() + MEETING_SECONDS
    while not (marked := study.user_attrs.get(LEDGER_ATTRIBUTE)):
        others = _claimed(study, here)
        if others and time.monotonic() > end:
            raise _elsewhere(study, others[0])
        if others:
            time.sleep(random.uniform(0.0, _LONGEST_PAUSE_SECONDS))
    if marked != here:
        raise _elsewhere(study, str(marked))


def _claimed(study: optuna.Study, here: str) -> list[str]:
    """Mark a study unless others claim it at this moment; return those others."""
    # Each host claims first and reads then: of two at least one sees the other.
    storage, study_id = study._storage, study._study_id
    storage.set_study_system_attr(study_id, _CLAIM + here, True)
    claims = storage.get_study_system_attrs(study_id)
    others = [
        name.removeprefix(_CLAIM)
        for name, stands in claims.items()
        if name.startswith(_CLAIM) and stands and name != _CLAIM + here
    ]
    # A host sets its mark before it withdraws its claim, so the mark is read after the claims.
    if not others and not study.user_attrs.get(LEDGER_ATTRIBUTE):
        study.set_user_attr(LEDGER_ATTRIBUTE, here)
    storage.set_study_system_attr(study_id, _CLAIM + here, False)
    return others


def _here() -> str:
    """The name of this user's ledgers on this host, drawn once and kept beside them."""
    # Not the host's name: containers change it, and two users of a host have two ledgers.
    path = state_dir() / "ledgers" / "id"
    with only_here():
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.write_text(f"{socket.gethostname()}:{path.parent} {uuid.uuid4().hex[:8]}")
        return path.read_text()


def _elsewhere(study: optuna.Study, marked: str) -> StorageError:
    return StorageError(
        f"A study without a database has one ledger, and that of {study.study_name!r} is in "
        f"{marked.rpartition(' ')[0] or marked}: go on there. A study of several hosts is kept in "
        "PostgreSQL or MySQL, or begins with --ledger. If that ledger is lost, with all that was "
        f"suspended, call study.set_user_attr({LEDGER_ATTRIBUTE!r}, '') and begin again."
    )
