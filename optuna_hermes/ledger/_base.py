"""The ledger's contract, in prose and in types.

The ledger keeps what has to outlive every process: trials, reports, leases, checkpoints,
a policy's memory and events, in tables of their own beside Optuna's. In the user's database it
creates ``hermes_*`` tables and changes nothing else.

Rules every implementation keeps:

- A method returns only when its effect is durable and visible to other processes.
- ``commit_lease`` raises ``StaleEpochError`` and writes nothing unless the epoch is above every
  epoch that this ledger holds. So epochs only grow, and two brokers that race for one device
  cannot both win.
- ``save_trial`` replaces the row of that study and number, or adds it.
- ``add_report`` keeps every report, also of a unit that is trained a second time after a crash;
  ``load_curves`` shows each unit once, as it was last reported.
- ``load_reports`` returns each report with its position, which grows in the order in which batches
  were written: a reader that goes on from the last position it read misses nothing.
- Inside of ``batch`` all this holds at the end of the block: all writes of the thread in it become
  durable and visible together, or, if anything fails, none.
- Records are loaded as they were saved, NaN and infinite values included.
- A study is identified by its key, not its name: a study that was deleted and created again under
  the same name has another key.

Brokers of several hosts may share a study. Each has a name that no broker had before, its
*instance*, and sends heartbeats with ``beat``. The age of a heartbeat is measured by the ledger's
own clock, so the clocks of hosts may differ.

- A trial belongs to one broker, its ``owner``, or has none. ``save_trial`` and ``commit_lease``
  raise ``NotOwnerError`` and write nothing if the row of the trial has another owner than the
  caller states. So a broker that was taken for dead and comes back cannot undo later writes.
- ``claim_trial`` alone gives an existing trial to another owner. It takes a waiting trial (pending
  or stored) without an owner, and any unfinished trial whose holder is gone. Of several brokers
  that claim a trial at the same time one wins.
- The holder of a trial is its owner; of a trial without one that is running or parked, its host. An
  owner is gone if it is unknown or forgotten, or its heartbeat is old enough. A host is gone if
  all of its brokers are.
- A broker gives a trial back by saving it with ``owner=None``.
- A broker on its own claims nothing and leaves every owner None.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any

from optuna_hermes.ledger._records import (
    DEAD_SECONDS,
    CheckpointRecord,
    EventRecord,
    HostRecord,
    LeaseRecord,
    ReportRecord,
    TrialRecord,
)
from optuna_hermes.model import Curve, Override


class Ledger(ABC):
    """Durable store of a study's schedule. See the rules at the top of this file."""

    @property
    @abstractmethod
    def shared(self) -> bool:
        """True if brokers of other hosts may use it too."""

    @abstractmethod
    def lock_study(self, study: str) -> None:
        """Lock a study against brokers of other processes, where they cannot share it.

        Raises:
            LedgerError: another process has it.
        """

    @abstractmethod
    def unlock_study(self, study: str) -> None:
        """Unlock a study; ``close`` does the same for all."""

    @abstractmethod
    def batch(self) -> AbstractContextManager[None]:
        """Combine all writes of this thread inside of the block into one transaction."""

    @abstractmethod
    def save_trial(self, trial: TrialRecord, *, by: str | None = None) -> None:
        """Add the row of this study and number, or replace it.

        Args:
            trial: the trial, with its owner from now on.
            by: its owner until now.

        Raises:
            NotOwnerError: its row has another owner.
        """

    @abstractmethod
    def load_trials(self, study: str) -> list[TrialRecord]:
        """All trials of a study, by number."""

    @abstractmethod
    def save_override(self, study: str, number: int, override: Override | None) -> None:
        """Save a user's override of a trial, None to remove it; an unknown trial is no error.

        It does not depend on the trial's owner, and ``save_trial`` leaves it as it is.
        """

    @abstractmethod
    def load_overrides(self, study: str) -> dict[int, Override]:
        """The users' overrides of a study's trials, by number; also of trials that are over."""

    @abstractmethod
    def add_report(self, report: ReportRecord) -> None:
        """Add a report; earlier ones of the same unit stay."""

    @abstractmethod
    def load_curves(self, study: str, numbers: Collection[int] | None = None) -> dict[int, Curve]:
        """The curves of all trials that have reported (or of these), each unit as last reported."""

    @abstractmethod
    def load_reports(self, study: str, *, after: int = 0) -> list[tuple[int, ReportRecord]]:
        """All reports of a study after a position, each with its position, in order of writing."""

    @abstractmethod
    def last_values(self, study: str) -> dict[int, float]:
        """The last value of every curve of ``load_curves``."""

    @abstractmethod
    def last_epoch(self) -> int:
        """The highest epoch this ledger holds, 0 for an empty one."""

    @abstractmethod
    def claim_trial(
        self, study: str, number: int, *, host: str, instance: str, dead_after_seconds: float
    ) -> TrialRecord | None:
        """Claim a trial for a broker, if it has no owner or its holder is gone.

        A trial that was taken from its holder is stored, or pending if it has no checkpoint, and
        its leases have ended.

        Args:
            study: the study's key.
            number: the trial's number.
            host: the broker's host.
            instance: the broker, which has called ``beat``.
            dead_after_seconds: age of a holder's heartbeat from which it is gone.

        Returns:
            The trial as it is now, also if it was this broker's before. None if the claim failed:
            the trial is unknown, finished or another's, or another transaction is writing it.
        """

    @abstractmethod
    def commit_lease(self, lease: LeaseRecord, *, limit: int | None = None) -> None:
        """Write a new lease.

        Args:
            lease: the lease; its owner is that of its trial.
            limit: the most trials of the study, over all hosts, None for no bound. It is checked
                for the lease of a new trial.

        Raises:
            StaleEpochError: its epoch is not above every earlier one.
            NotOwnerError: its trial has another owner.
            StudyFullError: the trials of the study, and the live leases of trials not yet created,
                have reached the limit.
        """

    @abstractmethod
    def name_lease(self, epoch: int, number: int) -> None:
        """Set the trial of a lease that was granted before its trial was created."""

    @abstractmethod
    def end_lease(self, epoch: int, ended: float) -> None:
        """End a lease; one that has ended already, or is unknown, stays as it is."""

    @abstractmethod
    def load_leases(
        self, study: str | None = None, *, live: bool = False, since: int = 0
    ) -> list[LeaseRecord]:
        """Leases by epoch.

        Args:
            study: the study's key, None for all studies.
            live: only leases that have not ended.
            since: only leases of this epoch and later ones.
        """

    @abstractmethod
    def save_checkpoint(self, record: CheckpointRecord) -> None:
        """Add a checkpoint; the trial's older ones stay until ``drop_checkpoint``."""

    @abstractmethod
    def load_checkpoints(self, study: str, number: int | None = None) -> list[CheckpointRecord]:
        """Checkpoints of a study, or of one trial, oldest first."""

    @abstractmethod
    def drop_checkpoint(self, study: str, path: str) -> None:
        """Remove the row of a checkpoint whose file is gone; an unknown one is no error."""

    @abstractmethod
    def load_memory(self, study: str) -> Any:
        """The policy's memory (JSON), None if there is none."""

    @abstractmethod
    def save_memory(self, study: str, memory: Any) -> None:
        """Replace the policy's memory."""

    @abstractmethod
    def add_event(self, event: EventRecord) -> None:
        """Add an event to the event log."""

    @abstractmethod
    def load_events(self, study: str, number: int | None = None) -> list[EventRecord]:
        """The events of a study, or of one trial, oldest first."""

    @abstractmethod
    def trim_events(self, study: str, before: float) -> int:
        """Remove a study's events that are older than a time; return their number."""

    @abstractmethod
    def beat(self, host: HostRecord) -> None:
        """Write a broker's heartbeat and load: add its row, or replace it."""

    @abstractmethod
    def load_hosts(self) -> list[HostRecord]:
        """All brokers that have sent a heartbeat and are not forgotten, by name."""

    @abstractmethod
    def forget_host(self, instance: str, *, dead_after_seconds: float) -> bool:
        """End the leases of a broker that is gone, and remove its row; its trials can be claimed.

        Args:
            instance: the broker; one that shuts down in order forgets itself.
            dead_after_seconds: least age of its heartbeat, 0.0 for any.

        Returns:
            True if it is gone.
        """

    @abstractmethod
    def load_studies(self) -> list[str]:
        """The keys of all studies with any row in the ledger, in order."""

    @abstractmethod
    def forget_study(self, study: str) -> None:
        """Remove all rows of a study; epochs still grow above those of its leases."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections; the ledger is not used afterwards."""


def live_hosts(ledger: Ledger) -> list[HostRecord]:
    """The brokers that share a ledger and whose last heartbeat is under ``DEAD_SECONDS`` old."""
    return [host for host in ledger.load_hosts() if host.age_seconds < DEAD_SECONDS]
