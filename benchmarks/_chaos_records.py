"""Records that the trials of ``chaos.py`` write themselves, apart from the program under test.

In one folder: ``reported``, a line for each value, which is on the disk before Optuna hears of it;
a marker for each device, locked by whoever trains there; ``doubles``, a line for each time that
somebody found the marker of its device taken; the last batch of each trial; and ``rewinds``, a line
for each time that a trial went back behind it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "HERMES_CHAOS_FOLDER"
_EXITING = 0x4  # PF_EXITING among the flags of /proc/PID/stat
_LOOK_SECONDS = 0.01


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Size of the training of each trial."""

    epochs: int  # units of each trial
    width: int  # of the network
    batch_size: int  # of its loader


@dataclass(frozen=True, kw_only=True)
class Reported:
    """One value; its text has every bit. ``at`` is wall clock seconds."""

    trial: int
    unit: int
    value: str
    pid: int
    at: float


@dataclass(frozen=True, kw_only=True)
class Rewind:
    """A trial trains batches again: of which unit, how many, and when it had last trained one."""

    trial: int
    unit: int
    batches: int
    last_at: float
    at: float


class Records:
    """The files, as trials write them and as ``chaos.py`` reads them.

    Args:
        folder: on a disk that stays.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self, setting: Setting, *, pace_seconds: float) -> None:
        """Make the folder and say what is to be trained, and how slowly."""
        self.folder.mkdir(parents=True)
        (self.folder / "setting.json").write_text(json.dumps(asdict(setting)))
        (self.folder / "reported").touch()
        (self.folder / "doubles").touch()
        (self.folder / "rewinds").touch()
        self.set_pace(pace_seconds)

    @property
    def setting(self) -> Setting:
        return Setting(**json.loads((self.folder / "setting.json").read_text()))

    @property
    def pace_seconds(self) -> float:
        """Seconds that a batch pretends to take, besides its computation."""
        return float((self.folder / "pace").read_text())

    def set_pace(self, seconds: float) -> None:
        new = self.folder / "pace.new"
        new.write_text(str(seconds))
        new.replace(self.folder / "pace")  # a reader sees the one or the other

    def add(self, trial: int, unit: int, value: float) -> None:
        """Put a value down before anybody else hears of it."""
        line = Reported(
            trial=trial, unit=unit, value=float(value).hex(), pid=os.getpid(), at=time.time()
        )
        append_line(self.folder / "reported", asdict(line))

    def reported(self) -> list[Reported]:
        return [Reported(**line) for line in lines_of(self.folder / "reported")]

    def batch(self, trial: int, unit: int, index: int, per_unit: int) -> None:
        """A trial has trained a batch; put down if it had done so before."""
        path, now = self.folder / f"batch-{trial}", time.time()
        count = (unit - 1) * per_unit + index + 1
        with contextlib.suppress(FileNotFoundError):
            last, at = path.read_text().split()
            if count <= int(last):
                again = int(last) - count + 1
                line = Rewind(trial=trial, unit=unit, batches=again, last_at=float(at), at=now)
                append_line(self.folder / "rewinds", asdict(line))
        new = self.folder / f"batch-{trial}.new"
        new.write_text(f"{count} {now}")
        new.replace(path)

    def rewinds(self) -> list[Rewind]:
        return [Rewind(**line) for line in lines_of(self.folder / "rewinds")]

    def doubles(self) -> list[dict[str, Any]]:
        return list(lines_of(self.folder / "doubles"))

    def holders(self) -> dict[int, int]:
        """Trials by the process that trains them, as the kernel and the markers know."""
        locked = _locked_inodes()
        found = {}
        for path in self.folder.glob("marker-*"):
            pid = locked.get(path.stat().st_ino)
            words = path.read_text().split()
            if pid is not None and words and int(words[0]) == pid:
                found[pid] = int(words[1])
        return found

    def marker(self, device: str) -> Path:
        return self.folder / f"marker-{device.replace(':', '-')}"

    def double(self, device: str, trial: int, holder: str) -> None:
        """Somebody else trains on this device."""
        line = {"device": device, "trial": trial, "pid": os.getpid(), "other": holder}
        append_line(self.folder / "doubles", {**line, "at": time.time()})


class Marker:
    """The marker of the device that one trial trains on.

    The kernel takes the lock back when its process dies, and leaves it to one that is stopped.
    """

    def __init__(self, records: Records, trial: int) -> None:
        self._records = records
        self._trial = trial
        self._file: int | None = None

    def take(self, device: str) -> None:
        """Lock the marker, or put down who has it."""
        file = os.open(self._records.marker(device), os.O_RDWR | os.O_CREAT, 0o644)
        while not _locked(file):
            holder = os.pread(file, 100, 0).decode()
            if not _dying(holder):
                self._records.double(device, self._trial, holder)
                os.close(file)
                return
            time.sleep(_LOOK_SECONDS)
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()} {self._trial}".encode(), 0)
        self._file = file

    def leave(self) -> None:
        """Unlock it, before the device is given back."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _dying(holder: str) -> bool:
    """True if the process was killed, and the kernel is about to close its files.

    Its socket may be closed already, and the device rightly given on.
    """
    if not holder:  # the marker was locked this moment, or the other one is about to write
        return True
    try:
        fields = Path(f"/proc/{holder.split()[0]}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return True
    return fields[0] in "ZX" or bool(int(fields[6]) & _EXITING)


def _locked_inodes() -> dict[int, int]:
    """Process by inode of every file that ``flock`` has locked."""
    found = {}
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if words[1] == "FLOCK" and words[3] == "WRITE":
            found[int(words[5].rpartition(":")[2])] = int(words[4])
    return found


def append_line(path: Path, line: dict[str, Any]) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(file, json.dumps(line).encode() + b"\n")
        os.fsync(file)
    finally:
        os.close(file)


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):  # the line that is being written
            yield json.loads(line)
