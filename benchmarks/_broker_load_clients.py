"""Many clients of a broker in one process: each a trial of no weight."""

from __future__ import annotations

import heapq
import selectors
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker import connect

TICK_SECONDS = 0.001


@dataclass(kw_only=True)
class Client:
    """A trial that has a lease, had one and is parked, or waits for its first."""

    number: int
    socket: socket.socket
    epoch: int = 0
    device: str | None = None
    unit: int = 0
    buffer: bytearray = field(default_factory=bytearray)


class Crowd:
    """Serves its clients until it is told to stop, and keeps what it saw of leases.

    Args:
        study: theirs.
        numbers: of their trials.
        slice_seconds: after this long a holder leaves its device of its own accord.
    """

    def __init__(self, study: wire.StudySpec, numbers: range, slice_seconds: float) -> None:
        self._slice_seconds = slice_seconds
        self._holders: dict[int, float] = {}
        self._study = study
        self._selector = selectors.DefaultSelector()
        self._clients: dict[int, Client] = {}
        self.sent = 0
        self.released: list[tuple[str, float]] = []
        self.granted: list[tuple[str, float]] = []
        for number in numbers:
            self._join(number)

    def _join(self, number: int) -> None:
        connection = connect("plain")
        sock: socket.socket = connection._socket
        client = Client(number=number, socket=sock)
        self._clients[number] = client
        self._say(client, wire.Register(study=self._study, number=number, trial_id=number))
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, client)

    def serve(self, pipe: Pipe, rate: float, only_holders: bool) -> None:
        """Let every client say something ``rate`` times a second, until the pipe says stop."""
        due = self._schedule(rate)
        self._selector.register(pipe, selectors.EVENT_READ, None)
        while True:
            for key, _ in self._selector.select(TICK_SECONDS):
                if key.data is None:
                    if pipe.recv() == "stop":
                        return
                    pipe.send(self.sent)
                else:
                    self._read(key.data)
            self._talk(due, rate, only_holders)
            now = time.monotonic()
            for number in [n for n, until in self._holders.items() if until <= now]:
                self._park(self._clients[number])

    def _schedule(self, rate: float) -> list[tuple[float, int]]:
        now, n = time.monotonic(), len(self._clients)
        return [(now + i / (rate * n), number) for i, number in enumerate(self._clients)]

    def _talk(self, due: list[tuple[float, int]], rate: float, only_holders: bool) -> None:
        now = time.monotonic()
        while due[0][0] <= now:
            at, number = due[0]
            heapq.heapreplace(due, (max(at + 1 / rate, now - 1.0), number))
            client = self._clients[number]
            if client.device is not None:
                client.unit += 1
                self._say(client, _report(client))
            elif not only_holders:
                self._say(client, wire.Beat(epoch=client.epoch))

    def _read(self, client: Client) -> None:
        data = client.socket.recv(65536)
        if not data:
            raise SystemExit("The broker hung up.")
        client.buffer += data
        for message in _messages(client.buffer):
            self._hear(client, message)

    def _hear(self, client: Client, message: wire.FromBroker) -> None:
        if isinstance(message, wire.Grant):
            self._begin(client, message)
        elif isinstance(message, wire.Yield) and client.device is not None:
            self._park(client)
        elif isinstance(message, wire.Refused):
            raise SystemExit(message.reason)

    def _begin(self, client: Client, grant: wire.Grant) -> None:
        now = time.monotonic()
        (client.device,) = grant.devices
        self.granted.append((client.device, now))
        self._holders[client.number] = now + self._slice_seconds
        client.epoch = grant.epoch
        self._say(client, wire.FirstBatch(epoch=grant.epoch, can_store=False))

    def _park(self, client: Client) -> None:
        assert client.device is not None
        self.released.append((client.device, time.monotonic()))
        client.device = None
        del self._holders[client.number]
        self._say(
            client, wire.TierChanged(epoch=client.epoch, tier="resident", suspend_seconds=0.001)
        )

    def _say(self, client: Client, message: wire.FromClient) -> None:
        self.sent += 1
        client.socket.sendall(wire.frame(message))


def _report(client: Client) -> wire.Report:
    value = 1.0 / (1 + client.unit) + client.number / 1000
    return wire.Report(epoch=client.epoch, unit=client.unit, step=client.unit, value=value)


def _messages(buffer: bytearray) -> Iterator[wire.FromBroker]:
    header = wire.HEADER_BYTES
    while len(buffer) >= header:
        end = header + wire.body_length(bytes(buffer[:header]))
        if len(buffer) < end:
            return
        body = bytes(buffer[header:end])
        del buffer[:end]
        yield wire.decode_from_broker(body)


def crowd(
    pipe: Pipe,
    study: wire.StudySpec,
    numbers: range,
    rate: float,
    slice_seconds: float,
    only_holders: bool,
) -> None:
    """A process of clients; ``pipe`` says ``look`` (how many messages were sent) and ``stop``."""
    clients = Crowd(study, numbers, slice_seconds)
    pipe.send("joined")
    clients.serve(pipe, rate, only_holders)
    pipe.send({"released": clients.released, "granted": clients.granted})
