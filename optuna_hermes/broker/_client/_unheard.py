"""What a process that goes on could tell no broker: that runs of its are over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing, suppress

from optuna_hermes.broker._client._connection import Connection
from optuna_hermes.broker._protocol import FromClient, Noted, Refused
from optuna_hermes.errors import BrokerError


class Unheard:
    """Ends of leases that happened while there was no broker.

    The next one waits for the process that had them, which is still there and has only forgotten.
    """

    def __init__(self) -> None:
        self._ends: deque[Callable[[], Iterable[FromClient]]] = deque()

    def keep(self, said: Callable[[], Iterable[FromClient]]) -> None:
        """Keep what a broker is to be told, last of it the end of a lease."""
        self._ends.append(said)

    def tell(self, join: Callable[[], Connection]) -> None:
        """Tell the broker of the day, each end by a connection of its own.

        Raises:
            HermesError: there is no broker, and none can be started.
        """
        for _ in range(len(self._ends)):
            with suppress(IndexError):  # another thread has told it
                said = self._ends.popleft()
                with closing(join()) as connection:
                    if not _told(connection, said()):
                        self.keep(said)


def _told(connection: Connection, said: Iterable[FromClient]) -> bool:
    """Whether a broker has heard it; it may be gone before it has."""
    with suppress(BrokerError):
        for message in said:
            connection.send(message)
        while not isinstance(connection.receive(), Noted | Refused):
            pass
        return True
    return False


unheard = Unheard()
