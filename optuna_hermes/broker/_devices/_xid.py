"""XIDs, the numbers by which the NVIDIA driver reports faults of a GPU, and their cause. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_OF_PROGRAM = {
    13: "an exception of a kernel",
    31: "a memory fault of a kernel",
    43: "a program was stopped",
    45: "a program was cleaned up after",
    68: "an exception of the video decoder",
    109: "a context switch took too long",
}
"""XIDs that a program causes: the GPU is as good as before."""

_OF_DEVICE = {
    48: "memory error that cannot be corrected",
    63: "memory row remapped",
    64: "memory row could not be remapped",
    74: "NVLink error",
    79: "fallen off the bus",
    92: "too many corrected memory errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "its system processor does not answer",
    120: "its system processor failed",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Xid:
    """One report of the driver about a device."""

    device: str
    code: int

    @property
    def is_of_program(self) -> bool:
        """True if the program that ran there is the cause; unknown XIDs count as the device's."""
        return self.code in _OF_PROGRAM

    def __str__(self) -> str:
        words = _OF_PROGRAM.get(self.code) or _OF_DEVICE.get(self.code)
        return f"XID {self.code}" + (f" ({words})" if words else "")
