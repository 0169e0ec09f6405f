"""One process (a rank) of a trial that trains in several.

All ranks stop after the same batch, without a message for each batch. Each writes the number of
its present point into shared memory. Rank 0 sees that the trial must yield, and writes there the
highest of these numbers before it trains the next batch: other ranks may be ahead, as NCCL only
queues what synchronises gradients, and wait within a batch for rank 0 to come up with them. Each
rank stops at its first clean point after that number. Nothing makes a rank read it in time, so that
all then say to the parent process where they are: if they differ, those that wait train on, and all
try a later point.
"""

from __future__ import annotations

import io
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

from optuna_hermes._parent import end_with_parent
from optuna_hermes.errors import Suspended
from optuna_hermes.model import BatchSizes, Checkpoint, TierName
from optuna_hermes.suspend._values._tree import frozen

YIELD, STOP, POINTS = 0, 1, 2
"""Indices of the shared numbers: 1 if the trial must yield, the point rank 0 has written, and, from
``POINTS`` on, the present point of each rank."""
_ENDED_SECONDS = 0.25
"""Interval at which a waiting rank checks if it is to end."""
_TERMINATED = 128 + 15

Tree = dict[str, Any]
Kind = Literal["report", "storable", "save", "park"]
Answer = Literal["go", "on", "prune", "dump", "leave"]


class RankRequest(NamedTuple):
    """Message of a rank that waits for an answer, with the number of points it has passed."""

    kind: Kind
    point: int
    units: int
    payload: Any


@dataclass(frozen=True, kw_only=True)
class RankChannels:
    """Pipes and shared state that the ranks are started with, by fork or by pickle.

    Args:
        rank_ends: the end of each rank's pipe.
        parent_ends: the other ends.
        flags: shared numbers, see ``POINTS``.
        parent: the process that started them.
        leased: True if the trial has a session.
        checkpoint_dir: see ``Session``.
        devices: see ``Session``.
    """

    rank_ends: tuple[Connection, ...]
    parent_ends: tuple[Connection, ...]
    flags: Any
    parent: int
    leased: bool
    checkpoint_dir: Path | None
    devices: tuple[str, ...] = ()

    def become_rank(self, rank: int) -> Rank:
        """Become this rank, in its own process, which ends with its parent."""
        # SIGKILL: torch asks for SIGINT, which worker processes may ignore.
        end_with_parent()
        if os.getppid() != self.parent:  # it has ended before that
            raise SystemExit(_TERMINATED)
        for end in (*self.parent_ends, *self.rank_ends[:rank], *self.rank_ends[rank + 1 :]):
            end.close()
        return Rank(rank, self)


