"""Reports of the NVIDIA driver on GPUs, read without ever waiting for them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from optuna_hermes.broker._devices._xid import Xid

_ANY_INSTANCE = 0xFFFFFFFF
# Reports taken in one poll, which a GPU that reports without end must not hold up.
_AT_ONCE = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """The GPU of a device, and its instance there: None for the whole."""

    gpu: int | None
    instance: int | None


class Listener:
    """Listener for the XIDs of some devices; there are none where the driver reports none."""

    def __init__(self, nvml: Any, uuids: Sequence[str]) -> None:
        self._nvml = nvml
        self._parts: dict[str, _Part] = {}
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
        self._parts[uuid] = _Part(gpu=_address(gpu), instance=instance)

    def _xids(self, event: Any) -> Iterator[Xid]:
        gpu, instance = _address(event.device), event.gpuInstanceId
        for uuid, part in self._parts.items():
            if part.gpu == gpu and (
                part.instance is None or instance in (part.instance, _ANY_INSTANCE)
            ):
                yield Xid(device=uuid, code=int(event.eventData))


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
