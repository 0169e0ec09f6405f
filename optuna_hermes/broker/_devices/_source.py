"""Devices of this host: the meaning of ``--devices``, and the state of each.

A GPU is known by its UUID: indices change with ``CUDA_VISIBLE_DEVICES`` and from boot to boot.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from optuna_hermes.errors import DeviceSpecError
from optuna_hermes.model import Device

if TYPE_CHECKING:
    from optuna_hermes.broker._devices._device_list import DeviceList
    from optuna_hermes.broker._devices._xid import Xid

DEFAULT_CPU_SLOTS = 2
"""CPU slots that ``auto`` stands for on a host without a GPU."""

MAX_CPU_SLOTS = 1024

_LIST = ".json"

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSlot:
    """One device of a specification: ``cpu:0``, or the UUID of a GPU or of a MIG slice.

    ``kind`` names the source in ``Devices`` that knows its state; ``listed_by`` is the list that
    has the device, where its kind is ``listed``.
    """

    id: str
    kind: Literal["cpu", "gpu", "listed"]
    listed_by: DeviceList | None = None


class Poll(NamedTuple):
    """The devices as they are, and what their driver has reported since the last poll."""

    devices: tuple[Device, ...]
    xids: tuple[Xid, ...] = ()


class DeviceSource(Protocol):
    """Source of the state of a broker's devices."""

    def poll(self, own_pids: Collection[int] = ()) -> Poll:
        """Read the devices, always the same ones in the same order.

        ``free`` says that no process but ``own_pids``, those of this broker's trials, is on one.
        """

    def close(self) -> None:
        """Close the driver."""


def parse_devices(spec: str) -> list[DeviceSlot]:
    """Read a ``--devices`` text.

    Args:
        spec: ``auto`` (every healthy GPU that ``CUDA_VISIBLE_DEVICES`` shows, or two CPU slots
            where there is none), or a list, with commas, of ``cpu:N`` (N slots), of UUIDs
            (``GPU-...``, ``MIG-...``) as ``nvidia-smi -L`` prints them, and of files that list
            devices of other makers (``FILE.json``, see ``DeviceList``).

    Raises:
        DeviceSpecError: a part means nothing, names a device this host does not have, or names
            one twice.
    """
    if spec.strip() == "auto":
        return _auto()
    slots = _named(spec, [part.strip() for part in spec.split(",")])
    gpus = [slot.id for slot in slots if slot.kind == "gpu"]
    if gpus:
        _require(gpus)
    return slots


def check_devices(spec: str) -> None:
    """Refuse a ``--devices`` text that no host would take; files and GPUs are the hosts' own.

    Raises:
        DeviceSpecError: a part means nothing, or names a device twice.
    """
    if spec.strip() != "auto":
        parts = [part.strip() for part in spec.split(",")]
        _named(spec, [part for part in parts if not part.endswith(_LIST)])


def _named(spec: str, parts: Sequence[str]) -> list[DeviceSlot]:
    slots = [slot for part in parts for slot in _slots(part)]
    ids = [slot.id for slot in slots]
    for id_ in ids:
        if ids.count(id_) > 1:
            raise DeviceSpecError(
                f"--devices must name each device once but got {id_} more than once in {spec!r}; "
                "name it once (for more CPU slots, raise N in cpu:N)."
            )
    return slots


def absolute(spec: str) -> str:
    """A ``--devices`` text with the paths of its files made absolute, for other processes."""
    parts = [part.strip() for part in spec.split(",")]
    return ",".join(os.path.abspath(part) if part.endswith(_LIST) else part for part in parts)


