"""What the devices look like, read on a thread of its own: a driver that hangs holds up nobody."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Collection
from dataclasses import dataclass, replace

from optuna_hermes.broker._devices import DeviceSource
from optuna_hermes.model import Device

PATIENCE_SECONDS = 1.0
"""Whoever waits for a reading goes on without it after this long; nothing is granted meanwhile."""


@dataclass(kw_only=True)
class _Request:
    pids: set[int]
    answer: asyncio.Future[tuple[Device, ...]]


class Readings:
    """Reads the devices of a broker whenever it is asked.

    Calls belong to one event loop. Devices that need no driver are read without a thread.

    Args:
        source: the devices; nobody else may poll it.
    """

    def __init__(self, source: DeviceSource) -> None:
        self._source = source
        self.last = source.poll()
        """What was read last."""
        self.has_gpus = any(device.kind == "gpu" for device in self.last)
        self._lock = threading.Lock()
        self._queued: _Request | None = None
        self._work: queue.SimpleQueue[bool] = queue.SimpleQueue()
        if self.has_gpus:
            # No thread of a pool: a program that ends would wait for it.
            threading.Thread(target=self._read_all, name="hermes-devices", daemon=True).start()

    async def read(self, own_pids: Collection[int]) -> tuple[Device, ...]:
        """What the devices look like after this call.

        Args:
            own_pids: see ``DeviceSource.poll``.

        Returns:
            Where the driver does not answer in time: what was read last, with no GPU free.
        """
        if not self.has_gpus:
            self.last = self._source.poll(own_pids)
            return self.last
        request = self._request(own_pids)
        try:
            # Others may wait for the same answer.
            return await asyncio.wait_for(asyncio.shield(request.answer), PATIENCE_SECONDS)
        except asyncio.TimeoutError:
            return tuple(_unanswered(device) for device in self.last)

    def close(self) -> None:
        """No more readings; one that is under way is not waited for."""
        self._work.put(False)

    def _request(self, own_pids: Collection[int]) -> _Request:
        """The reading that begins next: one that is under way may have missed what happened."""
        with self._lock:
            if self._queued is None:
                answer = asyncio.get_running_loop().create_future()
                self._queued = _Request(pids=set(), answer=answer)
                self._work.put(True)
            self._queued.pids.update(own_pids)
            return self._queued

    def _read_all(self) -> None:
        while self._work.get():
            with self._lock:
                request, self._queued = self._queued, None
            assert request is not None
            polled: tuple[Device, ...] | BaseException
            try:
                polled = self._source.poll(request.pids)
            except BaseException as error:  # it is raised where the reading is asked for
                polled = error
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop = request.answer.get_loop()
                loop.call_soon_threadsafe(self._answer, request.answer, polled)

    def _answer(
        self,
        answer: asyncio.Future[tuple[Device, ...]],
        polled: tuple[Device, ...] | BaseException,
    ) -> None:
        if isinstance(polled, BaseException):
            answer.set_exception(polled)
            return
        self.last = polled
        answer.set_result(polled)


def _unanswered(device: Device) -> Device:
    if device.kind == "cpu":
        return device
    problem = f"the NVIDIA driver has not answered for {PATIENCE_SECONDS:g} s"
    return replace(device, free=False, problem=problem)
