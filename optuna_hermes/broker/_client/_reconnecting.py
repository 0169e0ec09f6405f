"""Client's connection that outlives its broker, and endings of leases that no broker has heard."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._client._connection import Connection
from optuna_hermes.errors import BrokerError, HermesError

BROKER_SEARCH_SECONDS = 60.0
"""Time for which a client looks for the next broker when its own is gone."""

_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 0.25
_STEADY_SECONDS = 1.0
"""A broker that lived for less than this does not end the search for one."""


class ReconnectingConnection:
    """Frames to and from the current broker; when it dies, the next one is looked for.

    A thread reads, and looks for the next broker, so that training does neither.

    Args:
        connection: open, with nothing read from it yet.
        reconnect: connects to the next broker; raises ``HermesError`` or ``OSError`` while there is
            none.
        introduce: the first messages to the next broker; called while ``lock`` is held.
        on_message: called with each message, and None when no broker could be found; on the thread.
        on_loss: called when a broker is gone, before the next one is looked for; on the thread.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        reconnect: Callable[[], Connection],
        introduce: Callable[[], Iterable[wire.FromClient]],
        on_message: Callable[[wire.FromBroker | None], None],
        on_loss: Callable[[], None],
    ) -> None:
        self.lock = threading.RLock()
        """Lock of the thread that sends several messages to one broker, in order."""
        self._connection = connection
        self._reconnect = reconnect
        self._introduce = introduce
        self._on_message = on_message
        self._on_loss = on_loss
        self._up = True
        self._steady = True
        """False if the last broker that was lost has lived for less than ``_STEADY_SECONDS``."""
        self.gone = False
        """True once no broker could be found, and none is looked for any more."""
        self._closed = threading.Event()
        self._connected_at = time.monotonic()
        self._away_since: float | None = None
        self._thread = threading.Thread(target=self._read, name="hermes-session", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: wire.FromClient) -> None:
        """Send a message; without a broker it is dropped, and ``introduce`` makes up for it."""
        with self.lock, contextlib.suppress(BrokerError):
            if self._up:
                self._connection.send(message)

    def settle(self, done: Callable[[], bool], seconds: float) -> None:
        """Wait until there is a broker and it is ``done``, but no longer than ``seconds`` for one.

        Args:
            done: true once the broker has answered.
            seconds: how long a broker may take for that, or several that die at once.
        """
        began, deadline = time.monotonic(), math.inf
        while not self.gone and (now := time.monotonic()) <= deadline:
            if self._up and done():
                return
            # One that has died at once may have done so for what it was sent, as will the next.
            met = self._up or (not self._steady and self._connected_at > began)
            deadline = min(deadline, now + seconds) if met else math.inf
            self._closed.wait(_PAUSE_SECONDS)

    def close(self) -> None:
        self._closed.set()
        with self.lock:
            self._connection.close()
        self._thread.join(timeout=_STEADY_SECONDS)  # it may be starting a broker

    def _read(self) -> None:
        while True:
            try:
                message = self._connection.receive()
            except BrokerError:
                if self._closed.is_set():
                    return
                if self._find():
                    continue
                self.gone = True
                if not self._closed.is_set():
                    self._on_message(None)
                return
            self._on_message(message)

    def _find(self) -> bool:
        """Look for the next broker; False if there is none for too long, or this is closed."""
        now = time.monotonic()
        self._steady = steady = now - self._connected_at >= _STEADY_SECONDS
        self._up = False
        self._connection.close()
        self._on_loss()
        if steady or self._away_since is None:
            self._away_since = now
        # A broker that died at once may die again: the next one is not asked without a pause.
        pause = 0.0 if steady else _LONGEST_PAUSE_SECONDS
        while not self._closed.wait(pause):
            pause = min(_LONGEST_PAUSE_SECONDS, max(_PAUSE_SECONDS, 2 * pause))
            try:
                connection = self._reconnect()
            except (HermesError, OSError):  # the system may be short of files, or processes
                if time.monotonic() - self._away_since > BROKER_SEARCH_SECONDS:
                    return False
                continue
            if self._meet(connection):
                return True
        return False

    def _meet(self, connection: Connection) -> bool:
        with self.lock:
            if self._closed.is_set():
                connection.close()
                return False
            self._connection, self._connected_at = connection, time.monotonic()
            # Introduced before anything else is sent: a new broker knows no lease.
            with contextlib.suppress(BrokerError):  # the reader will see it too
                for message in self._introduce():
                    connection.send(message)
            self._up = True
            return True


class PendingEndings:
    """Endings of leases that happened while there was no broker.

    Without them the next broker would wait for this process, which lives on, to come back.
    """

    def __init__(self) -> None:
        self._ends: deque[Callable[[], Iterable[wire.FromClient]]] = deque()

    def keep(self, messages: Callable[[], Iterable[wire.FromClient]]) -> None:
        """Keep messages for the next broker, the last of them the ending of a lease."""
        self._ends.append(messages)

    def tell(self, join: Callable[[], Connection]) -> None:
        """Send the kept endings to the broker of now, each over a connection of its own.

        Raises:
            HermesError: there is no broker, and none can be started.
        """
        for _ in range(len(self._ends)):
            try:
                messages = self._ends.popleft()
            except IndexError:  # another thread has sent it
                return
            acknowledged = False
            try:
                with contextlib.closing(join()) as connection:
                    acknowledged = _acknowledged(connection, messages())
            finally:
                if not acknowledged:
                    self.keep(messages)


def _acknowledged(connection: Connection, messages: Iterable[wire.FromClient]) -> bool:
    """Send messages; True if a broker has acknowledged them, False if it died before."""
    with contextlib.suppress(BrokerError):
        for message in messages:
            connection.send(message)
        while not isinstance(connection.receive(), wire.LeaseEndAck | wire.Refused):
            pass
        return True
    return False


pending_endings = PendingEndings()
