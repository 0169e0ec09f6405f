"""What happens to a broker, and what it does about it: the two alphabets of ``_state``, pure.

Commands that concern the ledger are its own records: a ``LeaseRecord`` means "commit this lease".
Whoever carries commands out has all records of an answer written, in order, and holds back each
grant of it, and each ``Kept``, until their record is in the ledger. No other message waits for a
database.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from optuna_hermes.broker._devices._xid import Xid
from optuna_hermes.broker._holder import Holder
from optuna_hermes.broker._protocol import FromBroker, FromClient, OpenStudy, Register, Resume
from optuna_hermes.ledger._base import (
    CheckpointRecord,
    EventRecord,
    HostRecord,
    LeaseRecord,
    ReportRecord,
    RunRecord,
)
from optuna_hermes.model import Curve, Device, Wish


@dataclass(frozen=True, kw_only=True, slots=True)
class Connected:
    """A client has said hello; ``connection`` is a number of the server's, ``pid`` is verified.

    ``started`` is when the process did, as its kernel counts: nobody else has both.
    """

    connection: int
    pid: int
    role: str
    started: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """A process that lives and was served by the broker before this one.

    Its end is a ``Disconnected``, as if it had this ``connection``; it may come back by another.
    """

    connection: int
    holder: Holder


@dataclass(frozen=True, kw_only=True, slots=True)
class Disconnected:
    """A client is gone, in peace or not.

    ``more`` says that another's end is told next: what devices do is decided after the last one.
    """

    connection: int
    more: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """A message that needs nothing from outside."""

    connection: int
    message: FromClient


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyRead:
    """``OpenStudy``, ``Register`` or ``Resume``, with what the ledger knows of the study.

    Args:
        last_epoch: the highest one there was.
        leases: those that nobody has ended, of any host.
        shared: whether brokers of other hosts may be at the study too.
        hosts: the brokers that are heard of.
    """

    connection: int
    message: OpenStudy | Register | Resume
    last_epoch: int = 0
    leases: tuple[LeaseRecord, ...] = ()
    runs: tuple[RunRecord, ...] = ()
    curves: Mapping[int, Curve] = field(default_factory=dict)
    checkpoints: tuple[CheckpointRecord, ...] = ()
    wishes: Mapping[int, Wish] = field(default_factory=dict)
    memory: Any = None
    shared: bool = False
    hosts: tuple[HostRecord, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Refreshed:
    """What has become of a study that other hosts are at too, read after all that was written.

    Args:
        study: its key.
        last_epoch: as of ``StudyRead``.
        leases: as of ``StudyRead``.
        hosts: as of ``StudyRead``.
        runs: those of others, and of nobody, that have changed.
        curves: of these runs.
        checkpoints: of these runs.
        wishes: of all runs; None if they have changed here since they were asked for.
    """

    study: str
    last_epoch: int
    leases: tuple[LeaseRecord, ...] = ()
    hosts: tuple[HostRecord, ...] = ()
    runs: tuple[RunRecord, ...] = ()
    wishes: Mapping[int, Wish] | None = None
    curves: Mapping[int, Curve] = field(default_factory=dict)
    checkpoints: tuple[CheckpointRecord, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Outrun:
    """Another broker was faster: nothing is wrong, but these were not written.

    Args:
        study: its key.
        epochs: leases that were never granted, and what was claimed for them.
        numbers: runs that belong to others, or are not as they were thought to be.
        paths: checkpoints of these runs, which count no more.
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
class DevicesPolled:
    """What the devices look like; ``free`` says only that no stranger is on them.

    Args:
        devices: as they are now.
        heard: what their driver has reported since the last time.
    """

    devices: tuple[Device, ...]
    heard: tuple[Xid, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class WritesFailed:
    """The ledger refuses what waiting does not mend: the study cannot go on.

    Args:
        epochs: leases that were never granted.
        reason: for people.
        study: whose records they are, if there is no lease among them.
        paths: checkpoints that the ledger does not know.
    """

    epochs: tuple[int, ...]
    reason: str
    study: str | None = None
    paths: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerAway:
    """The database of these studies cannot be reached: what is to be written waits.

    Args:
        studies: their keys.
        reason: for people.
        held: epochs of leases that are not in the ledger yet, so that nobody has heard of them.
        unasked: epochs of leases whose holders will not hear that they are to leave.
    """

    studies: tuple[str, ...]
    reason: str
    held: tuple[int, ...] = ()
    unasked: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerBack:
    """The database of these studies answers again; leases that were held have been granted."""

    studies: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerSwitched:
    """The command of a ``SwitchPower`` has ended; ``problem`` says why in vain, empty if not."""

    device: str
    up: bool
    seconds: float = 0.0
    problem: str = ""


Activity = Literal["works", "idle", "stopped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """What silent workers do, by their connections; see ``State.silent``."""

    activities: Mapping[int, Activity]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Connected
    | Expected
    | Disconnected
    | Received
    | StudyRead
    | Refreshed
    | DevicesPolled
    | Outrun
    | WritesFailed
    | LedgerAway
    | LedgerBack
    | PowerSwitched
    | Observed
    | Tick
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    """Give a client this message."""

    connection: int
    message: FromBroker


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
class NameLease:
    """The lease of a new trial went to this one."""

    study: str
    epoch: int
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EndLease:
    """Close a lease in the ledger; ``ended`` is wall clock seconds."""

    study: str
    epoch: int
    ended: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """Take a run for this broker, if it is still as it was after so many ``slices``."""

    study: str
    number: int
    slices: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ForgetBroker:
    """Another broker of this study has been silent for too long."""

    study: str
    instance: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DropCheckpoint:
    """Forget a checkpoint whose file the run has replaced."""

    study: str
    path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveMemory:
    """Keep the policy's memory."""

    study: str
    memory: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveWish:
    """Keep what people want of a run; None if nothing."""

    study: str
    number: int
    wish: Wish | None


Write = (
    RunRecord
    | ReportRecord
    | LeaseRecord
    | CheckpointRecord
    | EventRecord
    | Claim
    | NameLease
    | EndLease
    | ForgetBroker
    | DropCheckpoint
    | SaveMemory
    | SaveWish
)
Deed = Send | Kill | Withdraw | SwitchPower
"""What is done, and not written."""
Command = Write | Deed
