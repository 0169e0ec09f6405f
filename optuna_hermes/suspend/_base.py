"""What a training loop, whoever schedules it, and the places where it waits say to each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from optuna_hermes.model import TierName


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredState:
    """A checkpoint whose bytes are safe on disk (fsync, rename and directory fsync done).

    Args:
        path: absolute path of the file.
        units: units the run had reported when it was written.
        size_bytes: length of the file.
        sha256: hex digest of the file.
    """

    path: Path
    units: int
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizes:
    """The sizes that the batches of a run may have, the one that they have, and its devices.

    Args:
        now: samples in its next batch.
        least: the smallest size.
        most: the largest size.
        seconds: what a batch took, by the sizes that were measured.
        unit_samples: samples in a unit, None if unknown.
        most_devices: how many devices it may be given at once; batches are those of all together.
    """

    now: int
    least: int
    most: int
    seconds: Mapping[int, float] = field(default_factory=dict)
    unit_samples: int | None = None
    most_devices: int = 1


class State(Protocol):
    """A run that stands at a clean point, as a tier sees it."""

    @property
    def name(self) -> str:
        """Whose state it is, as a message names it: ``trial 7``."""

    @property
    def units(self) -> int:
        """Units the run has reported."""

    @property
    def stores(self) -> bool:
        """Whether ``dump`` is the whole of it at this point, so that its process may go."""

    @property
    def moves(self) -> bool:
        """Whether its tensors may change their addresses."""

    def ended(self) -> bool:
        """Whether its process was told to end while it waits."""

    def roots(self) -> Iterable[object]:
        """Objects that lead to every tensor of the run: modules, optimizers, metrics and so on."""

    def dump(self) -> dict[str, Any]:
        """The whole state as a tree of tensors and plain values; the tensors are not copied."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What a suspended run still takes.

    Args:
        device_bytes: device memory it has not given back.
        host_bytes: host memory it has taken for what it moved.
        stored: its checkpoint, if that is where it is.
    """

    device_bytes: int
    host_bytes: int = 0
    stored: StoredState | None = None


class Tier(ABC):
    """A place where a suspended run waits: on its device, in host memory, or on disk.

    One object serves one run, any number of times. ``suspend`` and ``resume`` alternate. Random
    states are the caller's to keep around the two, for what is in ``dump`` is only read again when
    the run comes back by it.
    """

    name: TierName

    @abstractmethod
    def suspend(self, state: State) -> Held:
        """Put the run there, and say what it still takes.

        Raises:
            SuspendError: it cannot be put there; it is as it was.
        """

    @abstractmethod
    def resume(self) -> dict[str, Any] | None:
        """Bring it back.

        Returns:
            None if every tensor is where it was, with the same values; else the tree that
            ``dump`` gave, to be loaded into a new run.

        Raises:
            SuspendError: it cannot be brought back from there.
        """


class Session(Protocol):
    """One run's side of its lease, as a training loop sees it.

    A loop reads ``must_yield`` after every batch (an attribute, nothing else). At the next clean
    point after it turned True the loop calls ``park``.
    """

    must_yield: bool
    asked: TierName
    """The tier it is to be suspended to, once ``must_yield`` is True."""

    checkpoint_dir: Path | None
    """Folder for this run's checkpoints; None if the run cannot leave its process."""

    batch_size: int | None
    """How many samples its batches are to have from the next clean point on, None as they are.

    Only a run that has called ``stretches`` is ever asked for another size.
    """

    devices: tuple[str, ...]
    """Those of the lease; empty if that is not known."""

    checkpoints: tuple[StoredState, ...]
    """What the ledger knows of, newest first: where a run goes on from when its process is lost.

    Empty for a run that starts. It follows ``saved`` with a delay, and until then the files named
    here must stay.
    """

    def training(self, *, stores: bool) -> None:
        """The first batch since the grant begins; ``stores`` says whether the run can be stored."""

    def stretches(self, sizes: BatchSizes) -> None:
        """Say that the size of the batches, or the number of devices, may change, and what it is.

        That is said after each ``training``, after each change, and from time to time.
        """

    def report(self, *, unit: int, step: int, value: float, units_left: int | None = None) -> None:
        """Say the value (lower is better) after ``unit`` units, counted from 1.

        Args:
            unit: which one.
            step: what the run counted.
            value: of the objective.
            units_left: units until its end, None if unknown.
        """

    def beat(self, batches: int, memory_bytes: int | None = None) -> None:
        """Say that the run makes progress; costs nothing when called more than once a second.

        Args:
            batches: how many it has trained.
            memory_bytes: the most device memory it has needed until now, None if unknown.
        """

    def saved(self, state: StoredState) -> None:
        """Say that a checkpoint is safe while the run goes on."""

    def park(self, state: State) -> None:
        """Give the device back by the tier the broker asked for, and wait for the next grant.

        Returns when the run may go on in this process.

        Args:
            state: the run at this clean point.

        Raises:
            Suspended: the run is on disk; the process must unwind.
        """
