"""What a run has stored and told nobody for certain: kept beside its checkpoints.

Its process may end or be killed, and the broker that has heard it may die before it is in the
database, or hear nothing at all.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path

import msgspec

from optuna_hermes.broker._protocol import Report, Resume, SavedCheckpoint

NAME = "unkept.json"

log = logging.getLogger(__name__)


class Unkept(msgspec.Struct, frozen=True, kw_only=True):
    """Reports and checkpoints that may not be in the ledger, as of a time (Unix time)."""

    at: float
    reports: tuple[Report, ...]
    checkpoints: tuple[SavedCheckpoint, ...]

    @property
    def newest_first(self) -> list[SavedCheckpoint]:
        """The checkpoints, the one to go on from first; files are numbered in their order."""
        order = [(each.units, Path(each.path).name, each) for each in self.checkpoints]
        return [each for *_, each in sorted(order, key=lambda row: row[:2], reverse=True)]


def keep(folder: Path, said: Resume) -> None:
    """Put down what a run would tell the next broker."""
    card = Unkept(at=time.time(), reports=said.reports, checkpoints=said.checkpoints)
    partial = folder / f"{NAME}.new"
    try:
        partial.write_bytes(msgspec.json.encode(card))
        os.replace(partial, folder / NAME)
    except OSError as error:
        log.warning("%s cannot be written, so make room there: %s", folder / NAME, error)
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def find(folder: Path) -> Unkept | None:
    """What an earlier process has put down, None if there is nothing that can be read."""
    try:
        return msgspec.json.decode((folder / NAME).read_bytes(), type=Unkept)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        log.warning("%s cannot be read, so units may be trained again: %s", folder / NAME, error)
        return None


def forget(folder: Path) -> None:
    """The ledger has it all."""
    with contextlib.suppress(OSError):
        (folder / NAME).unlink(missing_ok=True)
