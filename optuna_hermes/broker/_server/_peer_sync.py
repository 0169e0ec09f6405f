"""Peer sync: changes that other hosts make to shared studies, and conflicts with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from optuna_hermes.broker._core._event_handler import EventHandler
from optuna_hermes.broker._core._events import (
    Claim,
    DropCheckpoint,
    Event,
    NameLease,
    Outrun,
    Refreshed,
    Write,
)
from optuna_hermes.broker._core._sharing import REFRESH_SECONDS, watched
from optuna_hermes.broker._core._study import Study
from optuna_hermes.broker._server._ledgers import Ledgers
from optuna_hermes.errors import NotOwnerError, StudyFullError
from optuna_hermes.ledger._records import CheckpointRecord, HostRecord, LeaseRecord, TrialRecord

if TYPE_CHECKING:
    from optuna_hermes.ledger import Ledger

_FEW = 500
"""Trials up to which the database is asked for their curves alone."""


class PeerSync:
    """Reads the ledgers of shared studies again and again, and notes there that this host lives.

    Args:
        handler: has the studies.
        ledgers: that are read.
        apply: handles the
    """

    def __init__(
        self, handler: EventHandler, ledgers: Ledgers, apply: Callable[[Event], None]
    ) -> None:
        self._handler = handler
        self._ledgers = ledgers
        self._apply = apply
        self._asked: set[str] = set()

    async def refresh(self) -> None:
        """Refresh every ``REFRESH_SECONDS`` until cancelled."""
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            for key, study in list(self._handler.state.studies.items()):
                if study.broker is not None and key not in self._asked:
                    self._asked.add(key)
                    self._ask(key, study)

    def _ask(self, key: str, study: Study) -> None:
        ask = partial(news_of, key, self._handler.presence(), watched(study))
        answer = asyncio.wrap_future(self._ledgers.read(key, study.spec.ledger_url, ask))
        overrides = study.overrides

        def heard(answer: asyncio.Future[Refreshed]) -> None:
            self._asked.discard(key)
            if not answer.cancelled() and answer.exception() is None:
                news = answer.result()
                if study.overrides != overrides:  # the overrides changed here meanwhile
                    news = replace(news, overrides=None)
                self._apply(news)

        answer.add_done_callback(heard)


def news_of(
    study: str, presence: HostRecord, known: Mapping[int, TrialRecord | None], ledger: Ledger
) -> Refreshed:
    """Read what other hosts have done in a study, and note that this broker lives.

    Args:
        study: its key.
        presence: of the broker that asks.
        known: the rows of trials that are not this broker's, as it knows them.
        ledger: where it is kept.
    """
    ledger.beat(presence)
    rows = ledger.load_trials(study)
    changed = tuple(
        row
        for row in rows
        if (row.number in known or row.owner != presence.instance) and row != known.get(row.number)
    )
    numbers = {row.number for row in changed}
    few = numbers if len(numbers) < _FEW else None
    checkpoints = ledger.load_checkpoints(study) if changed else []
    return Refreshed(
        study=study,
        last_epoch=ledger.last_epoch(),
        leases=tuple(ledger.load_leases(study, live=True)),
        hosts=tuple(ledger.load_hosts()),
        trials=changed,
        curves=ledger.load_curves(study, few) if changed else {},
        checkpoints=tuple(each for each in checkpoints if each.number in numbers),
        overrides=ledger.load_overrides(study),
    )


def outrun(
    study: str, items: Sequence[Write], error: Exception, last_epoch: int
) -> tuple[Outrun, tuple[Write, ...]]:
    """Split records after a claim conflict: the event for what never was, and the rest to write.

    Args:
        study: the study's key.
        items: what was to be written together.
        error: the ledger's; see ``is_race``.
        last_epoch: the highest one there is.
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
    )
    event = Outrun(
        study=study,
        epochs=tuple(lease.epoch for lease in leases),
        numbers=() if lost is None else (lost,),
        paths=tuple(item.checkpoint.path for item in saved),
        full=isinstance(error, StudyFullError),
        last_epoch=last_epoch,
    )
    return event, rest
