"""Claim of a study without a database by one ledger file, which lies in a user's state folder.

Several hosts may reach such a study's storage (a journal file, a gRPC proxy), but not the ledger:
without the claim two of them would each train every trial.
"""

from __future__ import annotations

import random
import socket
import time
import uuid

import optuna

from optuna_hermes._optuna._studies import only_here, shares_its_ledger, state_dir
from optuna_hermes.errors import StorageError

LEDGER_ATTRIBUTE = "hermes:ledger"
"""The user attribute of a study with the place of its ledger."""

MEETING_SECONDS = 10.0
"""Seconds in which hosts that claim a study at the same moment retry."""

_CLAIM = "hermes:ledger:"
_LONGEST_PAUSE_SECONDS = 0.5


def claim_ledger(study: optuna.Study) -> None:
    """Claim a study that has no database for the ledger of this host and user.

    Raises:
        StorageError: another ledger has claimed it.
    """
    if shares_its_ledger(study):
        return
    here = _here()
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
        f"{marked.rpartition(' ')[0]}: go on there, or keep a study of several hosts in PostgreSQL "
        "or MySQL. If that ledger is lost, with all that was suspended, call "
        f"study.set_user_attr({LEDGER_ATTRIBUTE!r}, '') and begin again."
    )
