"""How long a run may be silent after it was asked for something, pure."""

from __future__ import annotations

from collections.abc import Iterator

from optuna_hermes.broker._core import _story as story
from optuna_hermes.broker._core._book import Book, Client, Lease
from optuna_hermes.broker._core._events import Command, Kill
from optuna_hermes.broker._core._run import Run
from optuna_hermes.model import TierName

GRACE_SECONDS = 300.0
"""The grace period of a run whose rhythm is not known, and of one that writes a checkpoint."""

LEAST_GRACE_SECONDS = 30.0
USUAL_SILENCES = 10
"""A run may be silent for this many times its longest silence until now."""


def grace(silence: float | None, *, unmeasured: float = GRACE_SECONDS) -> float:
    """Seconds after which a run that was asked to yield and shows no progress is killed.

    Args:
        silence: its longest time without a sign of life while it trained, None if not measured.
        unmeasured: the grace period before anything is measured.
    """
    if silence is None:
        return unmeasured
    return max(LEAST_GRACE_SECONDS, USUAL_SILENCES * silence)


def heard_from(lease: Lease, run: Run | None, now: float) -> None:
    """A sign of life: the silence before it is normal, if the run was training."""
    silence = now - lease.last_progress
    # Beats come once a second at most: less says nothing of the rhythm.
    if run is not None and lease.training and silence >= 1.0:
        run.silence = max(run.silence or 0.0, silence)
    lease.last_progress = now


class Silence:
    """Watches those in a ``Book`` who were asked for something.

    Args:
        book: the broker's book.
        grace_seconds: see ``GRACE_SECONDS``.
    """

    def __init__(self, book: Book, grace_seconds: float = GRACE_SECONDS) -> None:
        self._book = book
        self._grace_seconds = grace_seconds

    def wakeups(self) -> Iterator[float]:
        """When somebody's grace period ends."""
        for lease in self._book.leases():
            if lease.yielding and not lease.held:
                yield lease.last_progress + self._grace(lease, lease.yielding)
        for run in self._asked():
            yield run.asked_at + self._grace_seconds
        for client in self._leaving().values():
            yield client.left_at + self._grace_seconds

    def begin_anew(self, now: float) -> None:
        """The broker itself was stopped: what its clients said meanwhile is still to be read."""
        for lease in self._book.leases():
            lease.last_progress = now
        for run in self._asked():
            run.asked_at = now
        for client in self._leaving().values():
            client.left_at = now

    def end(self, now: float, out: list[Command]) -> None:
        """Kill workers whose grace period is over; each kill opens another period.

        The process of a plain trial is its user's: it is waited for where it has a device, and
        not asked again where it is parked.
        """
        for lease in self._book.leases():
            if not lease.yielding or lease.held:
                continue
            if now >= lease.last_progress + self._grace(lease, lease.yielding):
                lease.last_progress = now
                self._kill(lease.connection, self._book.run_of(lease), now, out)
        for run in self._asked():
            if now >= run.asked_at + self._grace_seconds:
                run.asked_at = now
                if not self._kill(run.connection or 0, run, now, out):
                    run.asked, run.stores, run.moves = None, False, False
        for connection, client in self._leaving().items():
            if now >= client.left_at + self._grace_seconds:
                client.left_at = now
                self._kill(connection, None, now, out)

    def _asked(self) -> list[Run]:
        """Parked runs that have not answered yet."""
        return [run for run in self._book.runs() if run.asked and run.state == "parked"]

    def _leaving(self) -> dict[int, Client]:
        """Workers that said that they leave and are still there."""
        clients = self._book.clients.items()
        return {key: each for key, each in clients if each.leaving and each.role == "worker"}

    def _grace(self, lease: Lease, tier: TierName) -> float:
        run = self._book.run_of(lease)
        measured = grace(run.silence if run else None, unmeasured=self._grace_seconds)
        # A checkpoint of any size is written without a sign of life.
        return max(measured, self._grace_seconds) if tier == "disk" else measured

    def _kill(self, connection: int, run: Run | None, now: float, out: list[Command]) -> bool:
        client = self._book.clients.get(connection)
        if client is None or client.role != "worker":
            return False
        kill = Kill(connection=connection, pid=client.pid)
        out.append(kill)
        out.extend(story.killed(self._book, run, kill.pid, kill.reason, now))
        return True
