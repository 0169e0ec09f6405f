"""Fake devices, controlled by tests."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from optuna_hermes.broker._devices._source import Poll
from optuna_hermes.broker._devices._xid import Xid
from optuna_hermes.model import Device


class FakeDevices:
    """A ``DeviceSource`` without devices: a test sets the result of polls.

    Example:
        >>> from optuna_hermes.model import Device
        >>> fake = FakeDevices([Device(id="GPU-a", kind="gpu", free=True)])
        >>> fake.change("GPU-a", healthy=False)
        >>> fake.poll().devices[0].healthy
        False

    Args:
        devices: the devices that polls return until ``change`` is called.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = {device.id: device for device in devices}
        self._reports: list[Xid] = []
        self.polls: list[frozenset[int]] = []
        """The ``own_pids`` of every poll so far."""
        self.closed = False

    def change(self, device: str, **fields: Any) -> None:
        """Change fields of a device from the next poll on.

        Raises:
            KeyError: there is no such device.
        """
        self._devices[device] = replace(self._devices[device], **fields)

    def report(self, device: str, code: int) -> None:
        """Add an XID reported by the driver; ``change`` marks the device as broken."""
        self._reports.append(Xid(device=device, code=code))

    def poll(self, own_pids: Collection[int] = ()) -> Poll:
        """The devices as the test left them, and what it has reported since the last poll."""
        self.polls.append(frozenset(own_pids))
        xids, self._reports = self._reports, []
        return Poll(tuple(self._devices.values()), tuple(xids))

    def close(self) -> None:
        """Record that the source was closed."""
        self.closed = True
