"""Peer sync: changes that other hosts make to shared studies, read from the ledgers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from optuna_hermes.broker._core._event_handler import EventHandler
from optuna_hermes.broker._core._events import Event, Refreshed
from optuna_hermes.broker._core._sharing import REFRESH_SECONDS, watched
from optuna_hermes.broker._core._study import Study
from optuna_hermes.broker._server._ledgers import Ledgers, news_of


class PeerSync:
    """Reads the ledgers of shared studies again and again, and notes there that this host lives.

    Args:
        handler: has the studies.
        ledgers: that are read.
        apply: handles the events.
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
        wishes = study.wishes

        def heard(answer: asyncio.Future[Refreshed]) -> None:
            self._asked.discard(key)
            if not answer.cancelled() and answer.exception() is None:
                news = answer.result()
                if study.wishes != wishes:  # the overrides changed here meanwhile
                    news = replace(news, wishes=None)
                self._apply(news)

        answer.add_done_callback(heard)
