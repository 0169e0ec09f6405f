"""The pages of a study as of now, made of its broker's status and its ledger."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from optuna_hermes.errors import HermesError
from optuna_hermes.view._web._page import PageBuilder, PageInput, served
from optuna_hermes.view.history import StudyHistory
from optuna_hermes.view.source import StudyReader

if TYPE_CHECKING:
    from optuna_hermes._optuna_tables import StudyFacts
    from optuna_hermes.broker._protocol import BrokerStatus

# Of a broker's time, for answers to this server: one for a huge study keeps it from its work.
ASK_SHARE = 0.1


class PageReader:
    """Reader of a broker and a ledger, which makes pages of the study ``name``.

    With None for the name and the facts (see ``StudyReader``) it is one that the broker serves.
    """

    def __init__(
        self, name: str | None = None, facts: Callable[[], StudyFacts] | None = None
    ) -> None:
        self._name = name
        self._reader = StudyReader(facts)
        self._builder = PageBuilder()
        self._broker: BrokerStatus | None = None
        self._broker_at = 0.0
        self._ask_due = 0.0
        self._history: StudyHistory | None = None
        self._shown: str | None = None
        self._was_served = False
        self._lock = threading.Lock()

    def look(self) -> dict[str, Any]:
        """The page as of now."""
        with self._lock:
            broker, problem = self._reader.apart(self._ask()), None
            study = broker.study(self._history.key) if broker and self._history else None
            # Nothing is asked of a database that is known to be away: that may take half a minute.
            if study is None or study.outage_seconds is None:
                try:
                    self._history = self._reader.history(broker)
                except HermesError as error:
                    problem = str(error)
                broker = self._reader.apart(broker)  # the facts are read by now
            # As long as it is served: which study has most running trials changes all the time.
            if broker and not any(each.name == self._shown for each in broker.studies):
                busiest = max(broker.studies, key=lambda each: each.counts.running, default=None)
                self._shown = None if busiest is None else busiest.name
            source = PageInput(
                name=self._name or self._shown,
                named=self._name is not None,
                key=self._reader.key,
                maximize=self._reader.maximize,
                history=self._history,
                broker=broker,
                silence=self._reader.silence,
                was_served=self._was_served,
                problem=problem,
                now=self._broker_at,
            )
            # Kept for the time in which the broker is away. One that has left the study before it
            # ended, as after a time-out, is not missed.
            if broker is not None:
                self._was_served = served(source) is not None
            return self._builder.build(source)

    def disconnect(self) -> None:
        """Close the connection to the broker while no page is open."""
        with self._lock:
            self._reader.disconnect()
            # A broker that ends while nobody looks is not missed: its study may have ended first.
            self._was_served = False

    def close(self) -> None:
        """Close the connections to broker and database, unless a look is under way."""
        # That may take long, and closes nothing that the end of the process does not.
        if self._lock.acquire(blocking=False):
            try:
                self._reader.close()
            finally:
                self._lock.release()

    def _ask(self) -> BrokerStatus | None:
        """The broker's status, None if none answers; the last one again if answers take long."""
        begin = time.monotonic()
        if self._broker is None or begin >= self._ask_due:
            self._broker, self._broker_at = self._reader.status(), time.time()
            now = time.monotonic()
            self._ask_due = now + (now - begin) / ASK_SHARE
        return self._broker