class Devices:
    """All devices of a specification, CPU slots and GPUs, in its order.

    Args:
        slots: what ``parse_devices`` returned.
        named: whether the user has named its GPUs; see ``NvmlDevices``.

    Raises:
        DeviceSpecError: there are GPUs among the slots and no working driver.
    """

    def __init__(
        self, slots: Sequence[DeviceSlot], host: str = "localhost", *, named: bool = True
    ) -> None:
        gpus = [slot.id for slot in slots if slot.kind == "gpu"]
        lists = dict.fromkeys(slot.listed_by for slot in slots if slot.listed_by)
        # CPU slots are always healthy, and never a stranger's: there is no driver to ask.
        self._cpus = tuple(
            Device(id=slot.id, host=host, kind="cpu", free=True)
            for slot in slots
            if slot.kind == "cpu"
        )
        self._sources: list[DeviceSource] = []
        if gpus:
            from optuna_hermes.broker._devices._nvml import NvmlDevices

            self._sources.append(NvmlDevices(gpus, host, named=named))
        for found in lists:
            from optuna_hermes.broker._devices._device_list import ListedDevices

            self._sources.append(ListedDevices(found.devices, found.variable, host))
        self._order = [slot.id for slot in slots]

    def poll(self, own_pids: Collection[int] = ()) -> Poll:
        """See ``DeviceSource``."""
        polled = [Poll(self._cpus), *(source.poll(own_pids) for source in self._sources)]
        devices = {device.id: device for each in polled for device in each.devices}
        xids = tuple(xid for each in polled for xid in each.xids)
        return Poll(tuple(devices[id_] for id_ in self._order), xids)

    def close(self) -> None:
        """See ``DeviceSource``."""
        for source in self._sources:
            source.close()


# -- processes on a device


def is_ours(pid: int, own_pids: Collection[int]) -> bool:
    """True if a process is one of ours, or was started by one."""
    if pid in own_pids:
        return True
    import psutil  # only where others may use a device

    try:
        return any(parent.pid in own_pids for parent in psutil.Process(pid).parents())
    except psutil.Error:  # it is gone, or in a container that we do not see into
        return False


def is_mps_server(pid: int) -> bool:
    """True for NVIDIA's MPS server: it computes for its clients, and is nobody's trial."""
    import psutil

    try:
        return psutil.Process(pid).name().startswith("nvidia-cuda-mps")  # may be cut
    except psutil.Error:
        return False


def described(pid: int) -> str:
    """A process and its user, in words."""
    import psutil

    try:
        process = psutil.Process(pid)
        return f"process {pid} ({process.name()} of {process.username()})"
    except (psutil.Error, KeyError):
        return f"process {pid}"


# -- what a specification means


def _slots(part: str) -> list[DeviceSlot]:
    if part.endswith(_LIST):
        from optuna_hermes.broker._devices._device_list import read_list  # few have such devices

        listed = read_list(Path(part))
        return [DeviceSlot(id=each.id, kind="listed", listed_by=listed) for each in listed.devices]
    if re.fullmatch(r"(GPU|MIG)-\S+", part):
        return [DeviceSlot(id=part, kind="gpu")]
    match = re.fullmatch(r"cpu:([0-9]{1,9})", part)
    if match is None:
        raise DeviceSpecError(
            "--devices must be auto alone, or a list of cpu:N, GPU-uuid, MIG-uuid and FILE.json, "
            f"but got {part!r}; `nvidia-smi -L` prints the UUIDs."
        )
    n_slots = int(match[1])
    if not 1 <= n_slots <= MAX_CPU_SLOTS:
        raise DeviceSpecError(
            f"N of cpu:N must be between 1 and {MAX_CPU_SLOTS} but got {part!r}; "
            f"use for example cpu:{DEFAULT_CPU_SLOTS}."
        )
    return [DeviceSlot(id=f"cpu:{index}", kind="cpu") for index in range(n_slots)]


def _auto() -> list[DeviceSlot]:
    from optuna_hermes.broker._devices import _nvml as nvml

    uuids: list[str] = []
    try:
        uuids = nvml.usable()
    except nvml.NoDriverError as error:
        if error.installed:  # else a GPU whose driver is broken would stay unused without a word
            log.warning("auto means cpu:%d here: %s", DEFAULT_CPU_SLOTS, error)
    if uuids:
        return [DeviceSlot(id=uuid, kind="gpu") for uuid in uuids]
    return _slots(f"cpu:{DEFAULT_CPU_SLOTS}")


def _require(uuids: Sequence[str]) -> None:
    """Raise unless this host has all of these devices."""
    from optuna_hermes.broker._devices import _nvml as nvml

    present = nvml.present(uuids)
    for uuid in uuids:
        if uuid not in present:
            raise DeviceSpecError(
                f"--devices must name devices of this host but got {uuid}; "
                f"choose from {', '.join(present) or 'cpu:N, for it has no GPU'}."
            )
