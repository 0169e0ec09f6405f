"""Watched study: what its broker told a driver last, counted up to the present."""

from __future__ import annotations

import time

from msgspec import structs

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._client._connection import Connection
from optuna_hermes.errors import ProtocolError


class WatchedStudy:
    """A driver's study, as of now.

    Args:
        connection: the driver's, on which nothing else is received.
        key: the study's key; the connection has opened it.

    Raises:
        BrokerConflictError: the broker refused what was sent before.
        StudyTakenError: likewise, since it serves the study for another driver.
        BrokerError: the broker is gone.
    """

    def __init__(self, connection: Connection, key: str) -> None:
        self._connection = connection
        self._key = key
        self.tell()

    def fileno(self) -> int:
        """The file descriptor that ``select`` finds readable once the broker has sent something."""
        return self._connection.fileno()

    def tell(self, *messages: wire.FromClient) -> None:
        """Send messages, and wait for the status of the study after them."""
        for message in messages:
            self._connection.send(message)
        self._connection.send(wire.WatchStudy(study=self._key, now=True))
        while not self._receive().is_answer:
            pass  # sent before the broker read these messages

    def receive_change(self) -> None:
        """Take a change that the broker tells of, and ask to be told of the next."""
        self._receive()
        self._connection.send(wire.WatchStudy(study=self._key))

    def status(self) -> tuple[wire.StudyStatus, tuple[wire.DeviceStatus, ...]]:
        """The study without its trials, and the broker's devices."""
        passed, study = time.monotonic() - self._received_at, self._latest.study
        had = passed * self._latest.leased
        outage = study.outage_seconds
        now = structs.replace(
            study,
            outage_seconds=None if outage is None else outage + passed,
            device_seconds=study.device_seconds + had,
            held_seconds=study.held_seconds + had,
            spent_seconds=study.spent_seconds + had,
        )
        return now, tuple(_later(device, passed) for device in self._latest.devices)

    def _receive(self) -> wire.StudyChanged:
        message = self._connection.receive_answer()
        if not isinstance(message, wire.StudyChanged):
            raise ProtocolError(f"A study was asked for but {message!r} came.")
        self._latest, self._received_at = message, time.monotonic()
        return message


def _later(device: wire.DeviceStatus, seconds: float) -> wire.DeviceStatus:
    holder = device.holder
    if holder is None:
        return device
    holder = structs.replace(
        holder,
        since_seconds=holder.since_seconds + seconds,
        left_seconds=max(0.0, holder.left_seconds - seconds),
    )
    return structs.replace(device, holder=holder)
