"""The simulated host: what its devices are like, and who has what of them."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping
from pathlib import Path

GPUS = ("GPU-aaaa", "GPU-bbbb")
SLICES = ("MIG-cccc", "MIG-dddd")
"""Slices of the second GPU, if it is cut into slices."""

MIB = 1 << 20
PROHIBITED, EXCLUSIVE = 2, 3
NO_RECOVERY, NEEDS_RESET = 0, 1


# As in host.h.
class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("context", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64),
        ("gone_at", ctypes.c_double),
    )


class _Device(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_uint64),
        ("mode", ctypes.c_uint32),
        ("mps_server", ctypes.c_uint32),
        ("lost", ctypes.c_uint32),
        ("mig", ctypes.c_uint32),
        ("recovery", ctypes.c_uint32),
        ("n_xids", ctypes.c_uint32),
        ("xids", ctypes.c_uint32 * 8),
        ("refused", ctypes.c_uint64),
        ("most", ctypes.c_uint64),
        ("processes", _Process * 64),
    )


class _State(ctypes.Structure):
    _fields_ = (("linger_seconds", ctypes.c_double), ("devices", _Device * 4))


class SimulatedHost:
    """A host with two GPUs, for the simulated accelerator and the stand-in driver library.

    Args:
        path: a file for what its processes share.
        memory_bytes: of each GPU; a slice has a third of it.
        linger_seconds: for which the memory of a process is in use after its end.
    """

    def __init__(self, path: Path, *, memory_bytes: int, linger_seconds: float = 0.3) -> None:
        self.path = path
        path.write_bytes(bytes(ctypes.sizeof(_State)))
        with path.open("r+b") as file:
            self._state = _State.from_buffer(mmap.mmap(file.fileno(), 0))
        self._state.linger_seconds = linger_seconds
        for index, each in enumerate(self._state.devices):
            each.total = memory_bytes if index < 2 else memory_bytes // 3

    def variables(self, library: Path) -> Mapping[str, str]:
        """Environment variables of processes on this host, for the stand-in library's folder."""
        folders = filter(None, (str(library), os.environ.get("LD_LIBRARY_PATH")))
        return {"SIMULATED_HOST": str(self.path), "LD_LIBRARY_PATH": os.pathsep.join(folders)}

    def take(self, uuid: str, pid: int, bytes_: int) -> None:
        """Let a process, of whatever program, have memory of a device."""
        processes = self._of(uuid).processes
        entry = next(e for e in processes if e.pid in (0, pid))
        entry.context, entry.reserved, entry.gone_at = bytes_, 0, 0.0
        entry.pid = pid

    def set_mode(self, uuid: str, mode: int) -> None:
        """Set the compute mode of a GPU."""
        self._of(uuid).mode = mode

    def serve_mps(self, uuid: str, pid: int) -> None:
        """Let all processes share a GPU through an MPS server."""
        self._of(uuid).mps_server = pid

    def lose(self, uuid: str, lost: bool = True) -> None:
        """Let a GPU fall off the bus, or come back."""
        self._of(uuid).lost = lost

    def cut(self) -> None:
        """Cut the second GPU into slices."""
        self._of(GPUS[1]).mig = 1

    def report(self, uuid: str, xid: int, recovery: int = NO_RECOVERY) -> None:
        """Let the driver report an XID, and what it takes to recover."""
        device = self._of(uuid)
        device.xids[device.n_xids] = xid
        device.recovery = recovery
        device.n_xids += 1

    def refused(self) -> int:
        """Count the times that there was no room for a context, or for memory."""
        return sum(int(each.refused) for each in self._state.devices)

    def most_bytes(self, uuid: str) -> int:
        """The most bytes of a device that were in use at once."""
        return int(self._of(uuid).most)

    def held(self, uuid: str) -> dict[int, int]:
        """Bytes of each process that was ever seen on a device, whether it lives or not."""
        return {e.pid: e.context + e.reserved for e in self._of(uuid).processes if e.pid}

    def _of(self, uuid: str) -> _Device:
        device: _Device = self._state.devices[(*GPUS, *SLICES).index(uuid)]
        return device
