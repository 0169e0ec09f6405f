"""The broker as a process: sockets, clocks, devices and ledgers around the pure ``State``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from optuna_hermes.broker import _election as election
from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._client import peer
from optuna_hermes.broker._devices import DeviceSource
from optuna_hermes.broker._events import (
    Command,
    Connected,
    DevicesPolled,
    Disconnected,
    Event,
    Kill,
    Received,
    Send,
    StudyRead,
    Tick,
    WritesFailed,
)
from optuna_hermes.broker._imports import look_in
from optuna_hermes.broker._ledgers import Ledgers
from optuna_hermes.broker._memory import SETTLE_SECONDS
from optuna_hermes.broker._readings import Readings
from optuna_hermes.broker._state import State
from optuna_hermes.errors import HermesError, LedgerError
from optuna_hermes.ledger._base import LeaseRecord
from optuna_hermes.policies import make_policy

POLL_SECONDS = 2.0
HOST_SHARE = 0.4
"""Of the host memory that is available at the start, for what runs move off their devices."""
FLUSH_SECONDS = 0.25
_HELLO_SECONDS = 10.0
_CHANGES_MEMORY = wire.Parked | wire.Ended | wire.Released
"""What these lead to depends on the memory that is free at that moment."""

log = logging.getLogger("optuna_hermes.broker")


class Server:
    """Serves one host's devices until nobody has needed it for a while.

    Args:
        directory: the runtime directory, whose office this process holds.
        devices: the specification it was started with.
        source: the devices.
        host: this host's name.
        idle_seconds: end after this long without a client; None never ends.
    """

    def __init__(
        self,
        directory: Path,
        *,
        devices: str,
        source: DeviceSource,
        host: str,
        idle_seconds: float | None,
    ) -> None:
        self._directory = directory
        self._devices = devices
        self._readings = Readings(source)
        self._host = host
        self._idle_seconds = idle_seconds
        self._ledgers = Ledgers()
        self._state = State(
            host=host,
            devices=self._readings.last,
            wall_offset=time.time() - time.monotonic(),
            host_budget_bytes=int(HOST_SHARE * psutil.virtual_memory().available),
        )
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._last_connection = 0
        self._hung_up: dict[int, float] = {}
        self._last_busy = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    async def serve(self, ready: Callable[[], None] = lambda: None) -> None:
        """Listen, say that this process is ``ready``, and return when it is time to end."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        sock = _listen(election.socket_path(self._directory))
        election.check_socket(self._directory)
        server = await asyncio.start_unix_server(self._client, sock=sock)
        chores = [loop.create_task(self._poll()), loop.create_task(self._flush())]
        log.info("listening, devices %s", self._devices)
        ready()
        async with server:
            await self._stop.wait()
            for chore in chores:
                chore.cancel()
            self._readings.close()
            for writer in list(self._writers.values()):
                writer.close()
        try:
            self._ledgers.close()
        except LedgerError as error:
            log.error("the last reports did not reach the ledger: %s", error)
        log.info("ended")

    # -- connections ---------------------------------------------------------------------------

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pid, uid = peer(writer.get_extra_info("socket"))
        if uid != os.getuid():
            log.warning("process %d of uid %d was turned away", pid, uid)
            writer.close()
            return
        self._last_connection += 1
        connection = self._last_connection
        self._writers[connection] = writer
        try:
            with _end_of(pid, writer):
                await self._converse(connection, pid, reader)
        except (OSError, EOFError, asyncio.TimeoutError):
            pass  # gone, with or without a word: the same thing to us
        except HermesError as error:
            log.warning("connection %d of process %d closed: %s", connection, pid, error)
        finally:
            self._writers.pop(connection, None)
            writer.close()
            if connection in self._state.book.clients:
                self._hung_up[pid] = time.monotonic()
                try:
                    await self._look()
                finally:
                    self._apply(Disconnected(connection=connection))

    async def _converse(self, connection: int, pid: int, reader: asyncio.StreamReader) -> None:
        hello = await asyncio.wait_for(_read(reader), _HELLO_SECONDS)
        if not isinstance(hello, wire.Hello) or hello.version != wire.VERSION:
            reason = "This broker is of another version: end it with `optuna-hermes broker --stop`."
            self._send(connection, wire.Refused(reason=reason))
            return
        self._apply(Connected(connection=connection, pid=pid, role=hello.role))
        self._send(connection, self._welcome())
        while True:
            message = await _read(reader)
            if isinstance(message, wire.Quit):
                self._quit(connection)
            elif isinstance(message, wire.OpenStudy | wire.Register):
                self._read_study(connection, message)
            else:
                if isinstance(message, _CHANGES_MEMORY):
                    await self._look()
                self._apply(Received(connection=connection, message=message))

    def _welcome(self) -> wire.Welcome:
        return wire.Welcome(
            version=wire.VERSION,
            pid=os.getpid(),
            host=self._host,
            devices=self._devices,
            device_ids=tuple(self._state.book.slots),
        )

    def _quit(self, connection: int) -> None:
        others = len(self._state.book.clients) - 1
        if others:
            reason = f"The broker still serves {others} other process(es)."
            self._send(connection, wire.Refused(reason=reason))
        else:
            self._stop.set()

    def _read_study(self, connection: int, message: wire.OpenStudy | wire.Register) -> None:
        key = message.study.key
        try:
            look_in(message.study.folders)
            make_policy(message.study.policy)
            self._ledgers.flush()
            ledger = self._ledgers.open(key, message.study.ledger_url)
            known = StudyRead(
                connection=connection,
                message=message,
                last_epoch=ledger.last_epoch(),
                runs=tuple(ledger.load_runs(key)),
                curves=ledger.load_curves(key),
                checkpoints=tuple(ledger.load_checkpoints(key)),
                memory=ledger.load_memory(key),
            )
        except HermesError as error:
            self._send(connection, wire.Refused(reason=str(error)))
            return
        self._apply(known)

    # -- carrying out --------------------------------------------------------------------------

    def _apply(self, event: Event) -> None:
        now = time.monotonic()
        self._carry_out(self._state.handle(event, now))
        if not self._state.idle:
            self._last_busy = now
        self._wind_up(now)

    def _carry_out(self, commands: Sequence[Command]) -> None:
        try:
            self._ledgers.write([c for c in commands if not isinstance(c, Send | Kill)])
        except LedgerError as error:
            log.error("the ledger refused: %s", error)
            epochs = tuple(c.epoch for c in commands if isinstance(c, LeaseRecord))
            self._apply(WritesFailed(epochs=epochs, reason=str(error)))
            return
        for command in commands:
            if isinstance(command, Send):
                self._send(command.connection, command.message)
            elif isinstance(command, Kill):
                log.warning("SIGKILL to process %d: %s", command.pid, command.reason)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(command.pid, signal.SIGKILL)

    def _send(self, connection: int, message: wire.FromBroker) -> None:
        writer = self._writers.get(connection)
        if writer is not None and not writer.is_closing():
            writer.write(wire.frame(message))

    def _wind_up(self, now: float) -> None:
        due = self._state.next_wakeup(now)
        if self._timer is not None:
            if self._timer.when() == due:
                return  # most messages change nothing about it
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer = asyncio.get_running_loop().call_at(due, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if not self._readings.has_gpus:
            self._apply(Tick())
        elif self._ticking is None or self._ticking.done():
            self._ticking = asyncio.get_running_loop().create_task(self._tick())

    async def _tick(self) -> None:
        await self._look()
        self._apply(Tick())

    # -- chores --------------------------------------------------------------------------------

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS if self._idle_seconds is None else self._interval())
            self._apply(DevicesPolled(devices=await self._readings.read(self._own_pids())))
            quiet = time.monotonic() - self._last_busy
            if self._state.idle and self._idle_seconds is not None and quiet > self._patience():
                self._stop.set()

    def _patience(self) -> float:
        """Whoever has started this process may take a while to connect."""
        assert self._idle_seconds is not None
        return max(self._idle_seconds, 0.0 if self._last_connection else _HELLO_SECONDS)

    async def _look(self) -> None:
        """See to it that what is decided next is decided by the memory that is free now."""
        if self._readings.has_gpus:
            self._apply(DevicesPolled(devices=await self._readings.read(self._own_pids())))

    def _own_pids(self) -> set[int]:
        pids = {client.pid for client in self._state.book.clients.values()}
        # A process that has hung up is no stranger while it ends.
        lately = time.monotonic() - SETTLE_SECONDS
        self._hung_up = {pid: at for pid, at in self._hung_up.items() if at > lately}
        pids.update(self._hung_up)
        return pids

    def _interval(self) -> float:
        assert self._idle_seconds is not None
        return min(POLL_SECONDS, max(0.05, self._idle_seconds / 4))

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            try:
                self._ledgers.flush()
            except LedgerError as error:
                log.error("reports wait for the ledger: %s", error)


async def _read(reader: asyncio.StreamReader) -> wire.FromClient:
    header = await reader.readexactly(wire.HEADER_BYTES)
    return wire.decode_from_client(await reader.readexactly(wire.body_length(header)))


def _listen(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # The folder is 0700 already; this closes the moment between bind and chmod as well.
    mask = os.umask(0o177)
    try:
        sock.bind(str(path))
    finally:
        os.umask(mask)
    sock.listen()  # at once: whoever sees the socket may connect
    return sock


@contextlib.contextmanager
def _end_of(pid: int, writer: asyncio.StreamWriter) -> Iterator[None]:
    """Close a connection when its process ends, though a child of it may hold the socket open."""
    loop = asyncio.get_running_loop()
    try:
        handle = os.pidfd_open(pid)
    except OSError:  # it is gone already, or this kernel has no pidfd: the socket must tell
        yield
        return
    loop.add_reader(handle, writer.transport.abort)
    try:
        yield
    finally:
        loop.remove_reader(handle)
        os.close(handle)
