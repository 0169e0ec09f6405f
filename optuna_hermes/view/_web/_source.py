"""The sources of the web page: this host's broker, and a study's ledger."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optuna_hermes.errors import BrokerError, HermesError
from optuna_hermes.view._history import StudyHistory, read_history
from optuna_hermes.view._web._page import Painter, Scene, served

if TYPE_CHECKING:
    from optuna_hermes._tables import StudyFacts
    from optuna_hermes.broker import Connection
    from optuna_hermes.ledger import Ledger

FACTS_SECONDS = 2.0
"""Longest age of the facts from Optuna's tables."""


ASK_SHARE = 0.1
"""Largest share of a broker's time for answers to this server: they are slow for huge studies."""


@dataclass(frozen=True, kw_only=True)
class NamedStudy:
    """A study that the user has named.

    Args:
        name: its name.
        facts: reads its facts from Optuna's tables.
        open: opens its ledger; returns None as long as it has none.
    """

    name: str
    facts: Callable[[], StudyFacts]
    open: Callable[[StudyFacts], Ledger | None]


class Watch:
    """Reader of a broker and a ledger, which makes pages of them.

    Args:
        study: the study to show; None for one that the broker serves.
    """

    def __init__(self, study: NamedStudy | None) -> None:
        self._study = study
        self._painter = Painter()
        self._connection: Connection | None = None
        self._told: dict[str, Any] | None = None
        self._told_at = 0.0
        self._ask_due = 0.0
        self._ledger: Ledger | None = None
        self._history: StudyHistory | None = None
        self._facts: StudyFacts | None = None
        self._facts_due = 0.0
        self._wishes: Mapping[int, str] = {}
        self._was_served = False
        self._lock = threading.Lock()

    def look(self) -> dict[str, Any]:
        """The page as of now."""
        with self._lock:
            broker = self._ask()
            problem = self._read(broker)
            name = self._study.name if self._study else _first_served(broker)
            scene = Scene(
                name=name,
                named=self._study is not None,
                history=self._history,
                broker=broker,
                was_served=self._was_served,
                problem=problem,
                wishes=self._wishes,
                now=self._told_at,
            )
            self._was_served = self._was_served or served(scene) is not None
            return self._painter.paint(scene)

    def rest(self) -> None:
        """Close the connection to the broker while no page is open."""
        with self._lock:
            self._hang_up()

    def close(self) -> None:
        """Close the connections to broker and database."""
        self.rest()
        if self._ledger is not None:
            self._ledger.close()

    def _ask(self) -> dict[str, Any] | None:
        """The broker's status, None if none answers; the last one again if answers take long."""
        begin = time.monotonic()
        if self._told is None or begin >= self._ask_due:
            self._told, self._told_at = self._answer(), time.time()
            now = time.monotonic()
            self._ask_due = now + (now - begin) / ASK_SHARE
        return self._told

    def _answer(self) -> dict[str, Any] | None:
        """Ask the broker; the connection is kept for the next time."""
        from optuna_hermes.broker import connect

        for _ in range(2):  # a kept connection may be that of a broker that has ended
            is_new = self._connection is None
            try:
                if self._connection is None:
                    self._connection = connect("viewer")
                return self._connection.ask_status()
            except BrokerError:
                self._hang_up()
                if is_new:
                    return None
        return None

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _read(self, broker: dict[str, Any] | None) -> str | None:
        """Update the history from the ledger; return the error's text if that fails."""
        if self._study is None:
            return None
        try:
            now = time.monotonic()
            if self._facts is None or now > self._facts_due:
                self._facts, self._facts_due = self._study.facts(), now + FACTS_SECONDS
            if self._ledger is None:
                self._ledger = self._study.open(self._facts)
            if self._ledger is not None:
                self._history = read_history(
                    self._ledger, self._facts, broker=broker, before=self._history
                )
                self._wishes = self._ledger.load_wishes(self._history.key)
        except HermesError as error:
            return str(error)
        return None


def _first_served(broker: dict[str, Any] | None) -> str | None:
    """The name of the served study with the most running trials."""
    entries = broker["studies"] if broker else []
    most = max(entries, key=lambda entry: entry["counts"]["running"], default=None)
    return None if most is None else str(most["name"])
