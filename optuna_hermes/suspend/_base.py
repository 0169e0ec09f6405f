"""What a training loop and whoever schedules it say to each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredState:
    """A checkpoint whose bytes are safe on disk (fsync, rename and directory fsync done).

    Args:
        path: absolute path of the file.
        units: units the run had reported when it was written.
        size_bytes: length of the file.
        sha256: hex digest of the file.
    """

    path: Path
    units: int
    size_bytes: int
    sha256: str


class Session(Protocol):
    """One run's side of its lease, as a training loop sees it.

    A loop reads ``must_yield`` after every batch (an attribute, nothing else). At the next clean
    point after it turned True the loop calls ``park``.
    """

    must_yield: bool
    checkpoint_dir: Path | None
    """Folder for this run's checkpoints; None if the run cannot leave its process."""

    checkpoints: tuple[StoredState, ...]
    """What the ledger knows of, newest first: where a run goes on from when its process is lost.

    Empty for a run that starts. It follows ``saved`` with a delay, and until then the files named
    here must stay.
    """

    def training(self, *, stores: bool) -> None:
        """The first batch since the grant begins; ``stores`` says whether the run can be stored."""

    def report(self, *, unit: int, step: int, value: float) -> None:
        """Say the value (lower is better) after ``unit`` units, counted from 1."""

    def beat(self, batches: int) -> None:
        """Say that the run makes progress; costs nothing when called more than once a second."""

    def saved(self, state: StoredState) -> None:
        """Say that a checkpoint is safe while the run goes on."""

    def park(self, store: Callable[[], StoredState] | None) -> None:
        """Give the device back by the tier the broker asked for, and wait for the next grant.

        Returns when the run may go on in this process.

        Args:
            store: writes a checkpoint and returns it; None if the run cannot be stored.

        Raises:
            Suspended: the run is on disk; the process must unwind.
        """
