"""What broker and clients say to each other: typed msgpack frames, pure.

A frame is a length (4 bytes, big endian) and a msgpack map with the type's name under ``type``.
Every message about a lease carries its epoch, so that stale ones can be dropped.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from optuna_hermes.errors import ProtocolError
from optuna_hermes.model import TierName

VERSION = 8
MAX_FRAME_BYTES = 4 * 1024 * 1024
HEADER_BYTES = 4
MOST_SIZES = 64
"""So many batch sizes a run says the speed of."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""A number that fits into any database and any JSON, also when some of them are added up."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
"""A length of time: a number, and not an endless one."""

Size = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
"""How many samples a batch has."""

Key = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
"""A study's key, as long as the ledger's columns at most."""

Numbers = Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)]
"""The trials that a wish is about: all of them, or, where one is refused, none."""

Ending = Literal["done", "failed"]

Params = dict[str, float | int | bool | str | None]
"""A trial's hyper-parameters as plain JSON; a choice that is none is its text."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of every message; the tag is the class name."""


class StudySpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a broker must know to serve a study.

    Args:
        key: the study's key, the same in every process.
        name: its name, for people.
        ledger_url: SQLAlchemy URL of its ledger.
        policy: a name of ``POLICIES``, or a class of the user's as any process finds it.
        folders: where such a class may import from.
        slice_seconds: least length of a slice.
        seed: for policies that draw random numbers.
        maximize: the values were turned round; only ``status`` turns them back.
    """

    key: Key
    name: str
    ledger_url: str
    policy: str = "hermes"
    folders: tuple[str, ...] = ()
    slice_seconds: Seconds = 1.0
    seed: int = 0
    maximize: bool = False


class SavedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint whose bytes are on disk, fsync included."""

    path: Annotated[str, msgspec.Meta(max_length=4096)]
    units: Count
    size_bytes: Count
    sha256: Annotated[str, msgspec.Meta(max_length=64)]


