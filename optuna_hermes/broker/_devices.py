"""The devices of this host: what ``--devices`` means, and what state they are in.

The only module that asks NVML. A GPU is known by its UUID: indices change with
``CUDA_VISIBLE_DEVICES`` and from boot to boot.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

from optuna_hermes.errors import DeviceSpecError
from optuna_hermes.model import Device

DEFAULT_CPU_SLOTS = 2
"""What ``auto`` stands for on a host without a GPU."""

MAX_CPU_SLOTS = 1024

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSlot:
    """One device that a specification names.

    Args:
        id: ``cpu:0``, or the UUID of a GPU or of a MIG slice.
        kind: ``cpu`` or ``gpu``.
    """

    id: str
    kind: Literal["cpu", "gpu"]


class DeviceSource(Protocol):
    """Where a broker learns the state of its devices."""

    def poll(self, own_pids: Collection[int] = ()) -> tuple[Device, ...]:
        """The devices as they are now, always the same ones in the same order.

        Args:
            own_pids: processes of this broker's runs; a device that computes for any other
                process is not free.

        Returns:
            Devices whose ``free`` says that no stranger is on them; the broker knows the rest.
        """

    def memory_of(self, pid: int, device: str) -> int | None:
        """Bytes that a process holds on a device, None if that is not known."""

    def close(self) -> None:
        """Let go of the driver."""


def parse_devices(spec: str) -> list[DeviceSlot]:
    """Read a ``--devices`` text.

    Args:
        spec: ``auto`` (every healthy GPU, or two CPU slots where there is none), or a list, with
            commas, of ``cpu:N`` (N slots) and of UUIDs (``GPU-...``, ``MIG-...``) as
            ``nvidia-smi -L`` prints them.

    Returns:
        The devices in the order of the text.

    Raises:
        DeviceSpecError: a part means nothing, names a device this host does not have, or names
            one twice.
    """
    if spec.strip() == "auto":
        return _auto()
    slots = [slot for part in spec.split(",") for slot in _slots(part.strip())]
    ids = [slot.id for slot in slots]
    for id_ in ids:
        if ids.count(id_) > 1:
            raise DeviceSpecError(
                f"--devices must name each device once but got {id_} more than once in {spec!r}; "
                "name it once (for more CPU slots, raise N in cpu:N)."
            )
    gpus = [slot.id for slot in slots if slot.kind == "gpu"]
    if gpus:
        _require(gpus)
    return slots


def environment(device_ids: Iterable[str]) -> dict[str, str]:
    """The environment variables that show a process these devices and no other GPU.

    They work only if they are set before the process wakes CUDA up.
    """
    gpus = [id_ for id_ in device_ids if not id_.startswith("cpu:")]
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}


class CpuSlots:
    """Slots that train on the CPU: always healthy, never a stranger's.

    Args:
        n_slots: how many.
        host: the host's name.
    """

    def __init__(self, n_slots: int, host: str = "localhost") -> None:
        self._devices = tuple(
            Device(id=f"cpu:{index}", host=host, kind="cpu", free=True) for index in range(n_slots)
        )

    def poll(self, own_pids: Collection[int] = ()) -> tuple[Device, ...]:
        """See ``DeviceSource``."""
        return self._devices

    def memory_of(self, pid: int, device: str) -> int | None:
        """Unknown: the slots share the host's memory."""
        return None

    def close(self) -> None:
        """Nothing to let go of."""


class NvmlDevices:
    """GPUs and MIG slices, as NVML sees them.

    A device that cannot be read at all is not healthy. A device whose processes cannot be listed
    is not free, for nobody knows who is on it. Where a container has no view of the host's
    processes NVML lists none: there only ``memory_free_bytes`` shows that a stranger is there.

    Args:
        uuids: ``GPU-...`` or ``MIG-...``.
        host: the host's name.

    Raises:
        DeviceSpecError: there is no working driver.
    """

    def __init__(self, uuids: Sequence[str], host: str = "localhost") -> None:
        self._uuids = tuple(uuids)
        self._host = host
        self._nvml = _start_driver(self._uuids)

    def poll(self, own_pids: Collection[int] = ()) -> tuple[Device, ...]:
        """See ``DeviceSource``."""
        return tuple(self._read(uuid, own_pids) for uuid in self._uuids)

    def holders(self, device: str) -> Mapping[int, int | None] | None:
        """The processes that compute on a device, with the bytes they hold there.

        Returns:
            None if they cannot be listed; a size is None if it is not known.
        """
        try:
            return _holders(self._nvml, self._nvml.nvmlDeviceGetHandleByUUID(device))
        except self._nvml.NVMLError:
            return None

    def memory_of(self, pid: int, device: str) -> int | None:
        """Bytes that a process holds on a device; None if that is unknown or it is not listed.

        A process that is not listed is no proof of freed memory: see the class.
        """
        return (self.holders(device) or {}).get(pid)

    def close(self) -> None:
        """Let go of the driver; the object is of no use afterwards."""
        self._nvml.nvmlShutdown()

    def _read(self, uuid: str, own_pids: Collection[int]) -> Device:
        try:
            handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            total, free = _memory(self._nvml, handle)
            holders = _holders(self._nvml, handle)
        except self._nvml.NVMLError:
            return Device(id=uuid, host=self._host, kind="gpu", healthy=False, free=False)
        return Device(
            id=uuid,
            host=self._host,
            kind="gpu",
            free=holders is not None and set(holders).issubset(own_pids),
            memory_bytes=total,
            memory_free_bytes=free,
        )


