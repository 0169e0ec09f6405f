"""One process of a run that trains in several (a rank).

All stop after the same batch, and no batch costs a message. Rank 0 sees that the run must yield
and writes the number of the point where it stands into shared memory before it trains the next
batch. A rank stops at its first clean point after that one. To synchronise the gradients of that
batch a rank must wait for rank 0, so that it reads the number in time. Where nothing has
synchronised them, ranks come to different points: those that wait then train on, and all try a
later one.
"""

from __future__ import annotations

import ctypes
import io
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

from optuna_hermes.errors import Suspended
from optuna_hermes.model import TierName
from optuna_hermes.suspend._base import BatchSizes, StoredState
from optuna_hermes.suspend._tree import frozen

YIELD, STOP = 0, 1
"""Of the shared numbers: whether the run must yield, and the point that rank 0 has written."""
_ENDED_SECONDS = 0.25
"""How often a rank that waits looks whether it is to end."""
_TERMINATED = 128 + 15
_PR_SET_PDEATHSIG = 1

Tree = dict[str, Any]
Kind = Literal["report", "save", "park"]
Answer = Literal["go", "on", "prune", "dump", "leave"]


class Arrival(NamedTuple):
    """A rank is at a place where it waits for an answer, after so many points."""

    kind: Kind
    point: int
    units: int
    payload: Any


@dataclass(frozen=True, kw_only=True)
class Seats:
    """What the ranks are started with, by fork or by pickle.

    Args:
        ours: the end of each rank's pipe.
        theirs: the other ends.
        signs: shared numbers, see ``YIELD``.
        parent: the process that started them.
        leased: whether the run has a session.
        checkpoint_dir: see ``Session``.
        devices: see ``Session``.
    """

    ours: tuple[Connection, ...]
    theirs: tuple[Connection, ...]
    signs: Any
    parent: int
    leased: bool
    checkpoint_dir: Path | None
    devices: tuple[str, ...] = ()

    def take(self, rank: int) -> Rank:
        """Be this rank, in its own process, which ends with its parent."""
        _die_with(self.parent)
        for end in (*self.theirs, *self.ours[:rank], *self.ours[rank + 1 :]):
            end.close()
        return Rank(rank, self)


class Rank:
    """A rank's session (``suspend.Session``), and where its checkpoints go (see ``Saver``).

    Args:
        rank: counted from 0.
        seats: what it was started with.
    """

    busy = behind = False

    def __init__(self, rank: int, seats: Seats) -> None:
        self.rank = rank
        self.count = len(seats.ours)
        self.leased = seats.leased
        self.leaves = False
        """Whether all ranks were told to end."""
        self.must_yield = False
        self.asked: TierName = "disk"
        """Nobody waits in the midst of a validation: that could not be agreed on."""
        self.batch_size: int | None = None
        self.devices = seats.devices
        self.checkpoint_dir = seats.checkpoint_dir
        self.checkpoints: tuple[StoredState, ...] = ()
        """None: they are read by the process that starts the ranks."""
        self._end = seats.ours[rank]
        self._signs = seats.signs
        self._point = 0
        self._end.send(("here", None))

    def pass_point(self) -> None:
        """Say that the rank stands between two batches; to be called before all else there."""
        self._point += 1
        if self.rank == 0 and self._signs[YIELD] and not self._signs[STOP]:
            self._signs[STOP] = self._point
        self.must_yield = 0 < self._signs[STOP] < self._point

    def training(self, *, stores: bool) -> None:
        """See ``Session``."""
        self._tell("training", {"stores": stores})

    def stretches(self, sizes: BatchSizes) -> None:
        """See ``Session``."""
        self._tell("stretches", {"sizes": sizes})

    def report(self, *, unit: int, step: int, value: float, units_left: int | None = None) -> None:
        """Said with ``reported``."""

    def reported(self, unit: int, value: float) -> bool:
        """Say the value after a unit, that of rank 0, and learn whether the trial is pruned."""
        return self._come("report", unit, value) == "prune"

    def beat(self, batches: int, memory_bytes: int | None = None) -> None:
        """See ``Session``."""
        self._tell("beat", {"batches": batches, "memory_bytes": memory_bytes})

    def saved(self, state: StoredState) -> None:
        """Said by the process that saves."""

    def begin(self, tree: Tree, *, units: int) -> None:
        """Give this rank's part of a checkpoint away; see ``Saver``."""
        self._come("save", units, packed(tree))

    def finish(self, *, wait: bool) -> None:
        """Nothing is left to do here; see ``Saver``."""

    def park(self, state: Any) -> None:
        """See ``Session``; returns too if the ranks have to come to another point.

        Raises:
            Suspended: this process must end.
        """
        answer = self._come("park", state.units, state.stores, state.ended)
        while answer == "dump":
            self._end.send(("tree", packed(state.dump())))
            answer = self._answer(state.ended)
        self.must_yield = False

    def ended(self, state: dict[str, Any], *, whole: bool) -> None:
        """Say that this rank has ended, whether it has trained to the end, and what is known."""
        self._end.send(("ended", (self.rank, state, whole)))

    def raised(self, error: Exception) -> None:
        """Say why this rank ends."""
        try:
            self._end.send(("raised", error))
        except Exception:  # it cannot be pickled, or nobody listens: torch says it in its own way
            return

    def _tell(self, kind: str, content: dict[str, Any]) -> None:
        if self.rank == 0:
            self._end.send((kind, content))

    def _come(
        self, kind: Kind, units: int, payload: Any, ended: Callable[[], bool] = lambda: False
    ) -> Answer:
        self._end.send((kind, Arrival(kind, self._point, units, payload)))
        return self._answer(ended)

    def _answer(self, ended: Callable[[], bool]) -> Answer:
        while not self._end.poll(_ENDED_SECONDS):
            if ended():
                raise SystemExit(_TERMINATED)
        answer: Answer = self._end.recv()
        self.leaves = answer in ("leave", "prune")
        if answer == "leave":
            raise Suspended("The run goes on in other processes.")
        return answer


def _die_with(parent: int) -> None:
    # Torch asks for SIGINT, which those who leave Ctrl-C to others ignore.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(_TERMINATED)


def packed(tree: Tree) -> bytes:
    """A copy of a state, to be sent."""
    import torch

    buffer = io.BytesIO()
    torch.save(frozen(tree), buffer)
    return buffer.getvalue()


def unpacked(data: bytes) -> Tree:
    """What ``packed`` was given, in main memory."""
    import torch

    # Our own child sent it; what does not belong into a checkpoint is named when it is written.
    tree: Tree = torch.load(io.BytesIO(data), weights_only=False)
    return tree
