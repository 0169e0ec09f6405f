"""The sources of what is shown live: this host's broker, and a study's ledger."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from optuna_hermes.errors import (
    BrokerConflictError,
    BrokerError,
    BrokerSilentError,
    ProtocolError,
)
from optuna_hermes.view import formats
from optuna_hermes.view.history import StudyHistory, read_history

if TYPE_CHECKING:
    from optuna_hermes._optuna_tables import StudyFacts
    from optuna_hermes.broker import Connection
    from optuna_hermes.broker._protocol import BrokerStatus
    from optuna_hermes.ledger import Ledger

# Longest age of the facts from Optuna's tables, whose reading grows with the study.
FACTS_SECONDS = 2.0

# Of a broker that may train, but tells nothing: it hangs, or is of another version, for example.
_TELLS_NOTHING = (BrokerSilentError, BrokerConflictError, ProtocolError)


def ask_broker(*, curves: bool = False) -> tuple[BrokerStatus | None, str]:
    """The status of this host's broker, and the reason why one that may train tells none.

    The ledger can be shown without it. Without a broker there is neither.
    """
    from optuna_hermes.broker import broker_status

    try:
        return broker_status(curves=curves), ""
    except _TELLS_NOTHING as error:
        return None, str(error)


def apart(broker: BrokerStatus | None, facts: StudyFacts) -> BrokerStatus | None:
    """A broker's status where the original of a study in a copied file has a key of its own.

    A broker serves one of them; both have one key, and their files tell them apart.
    """
    from optuna_hermes.ledger import is_other_file

    key, url = facts.key, facts.ledger_url
    found = None if broker is None or key is None else broker.study(key)
    if broker is None or found is None or url is None or not is_other_file(found.ledger_url, url):
        return broker
    other = f"{key} in {found.ledger_url}"

    def renamed(each: Any) -> Any:
        return replace(each, key=other) if each is not None and each.key == key else each

    devices = (
        replace(each, holder=renamed(each.holder), residents=tuple(map(renamed, each.residents)))
        for each in broker.devices
    )
    return replace(broker, studies=tuple(map(renamed, broker.studies)), devices=tuple(devices))


class StudyReader:
    """Reader of the broker's status and of a study's history, for one thread at a time.

    Args:
        facts: reads the facts of the study from Optuna's tables, None if no history is wanted.
        curves: true to ask the broker for each trial's recent values, too.
    """

    # Connections to broker and database are kept: opening them takes longer than reading.

    def __init__(self, facts: Callable[[], StudyFacts] | None, *, curves: bool = False) -> None:
        self._read_facts = facts
        self._curves = curves
        self.silence = ""
        """The reason why a broker that may train has not told its status; else empty."""
        self._connection: Connection | None = None
        self._ledger: Ledger | None = None
        self._history: StudyHistory | None = None
        self._facts: StudyFacts | None = None
        self._facts_due = 0.0

    @property
    def key(self) -> str | None:
        """The study's key, None if it has none or that was not read."""
        return None if self._facts is None else self._facts.key

    @property
    def maximize(self) -> bool | None:
        """True if the study's values are maximised, None if that was not read."""
        return None if self._facts is None else self._facts.sign < 0

    def status(self) -> BrokerStatus | None:
        """The status of this host's broker, None if none answers."""
        from optuna_hermes.broker import connect

        # Twice: a kept connection may be that of a broker that has ended.
        for _ in range(2):
            self.silence = ""
            is_new = self._connection is None
            try:
                if self._connection is None:
                    self._connection = connect("viewer")
                return self._connection.ask_status(curves=self._curves)
            except BrokerError as error:
                self.disconnect()
                is_silent = isinstance(error, BrokerSilentError)
                if isinstance(error, _TELLS_NOTHING):
                    self.silence = formats.SILENT if is_silent else str(error)
                if is_new or is_silent:
                    return None
        return None

    def apart(self, broker: BrokerStatus | None) -> BrokerStatus | None:
        """See ``apart``; the same status as long as the facts of the study were not read."""
        return broker if self._facts is None else apart(broker, self._facts)

    def history(self, broker: BrokerStatus | None) -> StudyHistory | None:
        """The history of the study as of now, None as long as it has no ledger.

        Raises:
            HermesError: Optuna's tables or the ledger cannot be read.
        """
        from optuna_hermes.ledger import open_ledger

        if self._read_facts is None:
            return None
        now = time.monotonic()
        if self._facts is None or now > self._facts_due:
            before, self._facts = self._facts, self._read_facts()
            self._facts_due = now + FACTS_SECONDS
            if self._ledger is not None:
                # The study may have been made anew, in another ledger or in a new file.
                if before is None or before.ledger_url == self._facts.ledger_url:
                    self._ledger.reopen()
                else:
                    self._ledger.close()
                    # It may have none yet: what the deleted one had is not its history.
                    self._ledger = self._history = None
        if self._ledger is None and self._facts.ledger_url is not None:
            self._ledger = open_ledger(self._facts.ledger_url)
        if self._ledger is not None:
            self._history = read_history(
                self._ledger,
                self._facts,
                broker=self.apart(broker),
                silent=bool(self.silence),
                before=self._history,
            )
        return self._history

    def disconnect(self) -> None:
        """Close the connection to the broker until the next reading."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        """Close both connections."""
        self.disconnect()
        if self._ledger is not None:
            self._ledger.close()
