"""NVML, which no other module asks: the GPUs, the processes on them, and their state."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from optuna_hermes.broker._devices._health import Health
from optuna_hermes.broker._devices._nvml_events import Listener
from optuna_hermes.broker._devices._source import Poll, described, is_mps_server, is_ours
from optuna_hermes.broker._devices._visible import VISIBLE_VARIABLE, Gpu, visible
from optuna_hermes.errors import DeviceSpecError
from optuna_hermes.model import Device

_LOOK = "see what `nvidia-smi` says"
_STRANGER = "computes on it: wait for it, or end it"

_RESET = "end the broker, reset the GPU with `nvidia-smi --gpu-reset` or restart the host"

T = TypeVar("T")


class NvmlDevices:
    """GPUs and MIG slices, as NVML reports them.

    A device that cannot be read is not healthy, and neither is one that has to be reset: until it
    was away and is back, or its driver says that it needs nothing.

    Args:
        uuids: ``GPU-...`` or ``MIG-...``.
        named: whether the user has named them.

    Raises:
        DeviceSpecError: there is no working driver.
    """

    def __init__(
        self, uuids: Sequence[str], host: str = "localhost", *, named: bool = True
    ) -> None:
        self._uuids = tuple(uuids)
        self._host = host
        self._named = named
        self._nvml = start_driver(self._uuids)
        self._health = {uuid: Health() for uuid in self._uuids}
        self._reported: set[str] = set()
        """Devices whose driver is asked whether they have to be reset."""
        self._listener = Listener(self._nvml, self._uuids)

    def poll(self, own_pids: Collection[int] = ()) -> Poll:
        """See ``DeviceSource``."""
        xids = tuple(self._listener.read())
        for xid in xids:
            if not xid.is_of_program:
                self._reported.add(xid.device)
            if xid.needs_reset:
                self._health[xid.device].fault = f"it reported {xid}: {_RESET}"
        return Poll(tuple(self._read(uuid, own_pids) for uuid in self._uuids), xids)

    def close(self) -> None:
        """Close the driver; the object is of no use afterwards."""
        self._listener.close()
        self._nvml.nvmlShutdown()

    def _read(self, uuid: str, own_pids: Collection[int]) -> Device:
        device = Device(
            id=uuid,
            host=self._host,
            kind="gpu",
            part=uuid.startswith("MIG-"),
            shown_by=(VISIBLE_VARIABLE, uuid),
        )
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            total, free = _memory(nvml, handle)
            holders = _holders(nvml, handle)
            # A desktop in the list of those that draw shows that processes can be listed here.
            drawing = partial(nvml.nvmlDeviceGetGraphicsRunningProcesses_v3, handle)
            draws = holders == {} and bool(_known(nvml, drawing))
        except nvml.NVMLError as error:
            gone = isinstance(error, nvml.NVMLError_GpuIsLost | nvml.NVMLError_ResetRequired)
            now = time.monotonic()
            return self._health[uuid].unread(device, str(error), now, gone=gone, look=_LOOK)
        self._answers(uuid)
        mode = _tried(nvml, lambda: nvml.nvmlDeviceGetComputeMode(handle))
        servers = [pid for pid in holders or () if pid not in own_pids and is_mps_server(pid)]
        if holders is not None and servers:
            clients = _tried(nvml, lambda: _mps_clients(nvml, handle)) or {}
            # What the server has is its clients' memory.
            holders = {pid: holders[pid] for pid in holders if pid not in servers} | clients
        device = replace(
            device,
            # Under MPS the one process that may use it is the server.
            exclusive=mode == nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS and not servers,
            processes=tuple((pid, taken) for pid, taken in (holders or {}).items() if taken),
            memory_bytes=total,
            memory_free_bytes=free,
            # MIG slices have none of the three.
            power_watts=_tried(nvml, lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
            energy_joules=_tried(
                nvml, lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
            ),
            used=_tried(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu > 0),
        )
        if uuid in self._reported:
            self._ask_for_recovery(uuid, handle)
        fault = self._health[uuid].fault
        if fault:
            return replace(device, healthy=False, problem=fault)
        if mode == nvml.NVML_COMPUTEMODE_PROHIBITED:
            way_out = "allow it with `nvidia-smi --compute-mode=DEFAULT`"
            return replace(device, problem=f"its compute mode is Prohibited: {way_out}")
        # Where a container lists no processes, a GPU that the user has named is taken all the same.
        if holders is None and not self._named:
            problem = (
                "its processes cannot be listed here, so it is not known who is on it: name it in "
                "--devices to use it all the same"
            )
            return replace(device, problem=problem)
        strangers = [pid for pid in holders or () if not is_ours(pid, own_pids)]
        if strangers:
            return replace(device, problem=f"{described(strangers[0])} {_STRANGER}")
        return replace(device, free=True, unlisted=not holders and not draws)

    def _answers(self, uuid: str) -> None:
        if self._health[uuid].answers():
            self._reported.discard(uuid)
            self._listener.close()
            self._listener = Listener(self._nvml, self._uuids)

    def _ask_for_recovery(self, uuid: str, handle: Any) -> None:
        """Ask the driver whether a GPU that has reported something has to be reset."""
        nvml, health = self._nvml, self._health[uuid]
        field = nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
        found = _tried(nvml, lambda: nvml.nvmlDeviceGetFieldValues(handle, [field])[0])
        if found is None or found.nvmlReturn != nvml.NVML_SUCCESS:
            return
        if found.value.uiVal == nvml.NVML_GPU_RECOVERY_ACTION_NONE:
            health.fault = ""
        elif not health.fault:
            health.fault = f"its driver says that it has to be reset: {_RESET}"


# -- the driver


def start_driver(uuids: Sequence[str]) -> Any:
    """The NVML binding, ready for calls; each start needs one ``nvmlShutdown``.

    Raises:
        DeviceSpecError: there is no working driver.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise _no_driver(pynvml, uuids, error) from error
    return pynvml


