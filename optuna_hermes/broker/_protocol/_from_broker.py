"""Messages of the broker to a client."""

from __future__ import annotations

from optuna_hermes.broker._protocol._status import BrokerStatus, DeviceStatus, StudyStatus
from optuna_hermes.broker._protocol._values import Message
from optuna_hermes.model import Checkpoint, TierName


class Welcome(Message, frozen=True, kw_only=True):
    """Answer to ``Hello``; ``instance`` is the broker, as the ledger knows it.

    ``devices`` is the specification that it was started with, ``power`` its commands for devices.
    In the ``background`` it was started by a client. ``visible`` is its ``CUDA_VISIBLE_DEVICES``.
    """

    pid: int
    instance: str
    devices: str
    device_ids: tuple[str, ...]
    power: tuple[str, ...] = ()
    background: bool = False
    visible: str | None = None


class Refused(Message, frozen=True, kw_only=True):
    """The last message cannot be served; ``reason`` says what to do.

    ``driver_pid`` is the process for which the study is served, None if that is not the reason.
    ``taken`` says that the trial is another host's, which alone may end it in Optuna, and ``again``
    that another process of this host trains it, or it has ended.
    """

    reason: str
    driver_pid: int | None = None
    taken: bool = False
    again: bool = False


class Grant(Message, frozen=True, kw_only=True):
    """A lease. ``number`` is None for a new trial; ``checkpoints`` are newest first.

    ``device_seconds`` is what the trial has had until now. ``alone`` says that no other process of
    this broker holds memory of the devices. ``lost`` are names under which a process that has died
    may have created the trial. ``listed_number`` is the waiting trial that shall be taken, None
    for the first one. ``shown`` are the environment variables that show devices of this broker,
    each with the name of one of the lease's, or an empty one where it has none. ``batch_size`` is
    what its batches shall have from now on, None as before.
    """

    epoch: int
    devices: tuple[str, ...]
    shown: tuple[tuple[str, str], ...] = ()
    alone: bool = True
    number: int | None = None
    trial_id: int | None = None
    checkpoints: tuple[Checkpoint, ...] = ()
    device_seconds: float = 0.0
    # The trial that one of them has created, if there is one, is this lease's.
    lost: tuple[str, ...] = ()
    listed_number: int | None = None
    batch_size: int | None = None


class SetUp(Message, frozen=True, kw_only=True):
    """A worker creates a trial and sets it up, without a device; its answer is ``Begin``.

    ``name`` is that of the opening; ``lost`` and ``listed_number`` are as in ``Grant``.
    """

    name: str
    lost: tuple[str, ...] = ()
    listed_number: int | None = None


class Resize(Message, frozen=True, kw_only=True):
    """The trial keeps its device; its batches shall have another size from the next clean point."""

    epoch: int
    batch_size: int


class Yield(Message, frozen=True, kw_only=True):
    """Give the device back at the next clean point, by this tier."""

    epoch: int
    tier: TierName


class Move(Message, frozen=True, kw_only=True):
    """A parked trial goes to another tier; with ``disk`` its process leaves then.

    ``resident`` brings it back to its device from host memory, while another still trains there.
    The answer is ``TierChanged``, also when it could not; ``epoch`` is of its last lease.
    """

    epoch: int
    tier: TierName


class Prepare(Message, frozen=True, kw_only=True):
    """A worker that waits will probably get this trial: it may read a checkpoint ahead of time."""

    number: int
    checkpoints: tuple[Checkpoint, ...]


class CheckpointAck(Message, frozen=True, kw_only=True):
    """A checkpoint is in the ledger: the ones before it are not needed any more."""

    path: str


class LeaseEndAck(Message, frozen=True, kw_only=True):
    """The ledger has the end of a lease, and all reports under it: its process may go."""

    epoch: int


class ReportAck(Message, frozen=True, kw_only=True):
    """A report is taken in: its trial goes on, unless a ``Yield`` came before this."""

    epoch: int


class Accepted(Message, frozen=True, kw_only=True):
    """An override or a policy holds from now on; ``waits`` says that a trial has still to stop."""

    waits: bool = False


class Dismiss(Message, frozen=True, kw_only=True):
    """A worker that waits, with a trial that has not begun or without one, is to leave."""


class Status(Message, frozen=True, kw_only=True):
    """Answer to ``GetStatus``."""

    status: BrokerStatus


class StudyChanged(Message, frozen=True, kw_only=True):
    """Something has changed that the driver of a study steers by, or shows; see ``WatchStudy``.

    Args:
        study: without its trials.
        devices: all of the broker's.
        leased: how many devices the study's leases have: so much device time it has in a second.
        is_answer: it is the answer to a ``WatchStudy`` that has asked for the present status.
    """

    study: StudyStatus
    devices: tuple[DeviceStatus, ...]
    leased: int
    is_answer: bool = False


FromBroker = (
    Welcome
    | Refused
    | Grant
    | SetUp
    | Resize
    | Yield
    | Move
    | Prepare
    | CheckpointAck
    | LeaseEndAck
    | ReportAck
    | Accepted
    | Dismiss
    | Status
    | StudyChanged
)
