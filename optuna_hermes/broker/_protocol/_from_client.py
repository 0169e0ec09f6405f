"""Messages of a client to the broker."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from optuna_hermes.broker._protocol._values import (
    Ending,
    Key,
    Message,
    Numbers,
    Params,
    StudySpec,
)
from optuna_hermes.model import BatchSizes, Checkpoint, Count, OverheadKind, Seconds, TierName


class Hello(Message, frozen=True, kw_only=True):
    """First message of every connection."""

    version: int
    role: str  # "driver", "worker", "plain" or "viewer"


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of earlier brokers for a driver; see ``Study``."""

    switches: Count = 0
    overhead_seconds: dict[OverheadKind, Seconds] = msgspec.field(default_factory=dict)
    spent_seconds: Seconds = 0.0


class OpenStudy(Message, frozen=True, kw_only=True):
    """A driver takes charge of a study: its live trials are read from the ledger.

    Args:
        limit: how many trials the study shall have in the end, over all hosts; None for no bound.
        max_alive: worker processes the driver keeps alive.
        fixed: whether the trials that may still be created are a list known beforehand.
        ended: trials that Optuna knows to be finished though the ledger may not.
        adopted: trials (number to trial id) that were created but never reached the ledger.
        foreign: the numbers of trials that have begun, and that the ledger does not know.
        waiting: the numbers of trials that have not begun.
        counted: None from a driver that comes anew.
        seconds_left: after which the driver has all trials suspended, None for no such time.
        device_seconds: of its leases since it came after which it does so, None for no bound.
    """

    study: StudySpec
    limit: Count | None
    max_alive: Count
    fixed: bool = False
    ended: dict[Count, Ending] = msgspec.field(default_factory=dict)
    adopted: dict[Count, Count] = msgspec.field(default_factory=dict)
    foreign: tuple[Count, ...] = ()
    waiting: tuple[Count, ...] = ()
    counted: Counted | None = None
    seconds_left: Seconds | None = None
    device_seconds: Seconds | None = None


class Describe(Message, frozen=True, kw_only=True):
    """The hyper-parameters of trials of the study opened next, which may not train for a while."""

    study: Key
    params: dict[Count, Params]


class Ready(Message, frozen=True, kw_only=True):
    """A worker process of this study waits for a trial."""

    study: Key


class Register(Message, frozen=True, kw_only=True):
    """A trial that exists already (plain Optuna) asks for its first lease."""

    study: StudySpec
    number: Count
    trial_id: Count


class Begin(Message, frozen=True, kw_only=True):
    """The lease of a new trial (or of a stored trial) has found its trial.

    With epoch 0 there is no lease yet: the worker has created the trial that it sets up.
    """

    epoch: Count
    number: Count
    trial_id: Count


class FirstBatch(Message, frozen=True, kw_only=True):
    """The first batch since the grant begins: what came before was the cost of switching.

    ``can_store`` says that the trial can be suspended to disk; ``late`` that it has trained
    since, as where an objective only calls ``should_prune``: when that began is not known.
    """

    epoch: Count
    can_store: bool
    late: bool = False
    # Only now: an objective suggests them after the grant.
    params: Params = msgspec.field(default_factory=dict)


class Report(Message, frozen=True, kw_only=True):
    """The trial's value (lower is better) after ``unit`` units, counted from 1.

    ``units_left`` is None where it is unknown; ``params`` are sent once.
    """

    epoch: Count
    unit: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    step: Count
    value: float
    units_left: Count | None = None
    params: Params = msgspec.field(default_factory=dict)
    # Above 0 where there was no broker to send it to at first.
    age_seconds: Seconds = 0.0


class Beat(Message, frozen=True, kw_only=True):
    """The trial makes progress (at most once a second), with this peak of device memory.

    ``sizes`` are said where its batches, or its devices, may change: also at first, and after a
    change.
    """

    epoch: Count
    memory_bytes: Count | None = None
    sizes: BatchSizes | None = None


class Saved(Message, frozen=True, kw_only=True):
    """A checkpoint is safe; the trial goes on, after it stood still for it for so long."""

    epoch: Count
    checkpoint: Checkpoint
    blocked_seconds: Seconds = 0.0


class TierChanged(Message, frozen=True, kw_only=True):
    """The trial has stopped and left its device, or has gone from one tier to another.

    With tier ``disk`` the process leaves after this message.

    Args:
        held_bytes: device memory it still holds, None if unknown.
        host_bytes: host memory it has taken for what it moved off the device.
        can_store, can_offload: it can go on to disk, or to host memory, from here.
    """

    epoch: Count
    tier: TierName
    suspend_seconds: Seconds
    checkpoint: Checkpoint | None = None
    held_bytes: Count | None = None
    host_bytes: Count = 0
    can_store: bool = False
    can_offload: bool = False


