"""The source of ``top``: the broker's socket, and a study's ledger."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from optuna_hermes.broker import Connection, connect
from optuna_hermes.broker._protocol import ChangePolicy, Wishes
from optuna_hermes.cli._studies import broker_status, facts_and_ledger
from optuna_hermes.errors import BrokerError, InvalidInputError
from optuna_hermes.view._history import Bar, StudyHistory, read_history
from optuna_hermes.view._top._picture import Picture, TopSource
from optuna_hermes.view._top._read import picture_of, picture_of_history

if TYPE_CHECKING:
    from rich.console import RenderableType

REST_SECONDS = 5.0
"""Seconds between two reads of the ledger of a study that this host's broker does not serve."""

_READ_ONLY = "No broker of yours serves this study: what its ledger has is shown, read-only."


class StudySource(TopSource):
    """This host's broker, and the ledger of a study if one is named.

    Args:
        storage: Optuna's storage URL, None if event logs and ``finish`` are not needed.
        name: the study to show, None for one that the broker serves.
    """

    def __init__(self, storage: str | None, name: str | None) -> None:
        self._storage = storage
        self._name = name
        self._named_key = ""
        self._connection: Connection | None = None
        self._before: Picture | None = None
        self._history: StudyHistory | None = None
        self._rested_at: float | None = None

    def look(self, key: str) -> Picture:
        """Return the present picture; see ``TopSource``."""
        document = self._ask()
        if self._name is not None and not self._named_key:
            self._read(document)
        if document is None and self._name is None:
            raise BrokerError("No broker runs on this host any more.")
        if document is not None and (self._name is None or self._is_served(document)):
            picture = picture_of(document, key or self._named_key, time.time(), self._before)
            self._before, self._rested_at = picture, None
            return picture
        return self._remembered(document)

    def past(self) -> Sequence[Bar]:
        """Return past leases; see ``TopSource``."""
        if self._name is None:
            return ()
        return self._read(None).bars

    def want(self, key: str, number: int, wish: Literal["held", "boosted"] | None) -> None:
        """Hold, boost or release a trial."""
        self._say(Wishes(study=key, numbers=(number,), wish=wish))

    def finish(self, key: str, number: int) -> None:
        """Finish a trial at its last value."""
        from optuna_hermes.cli._upkeep import close_trials

        close_trials(*self._study_of(key, "`f` tells Optuna"), [number])

    def change_policy(self, key: str, policy: str) -> None:
        """Change the study's policy."""
        self._say(ChangePolicy(study=key, policy=policy))

    def story(self, key: str, number: int) -> RenderableType:
        """Return the event log of a trial."""
        from optuna_hermes.cli._trial import trial_document
        from optuna_hermes.view import trial_view

        storage, name = self._study_of(key, "A story is in the ledger")
        return trial_view(trial_document(storage, name, number, broker_status()))

    def close(self) -> None:
        """Close the connection to the broker."""
        if self._connection is not None:
            self._connection.close()

    # -- inside --------------------------------------------------------------------------------

    def _ask(self) -> dict[str, Any] | None:
        """Ask the broker for its status, or the next broker if the last one has ended."""
        # A kept connection may be that of a broker that has ended: then a new one is tried.
        for _ in range(2):
            is_new = self._connection is None
            try:
                self._connection = self._connection or connect("viewer")
                return dict(self._connection.ask_status(curves=True))
            except BrokerError:
                self.close()
                self._connection = None
                if is_new:
                    return None
        return None

    def _say(self, message: Wishes | ChangePolicy) -> None:
        connection = connect("viewer")
        try:
            connection.want(message)
        finally:
            connection.close()

    def _is_served(self, document: dict[str, Any]) -> bool:
        return any(entry["key"] == self._named_key for entry in document["studies"])

    def _remembered(self, document: dict[str, Any] | None) -> Picture:
        history, now = self._history, time.monotonic()
        if history is None or self._rested_at is None or now - self._rested_at > REST_SECONDS:
            history, self._rested_at = self._read(document), now
        assert self._name is not None
        return picture_of_history(history, self._name, time.time(), _READ_ONLY)

    def _read(self, document: dict[str, Any] | None) -> StudyHistory:
        """Update the history from the ledger."""
        with facts_and_ledger(*self._named("")) as (facts, ledger):
            self._named_key = str(facts.key)
            self._history = read_history(ledger, facts, broker=document, before=self._history)
            return self._history

    def _named(self, why: str) -> tuple[str, str]:
        name = self._name or (self._before.study if self._before else None)
        if self._storage is None or not name:
            raise InvalidInputError(f"{why}: start `top` with --storage URL and --study-name NAME.")
        return self._storage, name

    def _study_of(self, key: str, why: str) -> tuple[str, str]:
        """Storage and name of the study that is shown, whose key must match."""
        storage, name = self._named(why)
        with facts_and_ledger(storage, name) as (facts, _):
            if facts.key != key:
                raise InvalidInputError(f"The study {name!r} of --storage is another one.")
        return storage, name