class Devices:
    """All devices of a specification, CPU slots and GPUs, in its order.

    Args:
        slots: what ``parse_devices`` returned.
        host: the host's name.

    Raises:
        DeviceSpecError: there are GPUs among the slots and no working driver.
    """

    def __init__(self, slots: Sequence[DeviceSlot], host: str = "localhost") -> None:
        gpus = [slot.id for slot in slots if slot.kind == "gpu"]
        by_kind: dict[str, DeviceSource] = {"cpu": CpuSlots(len(slots) - len(gpus), host)}
        if gpus:
            by_kind["gpu"] = NvmlDevices(gpus, host)
        self._sources = {slot.id: by_kind[slot.kind] for slot in slots}

    def poll(self, own_pids: Collection[int] = ()) -> tuple[Device, ...]:
        """See ``DeviceSource``."""
        polled = [source.poll(own_pids) for source in set(self._sources.values())]
        devices = {device.id: device for each in polled for device in each}
        return tuple(devices[id_] for id_ in self._sources)

    def memory_of(self, pid: int, device: str) -> int | None:
        """See ``DeviceSource``."""
        source = self._sources.get(device)
        return None if source is None else source.memory_of(pid, device)

    def close(self) -> None:
        """See ``DeviceSource``."""
        for source in set(self._sources.values()):
            source.close()


# -- what a specification means


def _slots(part: str) -> list[DeviceSlot]:
    if re.fullmatch(r"(GPU|MIG)-\S+", part):
        return [DeviceSlot(id=part, kind="gpu")]
    match = re.fullmatch(r"cpu:([0-9]{1,9})", part)
    if match is None:
        raise DeviceSpecError(
            "--devices must be auto alone, or a list of cpu:N, GPU-uuid and MIG-uuid, but got "
            f"{part!r}; `nvidia-smi -L` prints the UUIDs."
        )
    n_slots = int(match[1])
    if not 1 <= n_slots <= MAX_CPU_SLOTS:
        raise DeviceSpecError(
            f"N of cpu:N must be between 1 and {MAX_CPU_SLOTS} but got {part!r}; "
            f"use for example cpu:{DEFAULT_CPU_SLOTS}."
        )
    return [DeviceSlot(id=f"cpu:{index}", kind="cpu") for index in range(n_slots)]


def _auto() -> list[DeviceSlot]:
    try:
        with _driver([]) as nvml:
            uuids = [uuid for uuid in _present(nvml) if _healthy(nvml, uuid)]
    except DeviceSpecError:
        uuids = []
    if uuids:
        return [DeviceSlot(id=uuid, kind="gpu") for uuid in uuids]
    return _slots(f"cpu:{DEFAULT_CPU_SLOTS}")


def _require(uuids: Sequence[str]) -> None:
    """Raise unless this host has all of these devices."""
    with _driver(uuids) as nvml:
        present = list(_present(nvml))
    for uuid in uuids:
        if uuid not in present:
            raise DeviceSpecError(
                f"--devices must name devices of this host but got {uuid}; "
                f"choose from {', '.join(present) or 'cpu:N, for it has no GPU'}."
            )


# -- NVML


def _start_driver(uuids: Sequence[str]) -> Any:
    """The NVML binding, ready for calls; each start wants one ``nvmlShutdown``."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise _no_driver(uuids, error) from error
    return pynvml


@contextmanager
def _driver(uuids: Sequence[str]) -> Iterator[Any]:
    nvml = _start_driver(uuids)
    try:
        yield nvml
    except nvml.NVMLError as error:
        raise _no_driver(uuids, error) from error
    finally:
        nvml.nvmlShutdown()


def _no_driver(uuids: Sequence[str], error: Exception) -> DeviceSpecError:
    return DeviceSpecError(
        f"A GPU needs a working NVIDIA driver but got {', '.join(uuids)!r} and NVML says "
        f"'{error}'; install the driver, or use cpu:{DEFAULT_CPU_SLOTS}."
    )


def _present(nvml: Any) -> Iterator[str]:
    """The UUIDs of what CUDA can use: whole GPUs, or the slices of those in MIG mode."""
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            slices = list(_mig_slices(nvml, handle))
            uuids = [nvml.nvmlDeviceGetUUID(each) for each in slices or [handle]]
        except nvml.NVMLError:
            continue  # a GPU that cannot be named cannot be used
        yield from uuids


def _mig_slices(nvml: Any, handle: Any) -> Iterator[Any]:
    mode = _known(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle)[0])
    if mode != nvml.NVML_DEVICE_MIG_ENABLE:
        return
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError_NotFound:
            continue  # not every place for a slice is taken


def _healthy(nvml: Any, uuid: str) -> bool:
    try:
        _memory(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    except nvml.NVMLError:
        return False
    return True


def _memory(nvml: Any, handle: Any) -> tuple[int | None, int | None]:
    """Bytes in all and bytes free, None where the device or the driver does not tell.

    Version 2 does not count what the driver reserves for itself as used; old drivers lack it.
    """
    for version in (nvml.nvmlMemory_v2, None):
        read = partial(nvml.nvmlDeviceGetMemoryInfo, handle, version=version)
        info = _known(nvml, read)
        if info is not None:
            return int(info.total), int(info.free)
    return None, None


def _holders(nvml: Any, handle: Any) -> dict[int, int | None] | None:
    processes = _known(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle))
    if processes is None:
        return None
    return {process.pid: process.usedGpuMemory for process in processes}


def _known(nvml: Any, read: Callable[[], T]) -> T | None:
    """What ``read`` returns, None where the answer is that this cannot be known.

    Unknown is never 0. Every other error means that the device is in trouble and goes up.
    """
    try:
        return read()
    except (
        nvml.NVMLError_NotSupported,
        nvml.NVMLError_NoPermission,
        nvml.NVMLError_FunctionNotFound,
        nvml.NVMLError_ArgumentVersionMismatch,
    ):
        return None
