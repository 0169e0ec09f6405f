"""Reports of the NVIDIA driver on GPUs, read without ever waiting for them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from optuna_hermes.broker._devices._xid import Xid

_ANY_INSTANCE = 0xFFFFFFFF
# Reports taken in one poll, which a GPU that reports without end must not hold up.
_AT_ONCE = 1000


class Listener:
    """Listener for the XIDs of some devices; there are none where the driver reports none."""

    def __init__(self, nvml: Any, uuids: Sequence[str]) -> None:
        self._nvml = nvml
        self._parts: dict[str, tuple[int | None, int | None]] = {}
        """The GPU of each device, and its instance there: None for the whole."""
        self._set: Any = None
        with suppress(nvml.NVMLError):
            self._set = nvml.nvmlEventSetCreate()
        for uuid in uuids if self._set is not None else ():
            with suppress(nvml.NVMLError):  # no reports of this one, but polls see it
                self._listen_to(uuid)

    def read(self) -> Iterator[Xid]:
        """Yield what was reported since the last call."""
        for _ in range(_AT_ONCE if self._parts else 0):
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._set, 0)
            except self._nvml.NVMLError:  # mostly: nothing more was reported
                return
            if event.eventType == self._nvml.nvmlEventTypeXidCriticalError:
                yield from self._xids(event)

    def close(self) -> None:
        """Stop listening."""
        if self._set is not None:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlEventSetFree(self._set)
        self._set, self._parts = None, {}

    def _listen_to(self, uuid: str) -> None:
        nvml = self._nvml
        gpu, instance = nvml.nvmlDeviceGetHandleByUUID(uuid), None
        if uuid.startswith("MIG-"):
            instance = int(nvml.nvmlDeviceGetGpuInstanceId(gpu))
            gpu = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(gpu)
        nvml.nvmlDeviceRegisterEvents(gpu, nvml.nvmlEventTypeXidCriticalError, self._set)
        self._parts[uuid] = _address(gpu), instance

    def _xids(self, event: Any) -> Iterator[Xid]:
        for uuid, (gpu, instance) in self._parts.items():
            here = instance is None or event.gpuInstanceId in (instance, _ANY_INSTANCE)
            if here and gpu == _address(event.device):
                yield Xid(device=uuid, code=int(event.eventData))


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
