"""Readings of GPUs, on a thread of its own: a driver that hangs blocks no other work."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from optuna_hermes.broker._core._events import DevicesPolled
from optuna_hermes.broker._devices._source import DeviceSource, Poll
from optuna_hermes.broker._server._processes import soon
from optuna_hermes.model import Device

if TYPE_CHECKING:
    from optuna_hermes.broker._devices._xid import Xid

DRIVER_ANSWER_SECONDS = 1.0
"""Time after which a reading is not waited for; no GPU is granted meanwhile."""

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Request:
    pids: set[int]
    answer: asyncio.Future[tuple[Device, ...]]


class Readings:
    """Reads the devices of a broker whenever it is asked; calls belong to one event loop.

    Args:
        source: only this object polls it from now on; ``first`` is what its first poll returned.
    """

    def __init__(self, source: DeviceSource, first: Poll) -> None:
        self._source = source
        self._problems: dict[str, str] = {}
        self._xids: list[Xid] = []
        self._take(first)
        self._lock = threading.Lock()
        self._queued: _Request | None = None
        self._work: queue.SimpleQueue[bool] = queue.SimpleQueue()
        # No thread of a pool: a program that ends would wait for it.
        threading.Thread(target=self._read_all, name="hermes-devices", daemon=True).start()

    async def read(self, own_pids: Collection[int]) -> DevicesPolled:
        """Return the devices as they are after this call, and the XIDs reported until then.

        Where the driver does not answer in time it is the last reading, with no GPU free.
        """
        request = self._request(own_pids)
        try:
            # Others may wait for the same answer.
            devices = await asyncio.wait_for(asyncio.shield(request.answer), DRIVER_ANSWER_SECONDS)
        except asyncio.TimeoutError:
            devices = tuple(_unanswered(device) for device in self._last)
            self._note(devices)
        xids, self._xids = self._xids, []  # each to one of those who wait
        return DevicesPolled(devices=devices, xids=tuple(xids))

    def close(self) -> None:
        """Stop reading; a reading that is under way is not waited for."""
        self._work.put(False)

    def _request(self, own_pids: Collection[int]) -> _Request:
        """Return the reading that begins next: one that is under way may have missed a change."""
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
            polled: Poll | BaseException
            try:
                polled = self._source.poll(request.pids)
            except BaseException as error:  # it is raised where the reading is asked for
                polled = error
            soon(request.answer.get_loop(), partial(self._answer, request.answer, polled))

    def _answer(
        self, answer: asyncio.Future[tuple[Device, ...]], polled: Poll | BaseException
    ) -> None:
        if isinstance(polled, BaseException):
            answer.set_exception(polled)
            return
        self._take(polled)
        answer.set_result(polled.devices)

    def _take(self, polled: Poll) -> None:
        self._note(polled.devices)
        for xid in polled.xids:
            log.warning("%s: %s was reported", xid.device, xid)
        self._xids += polled.xids
        self._last = polled.devices

    def _note(self, devices: tuple[Device, ...]) -> None:
        """Log the problem of each device when it changes."""
        for device in devices:
            if device.problem != self._problems.get(device.id, ""):
                self._problems[device.id] = device.problem
                log.warning("%s: %s", device.id, device.problem or "all is well again")


def _unanswered(device: Device) -> Device:
    if device.kind == "cpu":
        return device
    problem = (
        f"the NVIDIA driver has not answered for {DRIVER_ANSWER_SECONDS:g} s: try `nvidia-smi`"
    )
    return replace(device, free=False, problem=problem)
