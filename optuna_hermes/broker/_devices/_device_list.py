"""Devices that a file lists: accelerators of any maker, for which there is no driver to ask."""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec

from optuna_hermes.broker._devices._health import Health
from optuna_hermes.broker._devices._source import Poll
from optuna_hermes.errors import DeviceSpecError
from optuna_hermes.model import Count, Device

_EXAMPLE = '{"variable": "HIP_VISIBLE_DEVICES", "devices": [{"id": "amd-0", "shown_as": "0"}]}'
_ID = re.compile(r"(?!cpu:|GPU-|MIG-)[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}")
_LOOK = "see whether its driver runs"

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class ListedDevice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device of a list.

    Args:
        id: its name in status, in the ledger and on the command line.
        shown_as: how ``DeviceList.variable`` names it.
        memory_bytes: its memory, None if unknown.
        used_bytes_file: a file of its driver that holds the bytes in use, None if there is none.
    """

    id: str
    shown_as: Name
    memory_bytes: Count | None = None
    used_bytes_file: str | None = None


class DeviceList(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The devices of one maker on a host.

    Args:
        variable: the environment variable by which its driver shows devices to a process.
        devices: them, each once.
    """

    variable: Annotated[str, msgspec.Meta(pattern="^[A-Za-z_][A-Za-z0-9_]*$", max_length=64)]
    devices: Annotated[tuple[ListedDevice, ...], msgspec.Meta(min_length=1)]


def read_list(path: Path) -> DeviceList:
    """Read a list of devices.

    Raises:
        DeviceSpecError: it cannot be read, or is no such list.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=DeviceList)
    except OSError as error:
        raise DeviceSpecError(
            f"--devices names a list of devices that cannot be read ({error.strerror}): "
            f"{str(path)!r}; write {_EXAMPLE} there, or name another file."
        ) from error
    except msgspec.MsgspecError as error:  # the base of all that decoding raises
        raise _refused(path, str(error)) from error
    for place, device in enumerate(found.devices):
        if _ID.fullmatch(device.id) is None:
            raise _refused(
                path, f"{device.id!r} is no id: letters, digits and _ . : -, but no GPU-"
            )
        before = found.devices[:place]
        if device.id in [each.id for each in before]:
            raise _refused(path, f"the id {device.id!r} is there twice")
        if device.shown_as in [each.shown_as for each in before]:
            raise _refused(path, f"two devices are shown as {device.shown_as!r}")
        if device.used_bytes_file is not None and device.memory_bytes is None:
            raise _refused(path, f"{device.id!r} has a used_bytes_file but no memory_bytes")
        if device.used_bytes_file is not None and not Path(device.used_bytes_file).is_absolute():
            raise _refused(path, f"the used_bytes_file of {device.id!r} is no absolute path")
    return found


def _refused(path: Path, reason: str) -> DeviceSpecError:
    return DeviceSpecError(
        f"{str(path)!r} must list devices as {_EXAMPLE} does, but {reason}: mend it."
    )


class ListedDevices:
    """Devices of a list, whose processes nobody knows.

    They are nobody else's as far as their memory shows. One whose ``used_bytes_file`` cannot be
    read is broken until it can.

    Args:
        devices, variable: as in ``DeviceList``, or a part of them.
    """

    def __init__(
        self, devices: Sequence[ListedDevice], variable: str, host: str = "localhost"
    ) -> None:
        self._devices = tuple(devices)
        self._variable = variable
        self._host = host
        self._health = {device.id: Health() for device in devices}

    def poll(self, own_pids: Collection[int] = ()) -> Poll:
        """See ``DeviceSource``."""
        return Poll(tuple(map(self._read, self._devices)))

    def close(self) -> None:
        """Nothing: there is no driver."""

    def _read(self, listed: ListedDevice) -> Device:
        device = Device(
            id=listed.id,
            host=self._host,
            kind="gpu",
            shown_by=(self._variable, listed.shown_as),
            memory_bytes=listed.memory_bytes,
        )
        free = None
        if listed.used_bytes_file is not None and listed.memory_bytes is not None:
            try:
                used = int(Path(listed.used_bytes_file).read_text())
            except (OSError, ValueError) as error:
                gone = getattr(error, "errno", None) in (errno.ENOENT, errno.ENODEV)
                health, now = self._health[listed.id], time.monotonic()
                return health.unread(device, str(error), now, gone=gone, look=_LOOK)
            free = max(0, listed.memory_bytes - used)
        self._health[listed.id].answers()
        return replace(device, free=True, unlisted=True, memory_free_bytes=free)
