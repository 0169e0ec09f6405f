"""LiveTrial: a trial as the broker knows it, with the transitions of its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from optuna_hermes.broker._protocol import Ending, Params, TierChanged
from optuna_hermes.ledger._records import TrialRecord
from optuna_hermes.model import (
    LIVE_STATES,
    BatchSizes,
    Checkpoint,
    Curve,
    Elastic,
    Speed,
    TierName,
    TrialStatus,
    TrialView,
)

if TYPE_CHECKING:
    from optuna_hermes.broker._core._broker_state import Lease, Slot

MOST_LOSSES = 3
"""Losses of processes without a new unit, after which a trial gets no further one."""

_LIVE: tuple[TrialStatus, ...] = (*LIVE_STATES,)

TRANSITIONS: Mapping[str, tuple[tuple[TrialStatus, ...], tuple[TrialStatus, ...]]] = {
    "register": (("pending", "stored"), ("pending",)),
    # Running again: a process may say twice which trial it has begun.
    "start": (_LIVE, ("running",)),
    "park": (("running", "parked"), ("parked",)),
    "leave_process": (_LIVE, ("pending", "stored")),
    "undo_start": (("running",), ("pending", "parked")),
    "come_back": (("pending", "stored"), ("parked",)),
    "end": (_LIVE, ("done", "failed")),
}
"""The methods that change the state of a trial: from which states, and to which."""


TrialKey = tuple[str, int]
"""A study's key and a trial's number."""


@dataclass(kw_only=True)
class LiveTrial:
    """One trial; what it reports of its memory is not in the ledger, for it ends with its process.

    Args:
        connection: the process that holds it, None when there is none.
        devices: where it runs, or where its process is parked.
        epoch: of its last lease.
        can_store: whether it can be suspended to disk, as it said last.
        last_store_failed: it could be, but its checkpoint could not be written when it was asked.
        can_offload: whether it can be moved to host memory; it is asked before it has said so.
        requested_tier: where it was asked to go, and has not answered yet, at ``requested_at``.
        host: where it had a device last, None before its first lease.
        saved_seconds: device time that is in its last checkpoint, as far as is known.
        need_bytes: the most memory of each device it has been seen to need, None if unknown.
        held_bytes: memory of each device it holds while it is parked, None if unknown.
        host_bytes: host memory it has taken for what it moved off its device.
        alone: it outgrew its memory beside others, and gets its device to itself.
        waits_for_memory: it found no room although none could go: it waits until a trial has gone.
        losses: processes it has lost since its last new unit.
        lost_at, lost_pid: when it lost the last of them, and which; None before the first.
        hung: that process was killed because it hung.
        furthest: the most units it has reported, also where it has begun again since.
        silence: the longest time between two signs of life while it trained, None at first.
        units_left: units until its end after its last report, None if unknown.
        params: its hyper-parameters, empty if unknown.
        sizes: of its batches, None if they do not change, or that is not known yet.
        speeds: what was measured of it.
        cached_view: its last view for a policy, behind the values it was made from.
        recovering: a process that has not come back yet may have it.
        owner: the broker it belongs to in the ledger, where several hosts share the study.
        row: its row in the ledger, as it was read or written last; None while it has none.
    """

    study: str
    number: int
    trial_id: int
    state: TrialStatus
    submitted: float
    curve: Curve = field(default_factory=Curve)
    tier: TierName | None = None
    connection: int | None = None
    devices: tuple[str, ...] = ()
    epoch: int = 0
    can_store: bool = False
    last_store_failed: bool = False
    can_offload: bool = True
    requested_tier: TierName | None = None
    requested_at: float = 0.0
    waiting_since: float | None = None
    units: int = 0
    slices: int = 0
    suspensions: int = 0
    device_seconds: float = 0.0
    saved_seconds: float = 0.0
    energy_joules: float | None = None
    host: str | None = None
    need_bytes: int | None = None
    held_bytes: int | None = None
    host_bytes: int = 0
    alone: bool = False
    waits_for_memory: bool = False
    losses: int = 0
    lost_at: float | None = None
    lost_pid: int | None = None
    hung: bool = False
    furthest: int = 0
    silence: float | None = None
    units_left: int | None = None
    params: Params = field(default_factory=dict)
    sizes: BatchSizes | None = None
    speeds: tuple[Speed, ...] = ()
    cached_view: tuple[Any, TrialView] | None = field(default=None, repr=False, compare=False)
    recovering: bool = False
    owner: str | None = None
    row: TrialRecord | None = field(default=None, repr=False, compare=False)
    checkpoints: list[Checkpoint] = field(default_factory=list)

    @property
    def live(self) -> bool:
        """True if it has still to be trained."""
        return self.state in LIVE_STATES

    @property
    def given_up(self) -> bool:
        """True if it gets no further process; its driver tells Optuna, and then the broker."""
        return self.losses >= MOST_LOSSES

    @property
    def device(self) -> str | None:
        """The first of its devices, None if it has none."""
        return self.devices[0] if self.devices else None

    @property
    def in_process(self) -> bool:
        """True if it is in the memory of a process, or may be."""
        has_process = self.connection is not None or self.state in ("running", "parked")
        return self.live and (has_process or self.recovering)

    @property
    def evicting(self) -> bool:
        """True if it is on its way off its device."""
        return self.requested_tier in ("host", "disk")

    @property
    def key(self) -> TrialKey:
        return self.study, self.number

    @property
    def takes_bytes(self) -> int | None:
        """Device memory it takes where it is, as far as is known."""
        return self.need_bytes if self.held_bytes is None else self.held_bytes

    @property
    def host_claim_bytes(self) -> int:
        """Host memory it has, or was promised."""
        promised = (self.takes_bytes or 0) if self.requested_tier == "host" else 0
        return max(self.host_bytes, promised)

    @property
    def device_range(self) -> tuple[int, int]:
        """The least and the most devices that it may be given; another number goes over disk."""
        now = max(1, len(self.devices))
        if self.connection is not None and not self.can_store:
            return now, now
        if self.sizes is None:
            return (1, 1) if self.connection is None else (now, now)
        return 1, self.sizes.most_devices

    @property
    def elastic(self) -> Elastic | None:
        """Limits within which it may be stretched, None if it has reported none."""
        sizes = self.sizes
        if sizes is None:
            return None
        return Elastic(
            batch_size=sizes.now,
            batch_sizes=(sizes.least, sizes.most),
            devices=self.device_range,
            unit_samples=sizes.unit_samples,
            speeds=self.speeds,
        )

    def take_sizes(self, sizes: BatchSizes) -> None:
        """Take sizes of batches; speeds measured on other numbers of devices still hold."""
        self.sizes = sizes
        here = len(self.devices)
        speeds = [each for each in self.speeds if each.devices != here]
        speeds += (
            Speed(devices=here, batch_size=size, step_seconds=seconds)
            for size, seconds in sizes.seconds.items()
            if seconds > 0
        )
        self.speeds = tuple(sorted(speeds, key=lambda each: (each.devices, each.batch_size)))

    def suits(self, slots: Sequence[Slot]) -> bool:
        """True if its process, if any, can use these devices: one on a GPU never leaves it."""
        if self.connection is None or not self.devices:
            return True
        gpus = any(slot.device.kind == "gpu" for slot in slots)
        same = {slot.device.id for slot in slots} == set(self.devices)
        return same if gpus else len(slots) == len(self.devices)

    def needs(self, memory_bytes: int | None) -> None:
        """Note that it was seen to need so much device memory."""
        if memory_bytes is not None:
            self.need_bytes = max(self.need_bytes or 0, memory_bytes)

    def keep(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Take its checkpoints, the newest last: the units of that one need not be repeated."""
        self.checkpoints = list(checkpoints)
        units = min(self.checkpoints[-1].units, self.curve.units)
        if units:
            self.saved_seconds = max(self.saved_seconds, self.curve.device_seconds[units - 1])

    @property
    def unsaved_seconds(self) -> float:
        """Device time since its last checkpoint, without that of a lease that is out."""
        return max(0.0, self.device_seconds - self.saved_seconds)

    def count_reported(self) -> None:
        """Count the device time of a lease that died with its broker, which only reports have.

        A process that has it still says itself how long that lease has lasted.
        """
        if self.connection is None:
            self.device_seconds = max(self.device_seconds, self.curve.seconds)

    def ask(self, tier: TierName, now: float) -> None:
        self.requested_tier, self.requested_at = tier, now

    def add_energy(self, joules: float | None) -> None:
        if joules is not None:
            self.energy_joules = (self.energy_joules or 0.0) + joules

    # -- transitions ---------------------------------------------------------------------------

    def register(self, connection: int, now: float) -> None:
        """Let a process of its own wait with it for a device."""
        self._become("pending", "register")
        self.connection, self.waiting_since = connection, now

    def start(self, lease: Lease, host: str) -> None:
        """Let it train on the devices of a lease."""
        if self.state in ("pending", "stored"):
            self.saved_seconds = self.device_seconds  # what had not been saved is lost already
        self._become("running", "start")
        self.waiting_since, self.held_bytes = None, None
        self.connection, self.epoch, self.host = lease.connection, lease.epoch, host
        self.devices = lease.devices

    def park(self, message: TierChanged) -> None:
        """Let it wait in a tier; what it was asked for and did not do is not asked again there."""
        requested = self.requested_tier
        if message.tier == "disk":
            self.leave_process()
        else:
            self._become("parked", "park", message.tier)
            self.held_bytes, self.host_bytes = message.held_bytes, message.host_bytes
        self.requested_tier = None
        stays = requested == "host" and message.tier == "resident"
        # Its checkpoint could not be written now: it is tried again when the study drains.
        self.last_store_failed = (
            message.can_store and requested == "disk" and message.tier != "disk"
        )
        self.can_store = self.can_store and message.can_store and requested != "disk"
        self.can_offload = self.can_offload and message.can_offload and not stays

    def leave_process(self) -> None:
        """Take it back to its last checkpoint, if there is one: its process is gone."""
        if self.checkpoints:
            self._become("stored", "leave_process", "disk")
        else:
            self._become("pending", "leave_process")
        self._forget_process()

    def undo_start(self, lease: Lease, now: float, *, left: bool) -> None:
        """Take it back to where it was before a lease, which never began.

        It waits from ``now`` on; ``left`` if it is in the memory of no process.
        """
        if left:
            self.leave_process()
        elif lease.from_tier is None:
            self._become("pending", "undo_start")
            self.devices = ()
        else:
            self._become("parked", "undo_start", lease.from_tier)
        self.requested_tier, self.waiting_since = None, now
        self.epoch, self.slices = lease.previous_epoch, self.slices - 1

    def come_back(self, connection: int, epoch: int, devices: tuple[str, ...], now: float) -> None:
        """Let it wait in its process, which has come back to a new broker."""
        self._become("parked", "come_back", self.tier)
        self.connection, self.epoch, self.waiting_since = connection, epoch, now
        self.devices = devices
        self.can_store = self.can_offload = True  # as far as it says so

    def end(self, state: Ending) -> None:
        """End it: its process, if any, has nothing more to do with it."""
        self._become(state, "end")
        self._forget_process()

    def show_as(self, state: TrialStatus) -> None:
        """Take the state that another host's broker has written, whose transitions these are."""
        self.state = state

    def _forget_process(self) -> None:
        self.connection, self.requested_tier = None, None
        self.devices = ()
        self.held_bytes, self.host_bytes = None, 0

    def _become(self, state: TrialStatus, transition: str, tier: TierName | None = None) -> None:
        before, after = TRANSITIONS[transition]
        if self.state not in before or state not in after:
            raise ValueError(
                f"{transition} takes a trial that is {', '.join(before)} to {', '.join(after)}, "
                f"but trial {self.number} is {self.state} and would be {state}"
            )
        self.state, self.tier = state, tier
