"""XIDs, the numbers by which the NVIDIA driver reports what happened to a GPU. Pure.

Their meaning is that of NVIDIA's catalogue of XIDs for A100 and later.
"""

from __future__ import annotations

from dataclasses import dataclass

_OF_PROGRAM = {
    13: "an exception of a kernel",
    31: "a memory fault of a kernel",
    43: "a program was stopped",
    45: "a program was cleaned up after",
    68: "an exception of the video decoder",
    69: "an exception of a kernel's engine",
    94: "a memory error that ended only the program that met it",
    109: "a context switch took too long",
}
"""XIDs that end a program and nothing else: the GPU is as good as before."""

_NEEDS_RESET = {
    46: "it stopped processing",
    48: "memory error that cannot be corrected",
    62: "its power controller halted",
    64: "memory row could not be remapped",
    74: "NVLink error",
    79: "fallen off the bus",
    95: "uncontained memory error",
    110: "security fault",
    119: "its system processor does not answer",
    120: "its system processor failed",
    136: "NVLink could not be trained",
    140: "memory error that cannot be recovered from",
    143: "it could not be initialized",
    150: "NVLink controller failed",
    155: "NVLink error found by software",
    156: "a part of it is to be retired",
    158: "fatal time-out",
}
"""XIDs after which a GPU has to be reset before it can be relied on."""

_NOTICES = {
    63: "memory row remapped",
    92: "many corrected memory errors",
    154: "what it takes to recover has changed",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Xid:
    """One report of the driver about a device."""

    device: str
    code: int

    @property
    def is_of_program(self) -> bool:
        """True if it ended the program that ran there."""
        return self.code in _OF_PROGRAM

    @property
    def needs_reset(self) -> bool:
        """True if the device is of no use until it is reset.

        Most XIDs mean less, and an unknown one means nothing by itself: what is really broken does
        not answer any more, or its driver says that it has to be reset.
        """
        return self.code in _NEEDS_RESET

    def __str__(self) -> str:
        words = (_OF_PROGRAM | _NEEDS_RESET | _NOTICES).get(self.code)
        return f"XID {self.code}" + (f" ({words})" if words else "")
