"""Journal of what the databases may not have of a trial: one file beside its checkpoints.

Its process may end or be killed, and the broker that has its reports and checkpoints may die before
they are in the ledger, or never get them at all; and Optuna's database may not answer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from pathlib import Path
from typing import Any

import msgspec

from optuna_hermes.broker._protocol import Report
from optuna_hermes.model import Checkpoint

NAME = "unconfirmed.msgpack"  # JSON has no number for a trial that diverged

log = logging.getLogger(__name__)

_changing = threading.Lock()
"""The connection's thread, the one that writes to Optuna and the training change the file.

Processes are not kept apart: a trial has one, or one that leaves and the next, and ``finish``
changes the file only once the trial is over.
"""


class Journal(msgspec.Struct, frozen=True, kw_only=True):
    """Values and checkpoints that may not be in a database.

    Args:
        at: Unix time to which the ages of ``reports`` refer.
        reports: those that may not be in the ledger.
        checkpoints: those that may not be in the ledger.
        unwritten: steps and values that are not in Optuna's tables.
    """

    at: float = 0.0
    reports: tuple[Report, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    unwritten: tuple[tuple[int, float], ...] = ()

    @property
    def newest_first(self) -> list[Checkpoint]:
        """The checkpoints, newest first; files are numbered in their order."""
        return sorted(self.checkpoints, key=lambda x: (x.units, Path(x.path).name), reverse=True)


def change(folder: Path, **parts: Any) -> None:
    """Write parts of the journal anew; the file goes when nothing is left in it."""
    file, partial = folder / NAME, folder / f"{NAME}.new"
    with _changing:
        # Read again: a process that leaves, and the next one of its trial, may both change it.
        found = find(folder)
        journal = msgspec.structs.replace(found, **parts)
        if not (journal.reports or journal.checkpoints or journal.unwritten):
            with contextlib.suppress(OSError):  # the next process would repeat what is there
                file.unlink(missing_ok=True)
        elif journal != found:
            try:
                partial.write_bytes(msgspec.msgpack.encode(journal))
                # Replaced in one step: a kill while writing must not lose what is there.
                os.replace(partial, file)
            except OSError as error:
                log.warning("%s cannot be written, so make room there: %s", file, error)
                with contextlib.suppress(OSError):
                    partial.unlink(missing_ok=True)


def find(folder: Path) -> Journal:
    """Return the journal of a trial, an empty one if there is none that can be read."""
    try:
        return msgspec.msgpack.decode((folder / NAME).read_bytes(), type=Journal)
    except (FileNotFoundError, NotADirectoryError):
        return Journal()
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        log.warning(
            "%s cannot be read, so units may be trained again, and `status` has values that "
            "Optuna misses: %s",
            folder / NAME,
            error,
        )
        return Journal()
