"""What happens while the database of a study's ledger is away. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from optuna_hermes.broker._core._book import Book
from optuna_hermes.broker._core._ends import Ends
from optuna_hermes.broker._core._events import Command, LedgerAway, LedgerBack, Send
from optuna_hermes.broker._core._study import Study
from optuna_hermes.broker._protocol import Yield

AWAY_SECONDS = 300.0
"""How long training goes on without a database, before everything is suspended to disk."""


class Away:
    """Keeps the studies of a ``Book`` where they are until their database is back."""

    def __init__(self, book: Book, ends: Ends) -> None:
        self._book = book
        self._ends = ends

    def begin(self, event: LedgerAway, now: float) -> None:
        """Nobody yields for what could not be granted; what is reserved is free for others."""
        for study in self._studies(event.studies):
            if study.away_since is None:
                study.away_since, study.away_reason = now, event.reason
            study.watched_since = None
            self._ends.wants(study)
        for lease in self._book.leases():
            if lease.study in event.studies and lease.epoch in event.held:
                lease.held = True
            if lease.epoch in event.unasked:
                lease.yielding = None
                run = self._book.run_of(lease)
                if run is not None:
                    run.asked = None

    def end(self, event: LedgerBack, now: float) -> None:
        """Leases that were held begin now."""
        for study in self._studies(event.studies):
            study.away_since = None
        for lease in self._book.leases():
            if lease.held and lease.study in event.studies:
                lease.held = False
                lease.deadline += now - lease.slice_started
                lease.started = lease.slice_started = lease.last_progress = now

    def wakeups(self) -> Iterator[float]:
        """When somebody's patience ends."""
        for study in self._book.studies.values():
            if study.away_since is not None and not study.draining:
                yield study.away_since + AWAY_SECONDS

    def look(self, now: float) -> None:
        """Give up studies whose database has been away for too long."""
        for study in self._book.studies.values():
            since = study.away_since
            if since is not None and not study.problem and now >= since + AWAY_SECONDS:
                study.problem = (
                    f"The database did not answer for {AWAY_SECONDS:.0f} s, so every trial was "
                    f"suspended to disk: bring it back, then run the same command again. "
                    f"{study.away_reason}"
                )

    def _studies(self, keys: tuple[str, ...]) -> Iterator[Study]:
        for key in keys:
            if key in self._book.studies:
                yield self._book.studies[key]


def to_answer(book: Book, commands: Iterable[Command]) -> dict[int, str]:
    """Whose database has to show that it is there before a lease's holder is asked to leave.

    Whoever leaves because its study ends, or its device is broken, goes to disk without one.

    Returns:
        Studies by the epochs of the leases.
    """
    asked = {}
    for command in commands:
        if isinstance(command, Send) and isinstance(command.message, Yield):
            slot = book.slot_of(command.message.epoch)
            study = book.studies[slot.lease.study] if slot and slot.lease else None
            if study is not None and not study.draining and study.away_since is None:
                asked[command.message.epoch] = study.spec.key
    return asked


def unasked(
    book: Book, epochs: Collection[int], studies: Collection[str], *, draining: bool
) -> tuple[int, ...]:
    """Those of the epochs that are of leases of such studies, draining or not."""
    its = (lease for lease in book.leases() if lease.study in studies and lease.epoch in epochs)
    return tuple(a.epoch for a in its if book.studies[a.study].draining == draining)
