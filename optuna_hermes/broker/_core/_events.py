"""Events that come to the broker, and the commands with which the broker answers. Pure.

Commands that concern the ledger are its own records: a ``LeaseRecord`` means "commit this lease".
The server has all records of an answer written, in order. It holds back each ``Grant``,
``CheckpointAck`` and ``LeaseEndAck`` until its record is in the ledger, and each ``Yield`` until
the database answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from optuna_hermes.broker._protocol import FromBroker, FromClient, OpenStudy, Reattach, Register
from optuna_hermes.broker._served_process import ServedProcess
from optuna_hermes.ledger._records import (
    CheckpointRecord,
    EventRecord,
    HostRecord,
    LeaseRecord,
    ReportRecord,
    TrialRecord,
)
from optuna_hermes.model import Curve, Device, Override

if TYPE_CHECKING:
    from optuna_hermes.broker._devices._xid import Xid


class Event:
    """Something that comes to the broker."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Connected(Event):
    """A client has said hello; ``connection`` is a number of the server's, ``pid`` is verified.

    ``started`` is when the process did, as its kernel counts: no other process has both.
    """

    connection: int
    pid: int
    role: str
    started: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessExpected(Event):
    """A living process that was served by the broker before this one.

    Its end is a ``Disconnected``, as if it had this ``connection``; it may come back by another.
    """

    connection: int
    holder: ServedProcess


@dataclass(frozen=True, kw_only=True, slots=True)
class Disconnected(Event):
    """Clients that were seen to leave at one moment are gone, with or without notice."""

    connections: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Received(Event):
    """A message that needs nothing from outside."""

    connection: int
    message: FromClient


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyRead(Event):
    """``OpenStudy``, ``Register`` or ``Reattach``, with what the ledger knows of the study.

    Args:
        last_epoch: the highest one there was.
        leases: those that have not ended, of any host.
        shared: whether brokers of other hosts may be at the study too.
        hosts: the brokers that the ledger knows.
    """

    connection: int
    message: OpenStudy | Register | Reattach
    last_epoch: int = 0
    leases: tuple[LeaseRecord, ...] = ()
    trials: tuple[TrialRecord, ...] = ()
    curves: Mapping[int, Curve] = field(default_factory=dict)
    checkpoints: tuple[CheckpointRecord, ...] = ()
    overrides: Mapping[int, Override] = field(default_factory=dict)
    memory: Any = None
    shared: bool = False
    hosts: tuple[HostRecord, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Refreshed(Event):
    """Changes of a study that other hosts share, read after all that was written.

    Args:
        last_epoch, leases, hosts: as of ``StudyRead``.
        trials: those of others, or without an owner, that have changed.
        curves, checkpoints: of these trials.
        overrides: of trials that have changed, by their numbers; None for no override.
        gone: trials whose rows were removed.
    """

    study: str
    last_epoch: int
    leases: tuple[LeaseRecord, ...] = ()
    hosts: tuple[HostRecord, ...] = ()
    trials: tuple[TrialRecord, ...] = ()
    overrides: Mapping[int, Override | None] = field(default_factory=dict)
    gone: tuple[int, ...] = ()
    curves: Mapping[int, Curve] = field(default_factory=dict)
    checkpoints: tuple[CheckpointRecord, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimConflict(Event):
    """Claim conflict: another broker was faster. Nothing is wrong, but these were not written.

    Args:
        epochs: leases that were never granted, and what was claimed for them.
        numbers: trials that belong to others, or are not as they were thought to be.
        paths: checkpoints of these trials, which count no more.
        full: there is room for no further trial.
        last_epoch: the highest epoch there was.
    """

    study: str
    epochs: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    paths: tuple[str, ...] = ()
    full: bool = False
    last_epoch: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicesPolled(Event):
    """Reading of the devices; ``free`` says only that no stranger is on them.

    The driver has reported the XIDs since the last time.
    """

    devices: tuple[Device, ...]
    xids: tuple[Xid, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class WritesFailed(Event):
    """The ledger refuses records, and waiting does not mend it: the study cannot go on.

    Args:
        epochs: leases that were never granted.
        paths: checkpoints that the ledger does not know.
    """

    study: str
    reason: str
    epochs: tuple[int, ...] = ()
    paths: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class OutageBegan(Event):
    """Outage: the database of these studies cannot be reached, and records wait.

    Args:
        uncommitted: epochs of leases that are not in the ledger yet: their grants are not sent.
        unsent_yields: epochs of leases whose yields will not be sent.
    """

    studies: tuple[str, ...]
    reason: str
    uncommitted: tuple[int, ...] = ()
    unsent_yields: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class OutageEnded(Event):
    """End of an outage: the database answers; leases that were uncommitted have been granted."""

    studies: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerSwitched(Event):
    """The command of a ``SwitchPower`` has ended; ``problem`` is why it failed, empty if not."""

    device: str
    up: bool
    seconds: float = 0.0
    problem: str = ""


Activity = Literal["works", "idle", "stopped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed(Event):
    """Activities of silent workers, by their connections; see ``EventHandler.silent``."""

    activities: Mapping[int, Activity]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick(Event):
    """Time has passed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    """Send a client this message; first the ``database`` of the study that is named must answer."""

    connection: int
    message: FromBroker
    database: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """SIGKILL a worker; its end is seen as ``Disconnected``."""

    connection: int
    pid: int
    reason: str = "it did not answer in time"


@dataclass(frozen=True, kw_only=True, slots=True)
class Withdraw:
    """Never send the grant of this lease, which waits for its record."""

    epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SwitchPower:
    """Run the command that powers a device up, or down; its end is a ``PowerSwitched``."""

    device: str
    up: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitTrials:
    """Bound how many trials a shared ledger may come to know of a study; None removes the bound."""

    study: str
    limit: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class NameLease:
    """Name the trial that the lease of a new one went to."""

    study: str
    epoch: int
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EndLease:
    """Close a lease in the ledger; ``ended`` is as for ``Ledger.end_lease``."""

    study: str
    epoch: int
    ended: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """Claim a trial for this broker, if it is still as it was after so many ``slices``."""

    study: str
    number: int
    slices: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ForgetBroker:
    """Remove another broker of this study, which has been silent for too long."""

    study: str
    instance: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DropCheckpoint:
    """Forget a checkpoint whose file the trial has replaced."""

    study: str
    number: int
    path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveMemory:
    """Save the policy's memory, as ``Study.saved_memory`` has it."""

    study: str
    memory: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOverride:
    """Save the override of a trial; None removes it."""

    study: str
    number: int
    override: Override | None


Write = (
    TrialRecord
    | ReportRecord
    | LeaseRecord
    | CheckpointRecord
    | EventRecord
    | LimitTrials
    | Claim
    | NameLease
    | EndLease
    | ForgetBroker
    | DropCheckpoint
    | SaveMemory
    | SaveOverride
)
Effect = Send | Kill | Withdraw | SwitchPower
"""Commands that are carried out, and not written."""
Command = Write | Effect
