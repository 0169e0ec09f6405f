"""The ledger's contract, in prose and in types.

The ledger is what outlives every process: runs, reports, leases, checkpoints, a policy's memory
and events, in tables of their own beside Optuna's. It is a guest in the user's database: it
creates ``hermes_*`` tables and touches nothing else.

Rules every implementation keeps:

- A method returns only when its effect is durable and visible to other processes.
- ``commit_lease`` raises ``StaleEpochError`` and writes nothing unless the epoch is above every
  epoch that this ledger holds. So epochs only grow, and two brokers that race for one device
  cannot both win.
- ``save_run`` replaces the row of that study and number, or adds it.
- ``add_report`` keeps every report, also of a unit that is trained a second time after a crash;
  ``load_curves`` shows each unit once, as it was last reported.
- Inside of ``batch`` all this holds at the end of the block: what one thread writes in it becomes
  durable and visible together, or, if anything fails, not at all.
- Records come back as they went in: NaN and infinite values too.
- A study is named by its key, never by its name: a study that was deleted and made again under
  the same name has another key.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

from optuna_hermes.ledger._records import (
    CheckpointRecord,
    EventRecord,
    HostRecord,
    LeaseRecord,
    ReportRecord,
    RunRecord,
)
from optuna_hermes.model import Curve

__all__ = [
    "CheckpointRecord",
    "EventRecord",
    "HostRecord",
    "LeaseRecord",
    "Ledger",
    "ReportRecord",
    "RunRecord",
]


class Ledger(ABC):
    """Where a study's schedule is kept. See the rules at the top of this file."""

    @abstractmethod
    def batch(self) -> AbstractContextManager[None]:
        """Write all that this thread writes inside of the block together, for the cost of one."""

    @abstractmethod
    def save_run(self, run: RunRecord) -> None:
        """Add or replace the row of this study and number."""

    @abstractmethod
    def load_runs(self, study: str) -> list[RunRecord]:
        """Every run of a study, by number."""

    @abstractmethod
    def add_report(self, report: ReportRecord) -> None:
        """Add a report; earlier ones of the same unit stay."""

    @abstractmethod
    def load_curves(self, study: str) -> dict[int, Curve]:
        """The curve of every run that has reported, each unit as it was last reported."""

    @abstractmethod
    def last_values(self, study: str) -> dict[int, float]:
        """The last value of every curve of ``load_curves``."""

    @abstractmethod
    def last_epoch(self) -> int:
        """The highest epoch this ledger holds, 0 for an empty one."""

    @abstractmethod
    def commit_lease(self, lease: LeaseRecord) -> None:
        """Write a new lease.

        Raises:
            StaleEpochError: its epoch is not above every earlier one.
        """

    @abstractmethod
    def name_lease(self, epoch: int, number: int) -> None:
        """Say which trial the lease of a new trial went to."""

    @abstractmethod
    def end_lease(self, epoch: int, ended: float) -> None:
        """Close a lease; one that is closed already, or unknown, stays as it is."""

    @abstractmethod
    def load_leases(self, study: str | None = None) -> list[LeaseRecord]:
        """Leases of a study (or of all), by epoch."""

    @abstractmethod
    def save_checkpoint(self, checkpoint: CheckpointRecord) -> None:
        """Add a checkpoint; the run's older ones stay until ``drop_checkpoint``."""

    @abstractmethod
    def load_checkpoints(self, study: str, number: int | None = None) -> list[CheckpointRecord]:
        """Checkpoints of a study, or of one run, oldest first."""

    @abstractmethod
    def drop_checkpoint(self, study: str, path: str) -> None:
        """Forget a checkpoint whose file is gone; one that is unknown is no error."""

    @abstractmethod
    def load_memory(self, study: str) -> Any:
        """The policy's memory (JSON), None if there is none."""

    @abstractmethod
    def save_memory(self, study: str, memory: Any) -> None:
        """Replace the policy's memory."""

    @abstractmethod
    def add_event(self, event: EventRecord) -> None:
        """Add a line to the story."""

    @abstractmethod
    def load_events(self, study: str, number: int | None = None) -> list[EventRecord]:
        """The story of a study, or of one run, oldest first."""

    @abstractmethod
    def close(self) -> None:
        """Give back connections; the ledger is not used afterwards."""
