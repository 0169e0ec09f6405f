"""Socket server of the broker: admits clients, reads their messages, and sends theirs."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from optuna_hermes._parent import kill
from optuna_hermes.broker import _election as election
from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core._broker_state import BrokerState
from optuna_hermes.broker._privacy import peer
from optuna_hermes.broker._server._processes import closed_with
from optuna_hermes.errors import HermesError, ProtocolError

HELLO_SECONDS = 10.0
FRAME_SECONDS = 30.0
"""Time in which a frame that has begun has to end; else the connection is closed."""
MAX_UNREAD_BYTES = 4 * wire.MAX_FRAME_BYTES
"""Bytes that wait for a client that does not read, at which its connection is closed."""
MAX_STRANGERS = 256
"""Most connections that have not said hello; one more is closed."""
_OWN_BROKER = "a broker serves its own user, so start one there"
_STRANGERS = "too many connections have said no hello, so end who opens them"
_STOPPED = "if it is stopped continue it, else end it"

log = logging.getLogger("optuna_hermes.broker")

Talk = Callable[[int, int], Awaitable[None]]
"""Called with a connection and its process."""


class SocketServer:
    """Connections, by numbers that are never used twice.

    Args:
        state: the clients, and the devices that they have.
        talk: serves a connection to its end.
        left: called when it has ended, also one that never said hello.
    """

    def __init__(self, state: BrokerState, talk: Talk, left: Talk) -> None:
        self._state = state
        self._talk = talk
        self._left = left
        self._last = 0
        self._readers: dict[int, asyncio.StreamReader] = {}
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._due: dict[int, float] = {}
        """Times at which connections are closed that have not ended a frame, or said hello."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []
        self._bound: os.stat_result | None = None

    @property
    def used(self) -> bool:
        return self._last > 0

    async def open(self, directory: Path) -> None:
        """Listen in a runtime directory; again where the socket was removed.

        Raises:
            BrokerConflictError: the socket is not this user's alone.
            OSError: there can be no socket.
        """
        path = election.socket_path(directory)
        sock = _listen(path)
        election.check_socket(directory)
        self._bound = path.lstat()
        # One that was removed stays open: so its inode is no other socket's.
        self._servers.append(await asyncio.start_unix_server(self._enter, sock=sock))

    def is_open(self, directory: Path) -> bool:
        """True if the socket is still found in its directory."""
        return self._bound is not None and election.is_at(
            self._bound, election.socket_path(directory)
        )

    async def close(self) -> None:
        """Listen no more and end every connection, whether or not its other end reads."""
        for server in self._servers:
            server.close()  # no wait_closed(): it waits for clients that do not read
        self._bound = None
        writers = list(self._writers.values())
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for writer in writers:
            writer.transport.abort()

    async def read(self, connection: int) -> wire.FromClient:
        """Return the next message of a connection.

        Raises:
            ProtocolError: what came is none.
            EOFError: the other end is gone.
        """
        reader = self._readers[connection]
        # The time counts from a frame's first byte: between frames a client may be silent.
        start = await reader.readexactly(1)
        self._due.setdefault(connection, time.monotonic() + FRAME_SECONDS)
        length = wire.body_length(start + await reader.readexactly(wire.HEADER_BYTES - 1))
        message = wire.decode_from_client(await reader.readexactly(length))
        self._due.pop(connection, None)
        return message

    def send(self, connection: int, message: wire.FromBroker) -> None:
        """Send a message, if the connection is still there."""
        writer = self._writers.get(connection)
        if writer is None or writer.is_closing() or _is_gone(writer):
            return
        if writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self._hang_up(connection, f"it does not read what it is sent: {_STOPPED}")
            return
        try:
            writer.write(wire.frame(message))
        except ProtocolError as error:  # it is too long
            self._hang_up(connection, str(error))
        except TypeError as error:  # a fault of this package, which may not stop messages to others
            log.exception("%s for connection %d cannot be sent", type(message).__name__, connection)
            self._hang_up(connection, str(error))

    def hang_up_on_the_slow(self) -> None:
        """Close connections that have begun a frame and do not go on."""
        now = time.monotonic()
        for connection in [key for key, due in self._due.items() if due < now]:
            del self._due[connection]
            self._hang_up(connection, f"it does not end what it says: {_STOPPED}")

    # -- inside --------------------------------------------------------------------------------

    async def _enter(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._bound is None:  # it was accepted right before the end
            writer.transport.abort()
            return
        pid, uid = peer(writer.get_extra_info("socket"))
        if uid != os.getuid():
            log.warning("process %d of uid %d was turned away: %s", pid, uid, _OWN_BROKER)
            writer.close()
            return
        self._last += 1
        connection = self._last
        if len(self._writers) - len(self._state.clients) >= MAX_STRANGERS:
            log.warning("process %d was turned away: %s", pid, _STRANGERS)
            writer.close()
            return
        self._readers[connection], self._writers[connection] = reader, writer
        self._due[connection] = time.monotonic() + HELLO_SECONDS
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await self._serve(connection, pid, writer)

    async def _serve(self, connection: int, pid: int, writer: asyncio.StreamWriter) -> None:
        try:
            with closed_with(pid, writer):
                await self._talk(connection, pid)
        except (OSError, EOFError, asyncio.CancelledError):
            pass  # gone, with or without a word: the same thing to us
        except HermesError as error:
            log.warning("connection %d of process %d closed: %s", connection, pid, error)
            client = self._state.clients.get(connection)
            if client is not None and client.role == "worker":
                kill(pid)  # it may have a device, which is another's in a moment
        finally:
            for known in (self._readers, self._writers, self._due):
                known.pop(connection, None)
            writer.close()
            await self._left(connection, pid)

    def _hang_up(self, connection: int, reason: str) -> None:
        """Close a connection, unless its process has a device, which it may be using."""
        if self._state.holds(connection):
            return
        writer = self._writers[connection]
        pid = peer(writer.get_extra_info("socket"))[0]
        log.warning("connection %d of process %d closed: %s", connection, pid, reason)
        writer.transport.abort()


def _is_gone(writer: asyncio.StreamWriter) -> bool:
    """True if the other end is closed.

    If it were written to, asyncio would drop what it has sent before, such as a trial's last units.
    """
    poll = select.poll()
    poll.register(writer.get_extra_info("socket"), 0)
    return bool(poll.poll(0))


def _listen(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # The folder is 0700 already; this closes the moment between bind and chmod as well.
    mask = os.umask(0o177)
    try:
        sock.bind(str(path))
    finally:
        os.umask(mask)
    sock.listen()  # at once: a process that sees the socket may connect
    return sock
