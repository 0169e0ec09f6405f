"""Journal of reports and checkpoints that the ledger may not have, beside a trial's checkpoints.

Its process may end or be killed, and the broker that has them may die before they are in the
database, or never get them at all.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path

import msgspec

from optuna_hermes.broker._protocol import Report, Resume
from optuna_hermes.model import Checkpoint

NAME = "unconfirmed.msgpack"  # JSON has no number for a trial that diverged

log = logging.getLogger(__name__)


class Journal(msgspec.Struct, frozen=True, kw_only=True):
    """Reports and checkpoints that may not be in the ledger, as of ``at`` (Unix time)."""

    at: float
    reports: tuple[Report, ...]
    checkpoints: tuple[Checkpoint, ...]

    @property
    def newest_first(self) -> list[Checkpoint]:
        """The checkpoints, newest first; files are numbered in their order."""
        order = [(each.units, Path(each.path).name, each) for each in self.checkpoints]
        return [each for *_, each in sorted(order, key=lambda row: row[:2], reverse=True)]


def keep(folder: Path, resume: Resume) -> None:
    """Write down what the next broker would be sent."""
    journal = Journal(at=time.time(), reports=resume.reports, checkpoints=resume.checkpoints)
    partial = folder / f"{NAME}.new"
    try:
        partial.write_bytes(msgspec.msgpack.encode(journal))
        os.replace(partial, folder / NAME)
    except OSError as error:
        log.warning("%s cannot be written, so make room there: %s", folder / NAME, error)
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def find(folder: Path) -> Journal | None:
    """Return the journal of an earlier process, None if there is none that can be read."""
    try:
        return msgspec.msgpack.decode((folder / NAME).read_bytes(), type=Journal)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        log.warning("%s cannot be read, so units may be trained again: %s", folder / NAME, error)
        return None


def forget(folder: Path) -> None:
    """Remove the journal: the ledger has all of it."""
    with contextlib.suppress(OSError):
        (folder / NAME).unlink(missing_ok=True)
