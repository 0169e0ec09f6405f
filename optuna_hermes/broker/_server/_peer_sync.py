"""Peer sync: changes that other hosts make to shared studies, and conflicts with them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from optuna_hermes.broker._core._event_handler import EventHandler
from optuna_hermes.broker._core._event_log import is_of_grant
from optuna_hermes.broker._core._events import (
    Claim,
    ClaimConflict,
    DropCheckpoint,
    Event,
    NameLease,
    Refreshed,
    Write,
)
from optuna_hermes.broker._core._shared_studies import REFRESH_SECONDS, rows_of_others
from optuna_hermes.broker._core._study import Study
from optuna_hermes.broker._server._ledgers import Ledgers
from optuna_hermes.errors import NotOwnerError, StudyFullError
from optuna_hermes.ledger._records import (
    DEAD_SECONDS,
    CheckpointRecord,
    EventRecord,
    HostRecord,
    LeaseRecord,
    TrialRecord,
)

if TYPE_CHECKING:
    from optuna_hermes.ledger import Ledger

BEAT_SECONDS = 2 * REFRESH_SECONDS
"""Age from which a heartbeat is written again although nothing has changed in it."""

_MANY = 10_000
"""Trials from which the database is asked for all curves: a statement has few parameters."""


class PeerSync:
    """Reads the ledgers of shared studies again and again, and notes there that this host lives."""

    def __init__(
        self, handler: EventHandler, ledgers: Ledgers, apply: Callable[[Event], None]
    ) -> None:
        self._handler = handler
        self._ledgers = ledgers
        self._apply = apply
        self._asked: set[str] = set()
        self._seen: dict[str, Seen] = {}
        self._beats: dict[str, tuple[HostRecord, float]] = {}

    async def refresh(self) -> None:
        """Refresh every ``REFRESH_SECONDS`` until cancelled."""
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            studies = self._handler.state.studies
            self._seen = {key: seen for key, seen in self._seen.items() if key in studies}
            for key, study in list(studies.items()):
                if study.broker is not None and key not in self._asked:
                    self._asked.add(key)
                    self._ask(key, study)

    def _ask(self, key: str, study: Study) -> None:
        seen, url = self._seen.get(key, Seen()), study.spec.ledger_url
        presence = self._handler.presence(time.monotonic())
        query = partial(
            read_changes, key, presence, rows_of_others(study), seen, self._is_due(url, presence)
        )
        answer = asyncio.wrap_future(self._ledgers.read_aside(key, url, query))
        overrides = dict(study.overrides)

        def on_answer(answer: asyncio.Future[tuple[Refreshed, Seen]]) -> None:
            self._asked.discard(key)
            if answer.cancelled() or answer.exception() is not None:
                self._beats.pop(url, None)
            else:
                news, now_seen = answer.result()
                if study.overrides != overrides:  # they changed here meanwhile: read them again
                    news, now_seen = replace(news, overrides={}), seen
                self._seen[key] = now_seen
                self._apply(news)

        answer.add_done_callback(on_answer)

    def _is_due(self, url: str, presence: HostRecord) -> bool:
        """True if a heartbeat has to be written; it counts as written from now on."""
        now = time.monotonic()
        last, at = self._beats.get(url, (None, 0.0))
        if last == presence and now - at < BEAT_SECONDS:
            return False
        self._beats[url] = presence, now
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """State of a study as a broker has read it last.

    Args:
        change: the change number up to which it has read all changes.
        last_epoch: as of ``Refreshed``.
        leases: as of ``Refreshed``.
    """

    change: int = 0
    last_epoch: int = 0
    leases: tuple[LeaseRecord, ...] = ()


def read_changes(
    study: str,
    presence: HostRecord,
    known: Mapping[int, TrialRecord | None],
    seen: Seen,
    beats: bool,
    ledger: Ledger,
) -> tuple[Refreshed, Seen]:
    """Read what other hosts have done in a study since this broker has looked last.

    Args:
        presence: of the broker that asks.
        known: the rows of trials that are not this broker's, as it knows them.
        beats: whether it has to say that it lives.
    """
    # Before the rest: what is changed while it is read is read again the next time.
    mark = ledger.change_mark(presence if beats else None)
    # What a broker that is gone has reported last has changed no row.
    gone = {host.instance for host in mark.hosts if host.age_seconds >= DEAD_SECONDS}
    again = {number for number, row in known.items() if row is None or row.owner in gone}
    if mark.change == seen.change and not again:
        nothing = Refreshed(
            study=study, last_epoch=seen.last_epoch, leases=seen.leases, hosts=mark.hosts
        )
        return nothing, seen
    removed = mark.forgotten > seen.change > 0
    rows = ledger.load_changed(study, 0 if removed else seen.change, again)
    changed = tuple(
        row
        for _, row in rows
        if (row.number in known or row.owner != presence.instance)
        and (row.number in again or row != known.get(row.number))
    )
    numbers = {row.number for row in changed}
    some = numbers if len(numbers) < _MANY else None
    checkpoints = ledger.load_checkpoints(study, some) if changed else []
    seen = Seen(
        change=mark.change,
        last_epoch=ledger.last_epoch(),
        leases=tuple(ledger.load_leases(study, live=True)),
    )
    found = {row.number for _, row in rows}
    news = Refreshed(
        study=study,
        last_epoch=seen.last_epoch,
        leases=seen.leases,
        hosts=mark.hosts,
        trials=changed,
        curves=ledger.load_curves(study, some) if changed else {},
        checkpoints=tuple(each for each in checkpoints if each.number in numbers),
        overrides={row.number: override for override, row in rows},
        gone=tuple(n for n, row in known.items() if row and n not in found) if removed else (),
    )
    return news, seen


def split_conflict(
    study: str, items: Sequence[Write], error: Exception, last_epoch: int
) -> tuple[ClaimConflict, tuple[Write, ...]]:
    """Split records after a claim conflict: the event for what never was, and the rest to write.

    The ``items`` were to be written together; ``is_race`` is true of the error.
    """
    leases = [item for item in items if isinstance(item, LeaseRecord)]
    lost = error.number if isinstance(error, NotOwnerError) else None
    undone = {lost, *(lease.number for lease in leases)}
    # The trial's new owner has other checkpoints: these must not be taken for newer ones.
    saved = [x for x in items if isinstance(x, CheckpointRecord) and x.number == lost]
    void = (LeaseRecord, Claim, DropCheckpoint) if saved else (LeaseRecord, Claim)
    rest = tuple(
        item
        for item in items
        if not isinstance(item, void)
        and item not in saved
        and not (isinstance(item, TrialRecord) and item.number in undone)
        and not (isinstance(item, NameLease) and item.number == lost)
        and not (isinstance(item, EventRecord) and is_of_grant(item) and item.number in undone)
    )
    event = ClaimConflict(
        study=study,
        epochs=tuple(lease.epoch for lease in leases),
        numbers=() if lost is None else (lost,),
        paths=tuple(item.checkpoint.path for item in saved),
        full=isinstance(error, StudyFullError),
        last_epoch=last_epoch,
    )
    return event, rest
