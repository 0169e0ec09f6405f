"""Client's end of the broker's socket."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from optuna_hermes.broker import _election as election
from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._privacy import peer
from optuna_hermes.errors import (
    BrokerConflictError,
    BrokerError,
    BrokerSilentError,
    InvalidInputError,
    ProtocolError,
    StudyTakenError,
)

CONNECT_SECONDS = 30.0
POLL_SECONDS = 0.02
SILENT_SECONDS = 10.0
"""Time in which a broker answers a viewer, whom nobody else would tell that it does not."""
_GONE = "The broker is gone: look into broker.log for the reason."
SILENT = (
    f"The broker of this host has not answered for {SILENT_SECONDS:.0f} s: let its process, which "
    "broker.json names, go on if it was stopped, or look into broker.log."
)
_SETTLE_POLL_SECONDS = 0.2
"""Interval at which ``on_silence`` is called."""
_END_IT = "it is of another version, so end the process that broker.json names"


OnSilence = Callable[[float], None]
T = TypeVar("T")
Done = TypeVar("Done")


class Connection:
    """Connection to the broker: any thread may send, one thread receives.

    Args:
        on_silence: called again and again while the broker is waited for, with the seconds of that;
            an exception in it ends the wait. By default a viewer waits for ``SILENT_SECONDS``,
            others for ever.
    """

    def __init__(self, sock: socket.socket, role: str, on_silence: OnSilence | None = None) -> None:
        self._socket = sock
        self._on_silence = on_silence or _give_up
        if on_silence is not None:
            sock.settimeout(_SETTLE_POLL_SECONDS)
        elif role == "viewer":
            sock.settimeout(SILENT_SECONDS)
        self._send_lock = threading.Lock()
        try:
            self.welcome = self._greet(role)
        except BaseException:
            sock.close()
            raise

    def _greet(self, role: str) -> wire.Welcome:
        self.send(wire.Hello(version=wire.VERSION, role=role))
        welcome = self.receive()
        if isinstance(welcome, wire.Refused):
            raise BrokerConflictError(welcome.reason)
        if not isinstance(welcome, wire.Welcome):
            raise ProtocolError(f"A broker says welcome first but said {welcome!r}: {_END_IT}.")
        return welcome

    def fileno(self) -> int:
        """The socket's file descriptor, for ``select``."""
        return self._socket.fileno()

    def send(self, message: wire.FromClient) -> None:
        """Send one message.

        Raises:
            BrokerError: the broker is gone.
        """
        data = memoryview(wire.frame(message))
        # One frame at a time: it may be written in parts, between which others could write.
        with self._send_lock:
            while data:
                data = data[self._wait_for(self._socket.send, data) :]

    def receive(self) -> wire.FromBroker:
        """Wait for one message.

        Raises:
            BrokerError: the broker is gone.
        """
        length = wire.body_length(self._read(wire.HEADER_BYTES))
        return wire.decode_from_broker(self._read(length))

    def receive_answer(self) -> wire.FromBroker:
        """Wait for one message that is no refusal.

        Raises:
            BrokerConflictError: the broker refused what was sent before.
            StudyTakenError: likewise, since it serves the study for another driver.
            BrokerError: the broker is gone.
        """
        answer = self.receive()
        if isinstance(answer, wire.Refused):
            if answer.driver_pid is not None:
                raise StudyTakenError(answer.reason, answer.driver_pid)
            raise BrokerConflictError(answer.reason)
        return answer

    def ask_status(self, *, trials: bool = True, curves: bool = False) -> wire.BrokerStatus:
        """Return the broker's status; only for connections on which nothing else is sent.

        Raises:
            BrokerError: the broker is gone, or has refused what was sent before.
        """
        self.send(wire.GetStatus(trials=trials, curves=curves))
        answer = self.receive_answer()
        if not isinstance(answer, wire.Status):
            raise ProtocolError(f"A status was asked for but {answer!r} came: {_END_IT}.")
        return answer.status

    def want(self, message: wire.UserCommand) -> bool:
        """Send an override or another policy; return True if a trial has still to stop.

        Only for connections on which nothing else is sent.

        Raises:
            InvalidInputError: it is refused; the words say why.
            BrokerError: the broker is gone.
        """
        self.send(message)
        answer = self.receive()
        if isinstance(answer, wire.Refused):
            raise InvalidInputError(answer.reason)
        if not isinstance(answer, wire.Accepted):
            raise ProtocolError(f"An override was told but {answer!r} came: {_END_IT}.")
        return answer.waits

    def close(self) -> None:
        """Close the connection; a thread that waits in ``receive`` wakes up."""
        # close() alone would leave that thread in recv().
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = self._wait_for(self._socket.recv, count - len(data))
            if not part:
                raise BrokerError(_GONE)
            data += part
        return bytes(data)

    def _wait_for(self, transfer: Callable[[T], Done], what: T) -> Done:
        began = time.monotonic()
        while True:
            try:
                return transfer(what)
            except TimeoutError:
                self._on_silence(time.monotonic() - began)
            except OSError as error:
                raise BrokerError(_GONE) from error


