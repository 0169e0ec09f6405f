"""The parent process of a trial's ranks: it makes them stop, save and report as one.

It owns what a trial has once: the Optuna trial and the session. Messages that count once come from
rank 0. Where all ranks have to be at the same point, each sends its arrival and waits for an
answer, never inside a collective operation; state that differs by rank is gathered in the same way.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from threading import Thread
from typing import Any

from optuna_hermes.errors import MonitorError, SuspendError
from optuna_hermes.suspend._base import Session
from optuna_hermes.suspend._ranks._rank import (
    POINTS,
    STOP,
    YIELD,
    Answer,
    RankChannels,
    RankRequest,
    Tree,
    unpacked,
)

RANK_ANSWER_SECONDS = 5.0
"""Longest time for which ranks wait for the others to come to the same point."""
_POLL_SECONDS = 0.01
"""Interval at which the listener checks if the trial must yield."""


class Ranks:
    """Collects the messages of a trial's ranks, and talks to session and trial on their behalf.

    Args:
        context: the ``multiprocessing`` context by which the ranks are started.
        all_started: called when all ranks have begun, to free what only they need.
        report: called with a unit and a value; returns True if the trial is pruned.
        save: called with a checkpoint and its units, see ``Saver.begin``.
        settle: called before another is written, to wait until those are safe.
        merge: makes one checkpoint of those of all ranks.
    """

    def __init__(
        self,
        count: int,
        context: Any,
        *,
        trial: str,
        session: Session | None,
        all_started: Callable[[], None],
        report: Callable[[int, float], bool],
        save: Callable[..., None] | None,
        settle: Callable[[], None],
        merge: Callable[[list[Tree]], Tree],
    ) -> None:
        self.error: BaseException | None = None
        """The error that ended the training early: of those of ranks, which came first."""
        self._raised_at = math.inf
        self.end: dict[str, Any] | None = None
        """The state that rank 0 sent at its end."""
        pipes = [context.Pipe() for _ in range(count)]
        self.channels = RankChannels(
            rank_ends=tuple(child for _, child in pipes),
            parent_ends=tuple(parent for parent, _ in pipes),
            flags=context.RawArray("q", POINTS + count),
            parent=os.getpid(),
            leased=session is not None,
            checkpoint_dir=session.checkpoint_dir if session is not None else None,
            devices=session.devices if session is not None else (),
        )
        self._name = trial
        self._session = session
        self._all_started = all_started
        self._report = report
        self._save = save
        self._settle_saves = settle
        self._merge = merge
        self._open = {end: rank for rank, end in enumerate(self.channels.parent_ends)}
        self._count = count
        self._started = 0
        self._done: set[int] = set()
        self._lost = False
        self._requests: dict[int, RankRequest] = {}
        self._parked_at = 0.0
        self._closing = False
        self._listener = Thread(target=self._listen, name="hermes-ranks", daemon=True)
        self._listener.start()

    def close(self) -> None:
        """Process the remaining messages and stop listening; the ranks have ended."""
        self._closing = True
        self._listener.join()
        for end in (*self.channels.rank_ends, *self.channels.parent_ends):
            end.close()

    # -- the listener --------------------------------------------------------------------------

    def _listen(self) -> None:
        while True:
            closing = self._closing  # before the pipes are looked at, as it is set at any time
            ready = wait(list(self._open), _POLL_SECONDS)
            # Not before the pipes are empty: ranks may have sent messages right before their end.
            if closing and not ready:
                return
            try:
                for end in ready:
                    self._read_rank(end)  # type: ignore[arg-type]
                self._settle()
            except BaseException as error:
                self._fail(error)
            if self._session is not None:
                self.channels.flags[YIELD] = self._session.must_yield

    def _read_rank(self, end: Connection) -> None:
        try:
            kind, content = end.recv()
        except (EOFError, OSError):
            self._lost = self._lost or self._open[end] not in self._done
            del self._open[end]
            return
        if kind == "started":
            self._begin()
        elif kind == "raised":
            raised_at, error = content
            if raised_at < self._raised_at:
                self.error, self._raised_at = error, raised_at
        elif kind == "ended":
            self._finish(*content)
        elif kind in ("training", "report_sizes", "beat"):
            getattr(self._leased, kind)(**content)
        else:
            self._requests[self._open[end]] = content
            self._parked_at = time.monotonic()

    def _begin(self) -> None:
        self._started += 1
        if self._started == self._count:
            self._all_started()
            # Only the ranks hold these ends from here on: the death of a rank closes its pipe.
            for end in self.channels.rank_ends:
                end.close()

    def _finish(self, rank: int, state: dict[str, Any], whole: bool) -> None:
        self._done.add(rank)
        self._lost = self._lost or not whole
        if rank == 0:
            self.end = state

    def _settle(self) -> None:
        requests = self._requests
        if not requests:
            return
        waited = time.monotonic() - self._parked_at
        if self.error is not None or self._lost:
            self._tell(list(requests), "leave")
        elif len(requests) == self._count:
            self._together()
        elif self._done or waited >= RANK_ANSWER_SECONDS:
            self._move_on()

    def _together(self) -> None:
        """Answer all ranks, which wait at the same point, or move them on if they do not."""
        if len({(each.kind, each.point) for each in self._requests.values()}) > 1:
            self._move_on()
            return
        first = self._requests[0]
        payloads = [self._requests[rank].payload for rank in range(self._count)]
        answer: Answer = "go"
        if first.kind == "report":
            answer = "prune" if self._reports(first.units, payloads) else "go"
        elif first.kind == "storable":
            answer = "go" if all(payloads) else "on"
        elif first.kind == "save":
            assert self._save is not None
            self._save(self._joined(payloads), units=first.units)
        else:
            self._leased.park(_RanksCleanPoint(self, first.units, can_store=all(payloads)))
            # Before the answers: a rank that goes on must not see the point of this stop.
            self.channels.flags[YIELD] = self.channels.flags[STOP] = 0
        self._tell(list(self._requests), answer)

    def _reports(self, unit: int, values: list[float | None]) -> bool:
        """Report the value of rank 0, if there are any; True if the trial is pruned."""
        if len({value is None for value in values}) > 1:
            raise MonitorError(
                f"All ranks of {self._name} must have the metric that is compared, but only some "
                "have logged it: log it in each of them, with sync_dist=True."
            )
        return values[0] is not None and self._report(unit, values[0])

    def _move_on(self) -> None:
        """Let ranks that wait to be parked go on to a later point."""
        waiting = [rank for rank, each in self._requests.items() if each.kind == "park"]
        if waiting:
            self.channels.flags[STOP] = max(each.point for each in self._requests.values())
            self._tell(waiting, "on")

    def _tell(self, ranks: Iterable[int], answer: Answer) -> None:
        for rank in ranks:
            self._requests.pop(rank)
            self._send(rank, answer)

    def _send(self, rank: int, answer: Answer) -> None:
        try:
            self.channels.parent_ends[rank].send(answer)
        except OSError:
            self._lost = True

    def _fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error, self._raised_at = error, -math.inf
        self._tell(list(self._requests), "leave")

    # -- one state -----------------------------------------------------------------------------

    def dump(self) -> Tree:
        """Gather the states of all ranks, which wait, into one tree.

        Raises:
            SuspendError: a rank has ended.
        """
        for rank in self._requests:
            self._send(rank, "dump")
        trees = []
        for rank, end in enumerate(self.channels.parent_ends):
            try:
                kind, content = end.recv()
            except (EOFError, OSError) as error:
                self._lost = True
                raise SuspendError(
                    f"Every rank of {self._name} must give its state, but rank {rank} has ended."
                ) from error
            if kind == "raised":
                raise content[1]
            trees.append(content)
        return self._joined(trees)

    def closing(self) -> bool:
        """True if the ranks have ended."""
        return self._closing

    def _joined(self, packed: list[bytes]) -> Tree:
        return self._merge([unpacked(each) for each in packed])

    @property
    def _leased(self) -> Session:
        assert self._session is not None
        return self._session


class _RanksCleanPoint:
    """All ranks at the same point (``suspend.CleanPoint``)."""

    can_offload = False

    def __init__(self, ranks: Ranks, units: int, *, can_store: bool) -> None:
        self.name = ranks._name
        self.units = units
        self.can_store = can_store
        self.ended = ranks.closing
        self.dump = ranks.dump
        self._settle = ranks._settle_saves

    def waits(self) -> None:
        """Nothing was put off: see ``Saver.start``."""

    def saved(self) -> None:
        """None: ranks do not stop where they have saved."""
        self._settle()

    def roots(self) -> Iterable[object]:
        """None are in this process."""
        return ()
