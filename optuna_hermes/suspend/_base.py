"""Interfaces between training loop, scheduler session and storage tiers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from optuna_hermes.model import BatchSizes, Checkpoint, TierName


class CleanPoint(Protocol):
    """A trial at a clean point, as a tier sees it."""

    @property
    def name(self) -> str:
        """The trial's name in messages: ``trial 7``."""

    @property
    def units(self) -> int:
        """Units the trial has reported."""

    @property
    def can_store(self) -> bool:
        """True if ``dump`` is the whole state at this point, so that its process may end."""

    @property
    def can_offload(self) -> bool:
        """True if its tensors may change their addresses."""

    def ended(self) -> bool:
        """True if its process was asked to end while the trial waits."""

    def roots(self) -> Iterable[object]:
        """Objects that lead to every tensor of the trial: modules, optimizers, metrics, ..."""

    def dump(self) -> dict[str, Any]:
        """The whole state as a tree of tensors and plain values; the tensors are not copied."""

    def waits(self) -> None:
        """Called once its device may be another's: what was put off until then may begin."""

    def saved(self) -> Checkpoint | None:
        """The checkpoint of just this state, None if there is none; waits while one is written.

        To be called before this state is written by anybody else.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """The memory that a suspended trial still takes, and its checkpoint.

    Args:
        device_bytes: device memory it has not given back.
        host_bytes: host memory it has taken for what it moved.
        stored: its checkpoint, None unless it was suspended to disk.
    """

    device_bytes: int
    host_bytes: int = 0
    stored: Checkpoint | None = None


class Session(Protocol):
    """A trial's side of its lease, as a training loop sees it.

    A loop reads ``must_yield`` after every batch (an attribute, nothing else). At the next clean
    point after it turned True the loop calls ``park``.
    """

    must_yield: bool
    requested_tier: TierName
    """The tier to suspend to; valid while ``must_yield`` is True."""

    checkpoint_dir: Path | None
    """Folder of this trial's checkpoints; None if the trial cannot leave its process."""

    checkpoint_url: str | None
    """Place of that folder's checkpoints in a store that other hosts reach; None for the folder."""

    batch_size: int | None
    """Samples per batch from the next clean point on; None to leave the size as it is.

    Only a trial that has called ``report_sizes`` is ever asked for another size.
    """

    devices: tuple[str, ...]
    """Ids of the lease's devices; empty if they are not known."""

    checkpoints: tuple[Checkpoint, ...]
    """Checkpoints in the ledger, newest first: the trial resumes from them if its process is lost.

    Empty for a new trial. A checkpoint passed to ``saved`` appears here with a delay; until then
    the files of those that are here must stay.
    """

    def training(self, *, can_store: bool, late: bool = False) -> None:
        """Report the first batch of the lease.

        Args:
            can_store: the trial can go to disk.
            late: it has trained before, as in an epoch of which nobody knew that it has no batches.
        """

    def report_sizes(self, sizes: BatchSizes) -> None:
        """Report that the batch size or the number of devices may change, and the present sizes.

        To be called after each ``training``, after each change, and from time to time.
        """

    def report(self, *, unit: int, step: int, value: float, units_left: int | None = None) -> None:
        """Report the value (lower is better) after a unit.

        Args:
            unit: number of the unit, counted from 1.
            step: the step that the trial counts.
            value: of the objective.
            units_left: units until its end, None if unknown.
        """

    def wait_for_decision(self) -> None:
        """Wait, not for long, until it is known whether the trial yields after its last report.

        To be called before it trains on; what it does in between costs no time of its own.
        """

    def beat(self, memory_bytes: int | None = None) -> None:
        """Report progress; costs nothing when called more than once a second.

        Args:
            memory_bytes: the most device memory it has needed until now, None if unknown.
        """

    def saved(self, checkpoint: Checkpoint, *, blocked_seconds: float = 0.0) -> None:
        """Report a checkpoint that is safe on disk while the trial goes on.

        Args:
            blocked_seconds: time for which the training stood still for it.
        """

    def park(self, state: CleanPoint) -> None:
        """Yield the device, suspending to the tier that was asked for, and wait for the next grant.

        Calls ``state.waits`` once the device is given back. Returns when the trial may go on in
        this process.

        Raises:
            Suspended: the trial is on disk; the process must unwind.
        """