class Reattach(Message, frozen=True, kw_only=True):
    """A process whose broker died reports to the next one what it has, and goes on.

    Its last messages under this epoch may be known already. It goes on unless it is ``Refused``:
    then the trial is not its own any more.

    Args:
        number: None for a new trial that has not begun.
        epoch: of its last lease.
        devices: which that lease was for.
        held_seconds: since that lease was granted.
        device_seconds: device time the trial has had, under this lease too.
        training: its first batch has begun.
        requested_tier: by which it was asked to leave, or to which it moves while it is parked.
        can_store: it can be suspended to disk.
        need_bytes: the most device memory it has needed until now, None if unknown.
        reports: the last ones, oldest first.
        checkpoints: those not acknowledged to be in the ledger, oldest first.
        parked: how it has stopped, None while it has the device.
        sizes: of its batches, None if neither they nor its devices change.
        ended: the trial is over: ``Ended`` follows.
    """

    study: StudySpec
    epoch: Count
    devices: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    number: Count | None = None
    trial_id: Count | None = None
    held_seconds: Seconds = 0.0
    device_seconds: Seconds = 0.0
    training: bool = False
    requested_tier: TierName | None = None
    can_store: bool = False
    need_bytes: Count | None = None
    units_left: Count | None = None
    params: Params = msgspec.field(default_factory=dict)
    reports: tuple[Report, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    parked: TierChanged | None = None
    sizes: BatchSizes | None = None
    ended: bool = False


class Ended(Message, frozen=True, kw_only=True):
    """Optuna has the trial's result: ``done``, or ``failed`` when its own code raised."""

    epoch: Count
    state: Ending
    error: str | None = None


class Released(Message, frozen=True, kw_only=True):
    """The worker cannot run what it was given, for a reason that is not the trial's fault.

    ``outgrown`` says that the device's memory did not suffice beside what others hold there,
    ``unreachable`` that the trial's checkpoint cannot be read on this host at this moment. A trial
    that has a checkpoint, and no batch yet since its grant, waits in any case: for some tries,
    unless the reason is ``final``.
    """

    epoch: Count
    reason: str
    # The trial goes back to its last checkpoint and is tried again with the device to itself.
    outgrown: bool = False
    # It waits for a minute, or goes on on another host.
    unreachable: bool = False
    # Its checkpoint is damaged: it is not tried again here until the study's next driver.
    final: bool = False


class KeepWorkers(Message, frozen=True, kw_only=True):
    """The driver keeps another number of worker processes alive from now on."""

    study: Key
    max_alive: Count


class Drain(Message, frozen=True, kw_only=True):
    """Suspend every trial of this study to disk and start none."""

    study: Key


class GiveUp(Message, frozen=True, kw_only=True):
    """A trial that lost too many processes has failed, or had ended before, and Optuna knows it."""

    study: Key
    number: Count
    reason: str
    state: Ending = "failed"


class SetOverrides(Message, frozen=True, kw_only=True):
    """Override of some live trials from now on; None lets the policy decide again.

    The answer is ``Accepted``, or ``Refused``.
    """

    study: Key
    numbers: Numbers
    override: Literal["held", "boosted"] | None = None


class Finish(Message, frozen=True, kw_only=True):
    """Trials are to be closed at their last values: each leaves its device and its process."""

    # Sent again until ``Accepted`` says that nothing is waited for; only then the client tells
    # Optuna, and sends ``Finished``.
    study: Key
    numbers: Numbers


class Finished(Message, frozen=True, kw_only=True):
    """Optuna knows that trials are complete whose ``Finish`` was agreed to."""

    study: Key
    numbers: Numbers


class ChangePolicy(Message, frozen=True, kw_only=True):
    """Another policy decides from now on; ``policy`` and ``folders`` are those of a ``StudySpec``.

    The answer is ``Accepted``, or ``Refused``.
    """

    study: Key
    policy: str
    folders: tuple[str, ...] = ()


class GetStatus(Message, frozen=True, kw_only=True):
    """Ask for a ``Status``: with every trial, and with the shape of each curve, if so wanted."""

    trials: bool = True
    curves: bool = False


class WatchStudy(Message, frozen=True, kw_only=True):
    """A driver wants to be told of the next change of its study, by a ``StudyChanged``.

    ``now`` asks for the present status too, with all that it has said before.
    """

    # Of further changes it is told once it has sent this again: a driver that is busy, or stopped,
    # is not sent what it does not read.
    study: Key
    now: bool = False


class Quit(Message, frozen=True, kw_only=True):
    """End the broker, if no other client than viewers is connected."""


UserCommand = SetOverrides | Finish | Finished | ChangePolicy
"""Requests of a person about a study that is served: each is answered at once."""

FromClient = (
    Hello
    | OpenStudy
    | Describe
    | Ready
    | Register
    | Reattach
    | Begin
    | FirstBatch
    | Report
    | Beat
    | Saved
    | TierChanged
    | Ended
    | Released
    | KeepWorkers
    | Drain
    | GiveUp
    | SetOverrides
    | Finish
    | Finished
    | ChangePolicy
    | GetStatus
    | WatchStudy
    | Quit
)
