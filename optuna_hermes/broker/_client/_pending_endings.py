"""Endings of leases that no broker has acknowledged; the next one gets them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing, suppress

from optuna_hermes.broker._client._connection import Connection
from optuna_hermes.broker._protocol import FromClient, Noted, Refused
from optuna_hermes.errors import BrokerError


class PendingEndings:
    """Endings of leases that happened while there was no broker.

    Without them the next broker would wait for this process, which lives on, to come back.
    """

    def __init__(self) -> None:
        self._ends: deque[Callable[[], Iterable[FromClient]]] = deque()

    def keep(self, said: Callable[[], Iterable[FromClient]]) -> None:
        """Keep messages for the next broker, the last of them the ending of a lease."""
        self._ends.append(said)

    def tell(self, join: Callable[[], Connection]) -> None:
        """Send the kept endings to the broker of now, each over a connection of its own.

        Raises:
            HermesError: there is no broker, and none can be started.
        """
        for _ in range(len(self._ends)):
            with suppress(IndexError):  # another thread has sent it
                said = self._ends.popleft()
                with closing(join()) as connection:
                    if not _told(connection, said()):
                        self.keep(said)


def _told(connection: Connection, said: Iterable[FromClient]) -> bool:
    """Send messages; True if a broker has acknowledged them, False if it died before."""
    with suppress(BrokerError):
        for message in said:
            connection.send(message)
        while not isinstance(connection.receive(), Noted | Refused):
            pass
        return True
    return False


pending_endings = PendingEndings()
