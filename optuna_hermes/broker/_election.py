"""Election of the broker of this host and user: a lock held for life in a private folder."""

from __future__ import annotations

import functools
import json
import os
import stat
import tempfile
from pathlib import Path

import filelock

from optuna_hermes._surroundings import job_label
from optuna_hermes.broker._holders import boot, started
from optuna_hermes.broker._privacy import (
    check_private,
    open_private,
    private_folder,
    read_private,
    write_private,
)
from optuna_hermes.errors import BrokerConflictError, BrokerError

RUNTIME_DIR_VARIABLE = "OPTUNA_HERMES_RUNTIME_DIR"

EXIT_BAD_INPUT = 2
EXIT_LOCKED = 3
EXIT_CONFLICT = 4
"""Exit statuses of a broker that could not start; 3: another one is at work here."""

_MAX_SOCKET_PATH = 107
WAY_OUT = f"set {RUNTIME_DIR_VARIABLE} to a folder of your own"


def runtime_dir() -> Path:
    """The private folder of lock, socket and log, made if missing.

    It is ``$OPTUNA_HERMES_RUNTIME_DIR``, or a folder in ``$XDG_RUNTIME_DIR``, or one of the user's
    own in the folder for temporary files. There each job of SLURM has one of its own: jobs that
    share a node have devices of their own, and so brokers.

    Raises:
        BrokerConflictError: see ``private_folder``.
        BrokerError: its path is too long for a socket.
    """
    path = private_folder(_runtime_path().absolute(), WAY_OUT)
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
    session, label = os.environ.get("XDG_RUNTIME_DIR"), job_label(os.environ)
    of_job = "" if label is None else f"-{label}"
    # A session's folder comes with a login and goes with it, while a job's processes go on.
    if session and label is None and _is_ours(session):
        return Path(session) / "optuna-hermes"
    return Path(tempfile.gettempdir()) / f"optuna-hermes-{os.getuid()}{of_job}"


@functools.cache
def _is_ours(session: str) -> bool:
    """True if a session's folder is this user's: after ``su`` it is that of the first user.

    It is looked at once: a process and those it has started keep to one runtime directory.
    """
    try:
        return os.stat(session).st_uid == os.getuid()
    except OSError:
        return False


def socket_path(directory: Path) -> Path:
    """Path of the socket of this runtime directory's broker."""
    return directory / "broker.sock"


def check_socket(directory: Path) -> None:
    """Refuse a socket that is not this user's alone.

    Raises:
        BrokerConflictError: with what to do.
        FileNotFoundError: there is none.
    """
    check_private(socket_path(directory), stat.S_IFSOCK, WAY_OUT)


def log_path(directory: Path) -> Path:
    """Path of the log of a broker that was started on demand."""
    return directory / "broker.log"


def lock(path: Path, timeout: float) -> filelock.BaseFileLock:
    """A lock on a file of this user alone, not taken yet.

    Raises:
        BrokerConflictError: the file is not this user's alone.
    """
    os.close(open_private(path, os.O_RDWR | os.O_CREAT, WAY_OUT))
    return filelock.FileLock(path, timeout=timeout, mode=0o600)


class RuntimeLockedError(BrokerConflictError):
    """Another broker holds this runtime directory."""


class RuntimeLock:
    """The broker's lock on a runtime directory: held until ``release``, or until the process ends.

    Raises:
        RuntimeLockedError: another broker holds it.
        BrokerConflictError: its lock is not this user's alone.
    """

    def __init__(self, directory: Path, devices: str) -> None:
        self._directory = directory
        self._lock = lock(directory / "broker.lock", timeout=0)
        try:
            self._lock.acquire()
        except filelock.Timeout as error:
            other = holder_card(directory) or {}
            raise RuntimeLockedError(
                f"A broker (process {other.get('pid', 'unknown')}, devices "
                f"{other.get('devices', 'unknown')!r}) owns {directory} already: use it, or end it "
                "with `optuna-hermes broker --stop`."
            ) from error
        # Only the holder of the lock may do this: a socket that is left over is a dead broker's.
        socket_path(directory).unlink(missing_ok=True)
        write_private(directory / "broker.json", json.dumps(_card(devices)))

    def release(self) -> None:
        """Release the lock, after the socket is gone."""
        socket_path(self._directory).unlink(missing_ok=True)
        (self._directory / "broker.json").unlink(missing_ok=True)
        self._lock.release()


def holder_card(directory: Path) -> dict[str, object] | None:
    """Card of the broker that holds the lock, None if there is none."""
    try:
        card = json.loads(read_private(directory / "broker.json", WAY_OUT))
    except (OSError, ValueError):
        return None
    return card if isinstance(card, dict) and _alive(card) else None


def _card(devices: str) -> dict[str, object]:
    """Card of a broker that this process is: its process id may be another one's later."""
    pid = os.getpid()
    return {"pid": pid, "started": started(pid), "boot": boot(), "devices": devices}


def _alive(card: dict[str, object]) -> bool:
    """True if the process that wrote a card has not ended."""
    pid = card.get("pid")
    if not isinstance(pid, int) or card.get("boot") != boot():
        return False
    return 0 < started(pid) == card.get("started")
