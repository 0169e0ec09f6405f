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
- ``load_reports`` tells each report with its position, which grows in the order in which batches
  were written: whoever has read up to one reads on from there, and misses nothing.
- Inside of ``batch`` all this holds at the end of the block: what one thread writes in it becomes
  durable and visible together, or, if anything fails, not at all.
- Records come back as they went in: NaN and infinite values too.
- A study is named by its key, never by its name: a study that was deleted and made again under
  the same name has another key.

Brokers of several hosts may share a study. Each has a name that no broker had before, its
*instance*, and says with ``beat`` that it lives. How long a broker was silent is measured by the
ledger's own clock, so the clocks of hosts may differ.

- A run belongs to one broker, its ``owner``, or to nobody. ``save_run`` and ``commit_lease`` raise
  ``NotOwnerError`` and write nothing if the row of the run has another owner than they say. So a
  broker that was thought dead and comes back cannot undo what was done since.
- ``claim_run`` alone gives a run that is there to another owner. It takes a run that waits
  (pending or stored) and is nobody's, and any unfinished run whose holder is gone. Of several
  brokers that claim a run at the same time one wins.
- The holder of a run is its owner; of a run without one that is running or parked, its host. An
  owner is gone if it is unknown or forgotten, or was silent for long enough. A host is gone if
  none of its brokers was heard of.
- A broker gives a run back by saving it with ``owner=None``.
- A broker on its own claims nothing and leaves every owner None.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
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
from optuna_hermes.model import Curve, Wish

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

    @property
    @abstractmethod
    def shared(self) -> bool:
        """Whether brokers of other hosts may be at it too."""

    @abstractmethod
    def lock_study(self, study: str) -> None:
        """Keep brokers of other processes from a study, where they cannot share it.

        Raises:
            LedgerError: another process has it.
        """

    @abstractmethod
    def unlock_study(self, study: str) -> None:
        """Let other processes have a study; ``close`` does the same for all."""

    @abstractmethod
    def batch(self) -> AbstractContextManager[None]:
        """Write all that this thread writes inside of the block together, for the cost of one."""

    @abstractmethod
    def save_run(self, run: RunRecord, *, by: str | None = None) -> None:
        """Add the row of this study and number, or replace it.

        Args:
            run: the run, with the owner that it has from now on.
            by: the owner that it has until now.

        Raises:
            NotOwnerError: its row has another owner.
        """

    @abstractmethod
    def load_runs(self, study: str) -> list[RunRecord]:
        """Every run of a study, by number."""

    @abstractmethod
    def save_wish(self, study: str, number: int, wish: Wish | None) -> None:
        """Say what people want of a run, None for nothing; an unknown one is no error.

        A wish is nobody's: whoever owns the run keeps it, and ``save_run`` leaves it as it is.
        """

    @abstractmethod
    def load_wishes(self, study: str) -> dict[int, Wish]:
        """What people want of runs of a study, by their numbers; also of runs that are over."""

    @abstractmethod
    def add_report(self, report: ReportRecord) -> None:
        """Add a report; earlier ones of the same unit stay."""

    @abstractmethod
    def load_curves(self, study: str, numbers: Collection[int] | None = None) -> dict[int, Curve]:
        """The curve of every run that has reported (or of these), each unit as last reported."""

    @abstractmethod
    def load_reports(self, study: str, *, after: int = 0) -> list[tuple[int, ReportRecord]]:
        """Every report of a study after a position, each with its own, as they were written."""

    @abstractmethod
    def last_values(self, study: str) -> dict[int, float]:
        """The last value of every curve of ``load_curves``."""

    @abstractmethod
    def last_epoch(self) -> int:
        """The highest epoch this ledger holds, 0 for an empty one."""

    @abstractmethod
    def claim_run(
        self, study: str, number: int, *, host: str, instance: str, dead_after_seconds: float
    ) -> RunRecord | None:
        """Take a run for a broker, if it is nobody's or its holder is gone.

        A run that was taken from its holder is stored, or pending if it has no checkpoint, and its
        leases have ended.

        Args:
            study: the study's key.
            number: the trial's number.
            host: where the broker is.
            instance: the broker, which has called ``beat``.
            dead_after_seconds: how long a holder must have been silent.

        Returns:
            The run as it is now, also if it was this broker's before. None if it was not won: it is
            unknown, finished or another's, or somebody is just writing it.
        """

    @abstractmethod
    def commit_lease(self, lease: LeaseRecord, *, limit: int | None = None) -> None:
        """Write a new lease.

        Args:
            lease: the lease; its owner is that of its run.
            limit: how many runs the study shall have, None for no bound. It counts for the lease
                of a new trial, over all hosts.

        Raises:
            StaleEpochError: its epoch is not above every earlier one.
            NotOwnerError: its run has another owner.
            StudyFullError: the runs of the study, and the live leases from which further ones will
                come, have reached the limit.
        """

    @abstractmethod
    def name_lease(self, epoch: int, number: int) -> None:
        """Say which trial the lease of a new trial went to."""

    @abstractmethod
    def end_lease(self, epoch: int, ended: float) -> None:
        """Close a lease; one that is closed already, or unknown, stays as it is."""

    @abstractmethod
    def load_leases(
        self, study: str | None = None, *, live: bool = False, since: int = 0
    ) -> list[LeaseRecord]:
        """Leases by epoch.

        Args:
            study: whose, None for those of all.
            live: only those that are not over.
            since: only of this epoch and later ones.
        """

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
    def trim_events(self, study: str, before: float) -> int:
        """Remove the lines of a study's story that are older than a time; how many there were."""

    @abstractmethod
    def beat(self, host: HostRecord) -> None:
        """Say that a broker lives, and how busy it is: add its row, or replace it."""

    @abstractmethod
    def load_hosts(self) -> list[HostRecord]:
        """Every broker that was heard of and not forgotten, by name."""

    @abstractmethod
    def forget_host(self, instance: str, *, dead_after_seconds: float) -> bool:
        """End the leases of a broker that is gone, and forget it; its runs can be claimed.

        Args:
            instance: the broker; one that leaves in order forgets itself.
            dead_after_seconds: how long it must have been silent, 0.0 for not at all.

        Returns:
            Whether it is gone.
        """

    @abstractmethod
    def load_studies(self) -> list[str]:
        """The keys of all studies that the ledger knows anything of, in order."""

    @abstractmethod
    def forget_study(self, study: str) -> None:
        """Remove all that is known of a study; epochs still grow above those of its leases."""

    @abstractmethod
    def close(self) -> None:
        """Give back connections; the ledger is not used afterwards."""