class BatchSizes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The sizes that the batches of a run may have, the one that they have, and its devices.

    Args:
        now: samples in its next batch.
        least: the smallest size.
        most: the largest size.
        seconds: what a batch took, by the sizes that were measured.
        unit_samples: samples in a unit, None if unknown.
        most_devices: how many devices it may be given at once; batches are those of all together.
    """

    now: Size
    least: Size
    most: Size
    seconds: Annotated[dict[Size, Seconds], msgspec.Meta(max_length=MOST_SIZES)] = {}
    unit_samples: Size | None = None
    most_devices: Size = 1

    @property
    def valid(self) -> bool:
        """Whether they are in order."""
        return self.least <= self.now <= self.most


# -- from a client -----------------------------------------------------------------------------


class Hello(_Message, frozen=True, kw_only=True):
    """First message of every connection."""

    version: int
    role: str  # "driver", "worker", "run" or "viewer"


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """What earlier brokers counted for a driver; see ``Study``."""

    switches: Count = 0
    overhead_seconds: Seconds = 0.0
    spent_seconds: Seconds = 0.0


class OpenStudy(_Message, frozen=True, kw_only=True):
    """A driver takes charge of a study: its live runs are read from the ledger.

    Args:
        unstarted: trials that may still be created, None for no bound.
        max_alive: worker processes the driver keeps alive.
        fixed: whether those trials are a list known beforehand.
        ended: trials that Optuna knows to be finished though the ledger may not.
        adopted: trials (number to trial id) that were created but never reached the ledger.
        trials: how many trials there were when those that are left were counted, None if that
            is of no use.
        waiting: the numbers of those among them that nobody had begun.
        counted: None from a driver that comes anew.
        limit: how many runs the ledger may come to hold, over all hosts; None for no bound.
    """

    study: StudySpec
    unstarted: Count | None
    max_alive: Count
    fixed: bool = False
    ended: dict[Count, Ending] = {}
    adopted: dict[Count, Count] = {}
    trials: Count | None = None
    waiting: tuple[Count, ...] = ()
    counted: Counted | None = None
    limit: Count | None = None


class Describe(_Message, frozen=True, kw_only=True):
    """The hyper-parameters of runs that may not train for a while: of the study opened next."""

    study: Key
    params: dict[Count, Params]


class Ready(_Message, frozen=True, kw_only=True):
    """A worker process of this study waits for a run."""

    study: Key


class Register(_Message, frozen=True, kw_only=True):
    """A trial that exists already (plain Optuna) asks for its first lease."""

    study: StudySpec
    number: Count
    trial_id: Count


class Begin(_Message, frozen=True, kw_only=True):
    """The lease of a new trial (or of a stored run) has found its trial."""

    epoch: Count
    number: Count
    trial_id: Count


class Training(_Message, frozen=True, kw_only=True):
    """The first batch since the grant begins: what came before was the cost of switching.

    Args:
        stores: whether the run can be suspended to disk.
        params: its hyper-parameters, as far as they are known now.
    """

    epoch: Count
    stores: bool
    params: Params = {}


class Report(_Message, frozen=True, kw_only=True):
    """The run's value (lower is better) after ``unit`` units, counted from 1.

    Args:
        units_left: units until its end, None if unknown.
        params: its hyper-parameters, if they were not told before.
        age_seconds: how long ago it was, if there was no broker to be told.
    """

    epoch: Count
    unit: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    step: Count
    value: float
    units_left: Count | None = None
    params: Params = {}
    age_seconds: Seconds = 0.0


class Beat(_Message, frozen=True, kw_only=True):
    """The run makes progress (at most once a second).

    ``memory_bytes`` is the most device memory it has needed until now, None if unknown.
    """

    epoch: Count
    batches: Count
    memory_bytes: Count | None = None


class Stretches(_Message, frozen=True, kw_only=True):
    """The run's batches, or its devices, may change: at first, after a change, with each beat."""

    epoch: Count
    sizes: BatchSizes


class Saved(_Message, frozen=True, kw_only=True):
    """A checkpoint is safe; the run goes on."""

    epoch: Count
    checkpoint: SavedCheckpoint


class Parked(_Message, frozen=True, kw_only=True):
    """The run has stopped and left its device, or has gone from one tier to another.

    With tier ``disk`` the process leaves after this message.

    Args:
        suspend_seconds: what stopping cost.
        held_bytes: device memory it still holds, None if unknown.
        host_bytes: host memory it has taken for what it moved off the device.
        stores: whether it can go on to disk from here.
        moves: whether it can go to host memory from here.
    """

    epoch: Count
    tier: TierName
    suspend_seconds: Seconds
    checkpoint: SavedCheckpoint | None = None
    held_bytes: Count | None = None
    host_bytes: Count = 0
    stores: bool = False
    moves: bool = False