def _give_up(seconds: float) -> None:
    raise BrokerSilentError(SILENT)


def connect(role: str, on_silence: OnSilence | None = None) -> Connection:
    """Connect to the broker of this host and user; ``on_silence`` is as for ``Connection``.

    Raises:
        BrokerError: there is none.
        BrokerConflictError: its socket is not ours.
    """
    directory = election.runtime_dir()
    path = election.socket_path(directory)
    try:
        election.check_socket(directory)
        sock = _open(path, role, on_silence)
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise BrokerError(
            "No broker runs on this host: start one with `optuna-hermes broker`."
        ) from error
    return Connection(sock, role, on_silence)


def connect_if_any(role: str, on_silence: OnSilence | None = None) -> Connection | None:
    """Connect as ``connect`` does; None if there is no broker.

    Raises:
        BrokerConflictError: its socket is not ours.
        BrokerSilentError: it does not answer a viewer.
    """
    try:
        return connect(role, on_silence)
    except (BrokerConflictError, BrokerSilentError):
        raise
    except BrokerError:
        return None


def broker_status(
    *, trials: bool = True, curves: bool = False, on_silence: OnSilence | None = None
) -> wire.BrokerStatus | None:
    """Return the status of this host's broker, None if there is none.

    Args:
        trials: with every trial of every study.
        curves: with the shape of each trial's curve.
        on_silence: as that of ``Connection``.

    Raises:
        BrokerConflictError: its socket is not ours.
        BrokerSilentError: it does not answer.
    """
    connection = connect_if_any("viewer", on_silence)
    if connection is None:
        return None
    try:
        return connection.ask_status(trials=trials, curves=curves)
    except BrokerSilentError:
        raise
    except BrokerError:  # it has just ended
        return None
    finally:
        connection.close()


def connect_with_retry(role: str) -> Connection:
    """Connect as ``connect`` does, but wait for a broker that is being started.

    Raises:
        BrokerError: there is none after ``CONNECT_SECONDS``.
    """
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            return connect(role)
        except BrokerConflictError:
            raise
        except BrokerError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_SECONDS)


def _open(path: Path, role: str, on_silence: OnSilence | None) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _connect(sock, path, role, on_silence)
    except BaseException:
        sock.close()
        raise
    uid = peer(sock)[1]
    if uid != os.getuid():
        sock.close()
        raise BrokerConflictError(
            f"The broker at {path} must run as you (uid {os.getuid()}) but runs as uid {uid}: set "
            f"{election.RUNTIME_DIR_VARIABLE} to a folder of your own."
        )
    return sock


def _connect(sock: socket.socket, path: Path, role: str, on_silence: OnSilence | None) -> None:
    """Connect a socket, and wait while the queue of a stopped broker is full."""
    # Without a time-out the kernel would wait for ever, and Python takes a signal for the end.
    sock.setblocking(False)
    began = time.monotonic()
    while True:
        try:
            sock.connect(str(path))
            break
        except BlockingIOError:
            seconds = time.monotonic() - began
            if on_silence is not None:
                on_silence(seconds)
            elif role == "viewer" and seconds > SILENT_SECONDS:
                _give_up(seconds)
            time.sleep(_SETTLE_POLL_SECONDS)
    sock.setblocking(True)
