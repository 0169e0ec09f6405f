"""File by which a broker tells the next one which processes it serves."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from optuna_hermes.broker._holder import Holder
from optuna_hermes.broker._privacy import write_private

HOLDERS = "holders.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_STATE, _STARTED = 0, 19
"""Fields of ``/proc/PID/stat`` behind the name of the program."""


class _Card(msgspec.Struct, frozen=True, kw_only=True):
    """The holders, and the boot of the host in which their process ids are valid."""

    boot: str
    holders: tuple[Holder, ...]


def started(pid: int) -> int:
    """Start time of a process, as the kernel counts; 0 if it has ended, reaped or not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The name of the program, in parentheses, may contain any character.
    fields = text.rpartition(")")[2].split()
    return 0 if fields[_STATE] in "ZX" else int(fields[_STARTED])


def save(directory: Path, holders: Sequence[Holder]) -> None:
    """Replace the file; without holders there is none.

    Raises:
        OSError: the file system refused.
    """
    path = directory / HOLDERS
    if holders:
        card = _Card(boot=_boot(), holders=tuple(holders))
        write_private(path, msgspec.json.encode(card).decode())
    else:
        path.unlink(missing_ok=True)


def living(directory: Path) -> tuple[Holder, ...]:
    """Holders of the last broker that have not ended; none if that cannot be known."""
    card = None
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        card = msgspec.json.decode((directory / HOLDERS).read_bytes(), type=_Card)
    if card is None or card.boot != _boot():
        return ()
    return tuple(each for each in card.holders if started(each.pid) == each.started)


def _boot() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