class Resume(_Message, frozen=True, kw_only=True):
    """A process whose broker died says to the next one what it has, and goes on.

    What it said last under this epoch may be known already. The answer is silence, or ``Refused``:
    then the run is not its own any more.

    Args:
        number: None for a new trial that has not begun.
        epoch: of its last lease.
        device: which that lease was for; the first one if there were several.
        held_seconds: since that lease was granted.
        training: its first batch has begun.
        asked: the tier by which it was asked to leave, or to which it moves while it is parked.
        stores: whether it can be suspended to disk.
        need_bytes: the most device memory it has needed until now, None if unknown.
        units_left: units until its end, None if unknown.
        params: its hyper-parameters, as far as they are known.
        reports: the last ones, oldest first.
        checkpoints: those that nobody has said to be in the ledger, oldest first.
        parked: how it has stopped, None while it has the device.
        sizes: of its batches, None if neither they nor its devices change.
        others: the further devices.
    """

    study: StudySpec
    epoch: Count
    device: str
    number: Count | None = None
    trial_id: Count | None = None
    held_seconds: Seconds = 0.0
    training: bool = False
    asked: TierName | None = None
    stores: bool = False
    need_bytes: Count | None = None
    units_left: Count | None = None
    params: Params = {}
    reports: tuple[Report, ...] = ()
    checkpoints: tuple[SavedCheckpoint, ...] = ()
    parked: Parked | None = None
    sizes: BatchSizes | None = None
    others: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices of that lease."""
        return (self.device, *self.others)


class Ended(_Message, frozen=True, kw_only=True):
    """The trial is told to Optuna: ``done``, or ``failed`` when its own code raised."""

    epoch: Count
    state: Ending
    error: str | None = None


class Released(_Message, frozen=True, kw_only=True):
    """The worker cannot run what it was given, for a reason that is not the trial's fault.

    ``outgrown`` says that the device's memory did not suffice beside what others hold there: the
    run goes back to its last checkpoint and is tried again with the device to itself.
    """

    epoch: Count
    reason: str
    outgrown: bool = False


class Drain(_Message, frozen=True, kw_only=True):
    """Suspend every run of this study to disk and start none."""

    study: Key


class Wishes(_Message, frozen=True, kw_only=True):
    """What people want of some live runs from now on.

    The answer is ``Agreed``, or ``Refused``.

    Args:
        study: the study's key.
        numbers: of the trials.
        wish: see ``model.Wish``; None lets the policy decide again.
    """

    study: Key
    numbers: Numbers
    wish: Literal["held", "boosted"] | None = None


class Finish(_Message, frozen=True, kw_only=True):
    """Runs are to be closed at their last values: each leaves its device and its process.

    It is said again until ``Agreed`` says that nothing is waited for; then whoever said it tells
    Optuna, and says ``Finished``.
    """

    study: Key
    numbers: Numbers


class Finished(_Message, frozen=True, kw_only=True):
    """Optuna knows that runs are complete whose ``Finish`` was agreed to."""

    study: Key
    numbers: Numbers


class ChangePolicy(_Message, frozen=True, kw_only=True):
    """Another policy decides from now on; ``policy`` and ``folders`` are those of a ``StudySpec``.

    The answer is ``Agreed``, or ``Refused``.
    """

    study: Key
    policy: str
    folders: tuple[str, ...] = ()


class GetStatus(_Message, frozen=True, kw_only=True):
    """Ask for a ``Status``.

    Args:
        runs: whether it lists every run.
        curves: whether it tells of each how its values went.
    """

    runs: bool = True
    curves: bool = False


class Quit(_Message, frozen=True, kw_only=True):
    """End the broker if nothing is live and nobody else is connected."""


# -- from the broker ---------------------------------------------------------------------------


class Welcome(_Message, frozen=True, kw_only=True):
    """Answer to ``Hello``; ``instance`` is the broker, as the ledger knows it."""

    version: int
    pid: int
    host: str
    instance: str
    devices: str  # the specification the broker was started with
    device_ids: tuple[str, ...]
    power: tuple[str, ...] = ()  # its commands that power devices down and up


class Refused(_Message, frozen=True, kw_only=True):
    """The last message cannot be served; ``reason`` says what to do."""

    reason: str


class Grant(_Message, frozen=True, kw_only=True):
    """A lease. ``number`` is None for a new trial; ``checkpoints`` are newest first.

    ``device_seconds`` is what the run has had until now. ``alone`` says that nobody else of this
    broker's holds memory of the devices. ``lost`` are the epochs of leases for one new trial
    whose processes died: the trial that one of them has created, if there is one, is this lease's.
    ``batch_size`` is what its batches shall have from now on, None as they are.
    """

    epoch: int
    devices: tuple[str, ...]
    alone: bool = True
    number: int | None = None
    trial_id: int | None = None
    checkpoints: tuple[SavedCheckpoint, ...] = ()
    device_seconds: float = 0.0
    lost: tuple[int, ...] = ()
    batch_size: int | None = None


class Resize(_Message, frozen=True, kw_only=True):
    """The run keeps its device; its batches shall have another size from the next clean point."""

    epoch: int
    batch_size: int


class Yield(_Message, frozen=True, kw_only=True):
    """Give the device back at the next clean point, by this tier."""

    epoch: int
    tier: TierName


class Evict(_Message, frozen=True, kw_only=True):
    """A parked run goes to a lower tier: to host memory, or to disk, and then its process leaves.

    The answer is ``Parked``, also when it could not; ``epoch`` is of its last lease.
    """

    epoch: int
    tier: TierName = "disk"


class Recall(_Message, frozen=True, kw_only=True):
    """A run in host memory comes back to its device, while another still trains there.

    The answer is ``Parked``; ``epoch`` is of its last lease.
    """

    epoch: int


class Prepare(_Message, frozen=True, kw_only=True):
    """A worker that waits will probably get this run: it may read a checkpoint ahead of time."""

    number: int
    checkpoints: tuple[SavedCheckpoint, ...]


class Kept(_Message, frozen=True, kw_only=True):
    """A checkpoint is in the ledger: the ones before it are not needed any more."""

    path: str


class Noted(_Message, frozen=True, kw_only=True):
    """The ledger knows that a lease is over, and all that was said under it: its process may go."""

    epoch: int


class Agreed(_Message, frozen=True, kw_only=True):
    """What was wanted is so from now on; ``waits`` says that a run has still to stop."""

    waits: bool = False


class Dismiss(_Message, frozen=True, kw_only=True):
    """A worker that waits is not needed any more."""


class Status(_Message, frozen=True, kw_only=True):
    """What the broker knows, as plain JSON."""

    document: dict[str, Any]


FromClient = (
    Hello
    | OpenStudy
    | Describe
    | Ready
    | Register
    | Resume
    | Begin
    | Training
    | Report
    | Beat
    | Stretches
    | Saved
    | Parked
    | Ended
    | Released
    | Drain
    | Wishes
    | Finish
    | Finished
    | ChangePolicy
    | GetStatus
    | Quit
)
FromBroker = (
    Welcome
    | Refused
    | Grant
    | Resize
    | Yield
    | Evict
    | Recall
    | Prepare
    | Kept
    | Noted
    | Agreed
    | Dismiss
    | Status
)

_OTHER_VERSION = "the other end is of another version, or no part of optuna-hermes: end it"

_encoder = msgspec.msgpack.Encoder()
_client_decoder: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
_broker_decoder: msgspec.msgpack.Decoder[FromBroker] = msgspec.msgpack.Decoder(FromBroker)


def frame(message: FromClient | FromBroker) -> bytes:
    """The bytes of one frame.

    Raises:
        ProtocolError: the message is longer than ``MAX_FRAME_BYTES``.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"A frame holds {MAX_FRAME_BYTES} bytes at most but got {len(body)}: say less at once."
        )
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def body_length(header: bytes) -> int:
    """The length that a frame's first 4 bytes announce.

    Raises:
        ProtocolError: it is zero or above ``MAX_FRAME_BYTES``.
    """
    length = int.from_bytes(header, "big")
    if not 0 < length <= MAX_FRAME_BYTES:
        raise ProtocolError(
            f"A frame holds 1 to {MAX_FRAME_BYTES} bytes but announces {length}: {_OTHER_VERSION}."
        )
    return length


def decode_from_client(body: bytes) -> FromClient:
    """Read a client's message.

    Raises:
        ProtocolError: it is none.
    """
    try:
        return _client_decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"Not a client's message ({error}): {_OTHER_VERSION}.") from error


def decode_from_broker(body: bytes) -> FromBroker:
    """Read a broker's message.

    Raises:
        ProtocolError: it is none.
    """
    try:
        return _broker_decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"Not a broker's message ({error}): {_OTHER_VERSION}.") from error
