"""Which process is the broker of this host and user: a lock held for life in a private folder."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import filelock

from optuna_hermes.errors import BrokerConflictError, BrokerError, DeviceSpecError

RUNTIME_DIR_VARIABLE = "OPTUNA_HERMES_RUNTIME_DIR"
START_SECONDS = 60.0
"""How long a broker may take to open its socket: a busy machine imports slowly."""

EXIT_BAD_INPUT = 2
EXIT_IN_OFFICE = 3
"""Exit statuses of a broker that could not start; 3: another one is at work."""

_MAX_SOCKET_PATH = 107


def runtime_dir() -> Path:
    """The private folder of lock, socket and log, made if missing.

    It is ``$OPTUNA_HERMES_RUNTIME_DIR``, or a folder in ``$XDG_RUNTIME_DIR``, or one of the user's
    own in the folder for temporary files.

    Raises:
        BrokerConflictError: it is a link, someone else's, or open to others.
        BrokerError: its path is too long for a socket.
    """
    path = _runtime_path().absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise BrokerConflictError(
            f"The runtime directory must be a real directory but {path} is not: remove it, or set "
            f"{RUNTIME_DIR_VARIABLE}."
        )
    check_private(path, status)
    if len(bytes(path / "broker.sock")) > _MAX_SOCKET_PATH:
        raise BrokerError(
            f"The socket's path may have {_MAX_SOCKET_PATH} bytes but {path / 'broker.sock'} is "
            f"longer: set {RUNTIME_DIR_VARIABLE} to a short path."
        )
    return path


def _runtime_path() -> Path:
    named = os.environ.get(RUNTIME_DIR_VARIABLE)
    if named:
        return Path(named)
    session = os.environ.get("XDG_RUNTIME_DIR")
    if session:
        return Path(session) / "optuna-hermes"
    return Path(tempfile.gettempdir()) / f"optuna-hermes-{os.getuid()}"


def check_private(path: Path, status: os.stat_result) -> None:
    """Refuse what belongs to someone else or is open to others.

    Raises:
        BrokerConflictError: with what to do.
    """
    if status.st_uid != os.getuid():
        raise BrokerConflictError(
            f"{path} must belong to you (uid {os.getuid()}) but belongs to uid {status.st_uid}: "
            f"set {RUNTIME_DIR_VARIABLE} to a folder of your own."
        )
    if status.st_mode & 0o077:
        raise BrokerConflictError(
            f"{path} must be closed to others but has mode {stat.S_IMODE(status.st_mode):04o}: "
            f"run `chmod go-rwx {path}`."
        )


def socket_path(directory: Path) -> Path:
    """Where the broker of this runtime directory listens."""
    return directory / "broker.sock"


def listening(directory: Path) -> bool:
    """Whether a broker's socket is there."""
    return socket_path(directory).exists()


def log_path(directory: Path) -> Path:
    """Where a broker that was started on demand writes what happens."""
    return directory / "broker.log"


class Office:
    """The broker's lock on a runtime directory: held until ``leave``, or until the process ends.

    Raises:
        BrokerConflictError: another broker holds it.
    """

    def __init__(self, directory: Path, devices: str) -> None:
        self._directory = directory
        self._lock = filelock.FileLock(directory / "broker.lock", timeout=0)
        try:
            self._lock.acquire()
        except filelock.Timeout as error:
            other = incumbent(directory) or {}
            raise BrokerConflictError(
                f"A broker (process {other.get('pid', 'unknown')}, devices "
                f"{other.get('devices', 'unknown')!r}) owns {directory} already: use it, or end it "
                "with `optuna-hermes broker --stop`."
            ) from error
        # Only the holder of the lock may do this: a socket that is left over is nobody's.
        socket_path(directory).unlink(missing_ok=True)
        card = directory / "broker.json"
        card.write_text(json.dumps({"pid": os.getpid(), "devices": devices}))

    def leave(self) -> None:
        """Give the office up: the socket goes first, the lock last."""
        socket_path(self._directory).unlink(missing_ok=True)
        (self._directory / "broker.json").unlink(missing_ok=True)
        self._lock.release()


def claim_devices(ids: Sequence[str]) -> list[filelock.BaseFileLock]:
    """Lock GPUs for this process's life: a broker with another runtime directory may not have them.

    CPU slots are no one thing that two could hold, and are not locked.

    Raises:
        BrokerConflictError: another broker of this user has one of them.
    """
    folder = Path(tempfile.gettempdir()) / f"optuna-hermes-devices-{os.getuid()}"
    claimed: list[filelock.BaseFileLock] = []
    for id_ in ids:
        if id_.startswith("cpu:"):
            continue
        folder.mkdir(mode=0o700, exist_ok=True)
        check_private(folder, folder.lstat())
        lock = filelock.FileLock(folder / f"{id_.replace('/', '_')}.lock", timeout=0)
        try:
            lock.acquire()
        except filelock.Timeout as error:
            raise BrokerConflictError(
                f"Device {id_} belongs to another broker of yours, in another runtime directory: "
                "end that one with `optuna-hermes broker --stop`, or leave the device out."
            ) from error
        claimed.append(lock)
    return claimed


def incumbent(directory: Path) -> dict[str, object] | None:
    """The card of the broker that holds the office, None if nobody does."""
    try:
        card = json.loads((directory / "broker.json").read_text())
    except (OSError, ValueError):
        return None
    return card if isinstance(card, dict) and _alive(card.get("pid")) else None


def start(directory: Path, devices: str) -> None:
    """Start a broker in the background and wait until it listens, or sees another in office.

    Raises:
        DeviceSpecError: it does not know the devices.
        BrokerError: it ended for another reason; the message is its own.
    """
    command = [sys.executable, "-m", "optuna_hermes.broker", "--background", "--devices", devices]
    with log_path(directory).open("ab") as log:
        begin = log.tell()
        try:
            status = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env={**os.environ, RUNTIME_DIR_VARIABLE: str(directory)},
                timeout=START_SECONDS,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired as error:
            raise BrokerError(
                f"The broker did not listen within {START_SECONDS:.0f} s: see "
                f"{log_path(directory)}."
            ) from error
    if status not in (0, EXIT_IN_OFFICE):
        words = _last_words(directory, begin)
        raise DeviceSpecError(words) if status == EXIT_BAD_INPUT else BrokerError(words)


def _last_words(directory: Path, begin: int) -> str:
    words = log_path(directory).read_bytes()[begin:].decode(errors="replace").strip()
    last = words.splitlines()[-1] if words else "it said nothing"
    return last.removeprefix("error: ")


def _alive(pid: object) -> bool:
    if not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