@contextmanager
def driver(uuids: Sequence[str] = ()) -> Iterator[Any]:
    """The NVML binding for as long as the block lasts; see ``start_driver``."""
    nvml = start_driver(uuids)
    try:
        yield nvml
    except nvml.NVMLError as error:
        raise _no_driver(nvml, uuids, error) from error
    finally:
        nvml.nvmlShutdown()


def gpus(nvml: Any) -> Iterator[Gpu]:
    """The GPUs in the driver's order; one that it cannot name keeps its place."""
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            slices = tuple(nvml.nvmlDeviceGetUUID(each) for each in _mig_slices(nvml, handle))
            gpu = Gpu(uuid=nvml.nvmlDeviceGetUUID(handle), slices=slices)
        except nvml.NVMLError:
            gpu = Gpu(uuid="")
        yield gpu


def present(uuids: Sequence[str]) -> list[str]:
    """Ids of all GPUs and slices of this host, where ``uuids`` are asked for."""
    with driver(uuids) as nvml:
        return visible(list(gpus(nvml)), None)


def usable() -> list[str]:
    """Ids of the GPUs and slices that CUDA shows to this process, and that answer."""
    with driver() as nvml:
        shown = visible(list(gpus(nvml)), os.environ.get(VISIBLE_VARIABLE))
        return [uuid for uuid in shown if answers(nvml, uuid)]


def troubles(nvml: Any) -> Iterator[tuple[int, str]]:
    """Index and error of each GPU that the driver lists and that cannot be used."""
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            nvml.nvmlDeviceGetUUID(handle)
            _memory(nvml, handle)
        except nvml.NVMLError as error:
            yield index, str(error)


def answers(nvml: Any, uuid: str) -> bool:
    """True if a device can be read."""
    try:
        _memory(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    except nvml.NVMLError:
        return False
    return True


def _no_driver(nvml: Any, uuids: Sequence[str], error: Any) -> DeviceSpecError:
    wanted = f" ({', '.join(uuids)})" if uuids else ""
    return NoDriverError(
        f"A GPU{wanted} needs a working NVIDIA driver but NVML says '{error}': "
        f"{_way_out(nvml, error)}, or use cpu:N.",
        installed=not isinstance(error, nvml.NVMLError_LibraryNotFound),
    )


class NoDriverError(DeviceSpecError):
    """There is no working driver; ``installed`` says that its library is there."""

    def __init__(self, message: str, *, installed: bool) -> None:
        super().__init__(message)
        self.installed = installed


def _way_out(nvml: Any, error: Any) -> str:
    ways = {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: "install the driver (a container needs `--gpus all`)",
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: "load the driver with `modprobe nvidia`",
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the driver was updated while an older one is "
        "loaded, so restart the host",
        nvml.NVML_ERROR_FUNCTION_NOT_FOUND: "the driver is too old, so update it",
        nvml.NVML_ERROR_NO_PERMISSION: "let this user read and write /dev/nvidia*",
    }
    return ways.get(error.value, _LOOK)


# -- single questions


def _mig_slices(nvml: Any, handle: Any) -> Iterator[Any]:
    mode = _known(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle)[0])
    if mode != nvml.NVML_DEVICE_MIG_ENABLE:
        return
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError_NotFound:
            continue  # not every place for a slice is taken


def _memory(nvml: Any, handle: Any) -> tuple[int | None, int | None]:
    """Bytes in all and bytes free, None where the device or the driver does not tell."""
    # Version 2 does not count what the driver reserves for itself as used; old drivers lack it.
    for version in (nvml.nvmlMemory_v2, None):
        read = partial(nvml.nvmlDeviceGetMemoryInfo, handle, version=version)
        info = _known(nvml, read)
        if info is not None:
            return int(info.total), int(info.free)
    return None, None


def _holders(nvml: Any, handle: Any) -> dict[int, int | None] | None:
    for call in (
        nvml.nvmlDeviceGetComputeRunningProcesses_v3,
        nvml.nvmlDeviceGetComputeRunningProcesses_v2,  # drivers before 510
    ):
        processes = _known(nvml, partial(call, handle))
        if processes is not None:
            return {process.pid: process.usedGpuMemory for process in processes}
    return None


def _mps_clients(nvml: Any, handle: Any) -> dict[int, int | None]:
    found = nvml.nvmlDeviceGetMPSComputeRunningProcesses_v3(handle)
    return {process.pid: process.usedGpuMemory for process in found}


def _tried(nvml: Any, read: Callable[[], T]) -> T | None:
    """Result of ``read``, None on any error: a device without this figure has no fault."""
    try:
        return read()
    except nvml.NVMLError:
        return None


def _known(nvml: Any, read: Callable[[], T]) -> T | None:
    """Result of ``read``, None where the answer is that it cannot be known."""
    # Unknown is never 0. Every other error means that the device is in trouble, and is raised.
    try:
        return read()
    except (
        nvml.NVMLError_NotSupported,
        nvml.NVMLError_NoPermission,
        nvml.NVMLError_FunctionNotFound,
        nvml.NVMLError_ArgumentVersionMismatch,
    ):
        return None
