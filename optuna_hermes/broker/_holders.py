"""File by which a broker tells the next one which processes it serves."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from optuna_hermes.broker._privacy import write_private
from optuna_hermes.broker._served_process import ServedProcess

HOLDERS = "holders.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_STATE, _STARTED = 0, 19
"""Fields of ``/proc/PID/stat`` behind the name of the program."""


# The boot of the host in which the process ids of the holders are valid, and the holders.
_Content = tuple[str, tuple[ServedProcess, ...]]


def started(pid: int) -> int:
    """Start time of a process, as the kernel counts; 0 if it has ended, reaped or not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The name of the program, in parentheses, may contain any character.
    fields = text.rpartition(")")[2].split()
    return 0 if fields[_STATE] in "ZX" else int(fields[_STARTED])


def save(directory: Path, holders: Sequence[ServedProcess]) -> None:
    """Replace the file; without holders there is none.

    Raises:
        OSError: the file system refused.
    """
    path = directory / HOLDERS
    if holders:
        write_private(path, msgspec.json.encode((boot(), holders)).decode())
    else:
        path.unlink(missing_ok=True)


def living(directory: Path) -> tuple[ServedProcess, ...]:
    """Holders of the last broker that have not ended; none if that cannot be known."""
    of_boot: str | None = None
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        of_boot, held = msgspec.json.decode((directory / HOLDERS).read_bytes(), type=_Content)
    if of_boot != boot():
        return ()
    return tuple(each for each in held if 0 < started(each.pid) == each.started)


def boot() -> str:
    """Name of the boot of this host, new each time it starts; empty if that cannot be read."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