class Rank:
    """A rank's ``Session``, and its ``Saver``: both are proxies for the parent process's."""

    busy = gave_up = False

    def __init__(self, rank: int, channels: RankChannels) -> None:
        self.rank = rank
        self.count = len(channels.rank_ends)
        self.leased = channels.leased
        self.leaves = False
        """True if all ranks were asked to end."""
        self.must_yield = False
        self.can_store = True
        """False while this rank alone has what no checkpoint can hold: all must answer alike."""
        self.requested_tier: TierName = "disk"
        """Always disk, so that no rank yields in a validation: they could not agree on a point."""
        self.batch_size: int | None = None
        self.devices = channels.devices
        self.checkpoint_dir = channels.checkpoint_dir
        self.checkpoint_url: str | None = None
        """Always None: the process that starts the ranks writes checkpoints."""
        self.checkpoints: tuple[Checkpoint, ...] = ()
        """Always empty: the process that starts the ranks reads checkpoints."""
        self._end = channels.rank_ends[rank]
        self._flags = channels.flags
        self._point, self._asked_at = 0, -1
        self._all_can_store = False
        self._end.send(("started", None))

    def pass_point(self) -> None:
        """Count a point between two batches; to be called before anything else there."""
        self._point += 1
        flags = self._flags
        flags[POINTS + self.rank] = self._point
        # Written once: all ranks must see the same point, also those that read it late.
        if self.rank == 0 and flags[YIELD] and not flags[STOP]:
            flags[STOP] = max(flags[POINTS:])
        self.must_yield = 0 < flags[STOP] < self._point

    def training(self, *, can_store: bool, late: bool = False) -> None:
        self._tell("training", {"can_store": can_store, "late": late})

    def report_sizes(self, sizes: BatchSizes) -> None:
        self._tell("report_sizes", {"sizes": sizes})

    def report(self, *, unit: int, step: int, value: float, units_left: int | None = None) -> None:
        """Do nothing: see ``reported``."""

    def wait_for_decision(self) -> None:
        """Do nothing: the parent process waits before it answers."""

    def reported(self, unit: int, value: float | None) -> bool:
        """Report the value after a unit (that of rank 0 counts); True if the trial is pruned.

        None where there may be one and is none: all ranks must agree on that.
        """
        return self._request("report", unit, value) == "prune"

    def beat(self, memory_bytes: int | None = None) -> None:
        self._tell("beat", {"memory_bytes": memory_bytes})

    def saved(self, checkpoint: Checkpoint, *, blocked_seconds: float = 0.0) -> None:
        """Do nothing: the process that saves reports it."""

    def all_can_store(self, units: int) -> bool:
        """True if no rank has what no checkpoint can hold; to be asked by all at one point."""
        # Once at each point: a rank that did not yield there, unlike others, comes here twice.
        if self._asked_at != self._point:
            self._asked_at = self._point
            self._all_can_store = self._request("storable", units, self.can_store) == "go"
        return self._all_can_store

    def copy(self, tree: Tree, *, units: int, since: float | None = None) -> None:
        """Send this rank's part of a checkpoint to the parent process; see ``Saver``."""
        self._request("save", units, packed(tree))

    def start(self) -> None:
        """Do nothing: the parent process writes; see ``Saver``."""

    def finish(self, *, wait: bool) -> None:
        """Do nothing: the parent process writes; see ``Saver``."""

    def free(self) -> None:
        """Do nothing: what was copied is sent at once; see ``Saver``."""

    def park(self, state: Any) -> None:
        """See ``Session``; also returns if the ranks have to go on to a later point.

        Raises:
            Suspended: this process must end.
        """
        answer = self._request("park", state.units, state.can_store and self.can_store, state.ended)
        while answer == "dump":
            self._end.send(("tree", packed(state.dump())))
            answer = self._answer(state.ended)
        self.must_yield = False

    def ended(self, state: dict[str, Any], *, whole: bool) -> None:
        """Report the end of this rank; ``whole`` is True if it has trained to the end."""
        self._end.send(("ended", (self.rank, state, whole)))

    def raised(self, error: Exception) -> None:
        """Report the error that ends this rank, and when it came: it may cause those of others."""
        try:
            pickle.loads(pickle.dumps(error))  # its class may want other arguments than it has
            self._end.send(("raised", (time.monotonic(), error)))
        except Exception:  # so it is, or the pipe is closed: torch reports the error itself
            return

    def _tell(self, kind: str, content: dict[str, Any]) -> None:
        if self.rank == 0:
            self._end.send((kind, content))

    def _request(
        self, kind: Kind, units: int, payload: Any, ended: Callable[[], bool] = lambda: False
    ) -> Answer:
        self._end.send((kind, RankRequest(kind, self._point, units, payload)))
        return self._answer(ended)

    def _answer(self, ended: Callable[[], bool]) -> Answer:
        while not self._end.poll(_ENDED_SECONDS):
            if ended():
                raise SystemExit(_TERMINATED)
        answer: Answer = self._end.recv()
        self.leaves = answer in ("leave", "prune")
        if answer == "leave":
            raise Suspended("The trial goes on in other processes.")
        return answer


def packed(tree: Tree) -> bytes:
    """Serialise a copy of a state, to be sent."""
    import torch

    buffer = io.BytesIO()
    torch.save(frozen(tree), buffer)
    return buffer.getvalue()


def unpacked(data: bytes) -> Tree:
    """Deserialise the bytes of ``packed`` into main memory."""
    import torch

    # Safe, as our own child sent it; values that cannot be stored are refused when it is written.
    tree: Tree = torch.load(io.BytesIO(data), weights_only=False)
    return tree
