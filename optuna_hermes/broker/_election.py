"""Election of the broker of this host and user: a lock held for life in a private folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import socket
import stat
import tempfile
import zlib
from pathlib import Path

import filelock

from optuna_hermes._job_environment import host_name, job_label
from optuna_hermes.broker._holders import boot, started
from optuna_hermes.broker._privacy import (
    check_private,
    open_private,
    peer,
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
_NAMED = ("TMPDIR", "TEMP", "TMP")
_PLACES = ("/tmp", "/var/tmp", "/usr/tmp")
"""Variables that name Python's folder for temporary files, and the places that it tries after them.

After these it tries the working directory.
"""
WAY_OUT = f"set {RUNTIME_DIR_VARIABLE} to a folder of your own"


def runtime_dir() -> Path:
    """The private folder of lock, socket and log, made if missing.

    It is ``$OPTUNA_HERMES_RUNTIME_DIR``, or one of the user's own in the folder for temporary
    files, or in ``/tmp`` where a socket's path would be too long there. Each job of SLURM has one
    of its own: jobs that share a node have devices of their own, and so brokers.

    Raises:
        BrokerConflictError: see ``private_folder``.
        BrokerError: its path is too long for a socket, or there is no folder for temporary files.
    """
    path = private_folder(_runtime_path().absolute(), WAY_OUT)
    if _is_long(path):
        raise BrokerError(
            f"The socket's path may have {_MAX_SOCKET_PATH} bytes but {path / 'broker.sock'} is "
            f"longer: set {RUNTIME_DIR_VARIABLE} to a short path."
        )
    return path


def _runtime_path() -> Path:
    named = os.environ.get(RUNTIME_DIR_VARIABLE)
    if named:
        return Path(named)
    label = job_label(os.environ)
    of_job = "" if label is None else f"-{label}"
    name, host = f"optuna-hermes-{os.getuid()}{of_job}", host_name()
    # Not $XDG_RUNTIME_DIR: it goes with the last login, while what nohup has started goes on, and
    # a cron job has none, which is to find the same broker.
    places = [os.path.normpath(each) for each in (*map(os.environ.get, _NAMED), *_PLACES) if each]
    with contextlib.suppress(FileNotFoundError):  # it may have been removed
        places.append(os.getcwd())
    try:
        place = tempfile.gettempdir()
    except FileNotFoundError as error:
        found = _at_work(name, host, tuple(places))
        if found is None:
            raise BrokerError(
                f"No folder for temporary files can be written: {WAY_OUT}."
            ) from error
        return found
    # A script may have chosen another one.
    passed_over = places[: places.index(place)] if place in places else ()
    path = _in(place, name, host)
    if _is_long(path):  # as in a job's folder below a long path; each job has a broker of its own
        path = Path(_PLACES[0], f"{path.name}-{zlib.crc32(os.fsencode(place)):08x}")
    return _at_work(name, host, tuple(passed_over)) or path


def _is_long(directory: Path) -> bool:
    return len(bytes(socket_path(directory))) > _MAX_SOCKET_PATH


@functools.cache  # a process keeps to its broker
def _at_work(name: str, host: str, places: tuple[str, ...]) -> Path | None:
    """Path of a broker in a place that cannot be written now, as where its disk is full."""
    paths = [_in(place, name, host) for place in places]
    return next((path for path in paths if holder_card(path) is not None), None)


def _in(place: str, name: str, host: str) -> Path:
    # $TMPDIR may be a folder that several hosts share.
    of_host = "" if place == _PLACES[0] else f"-{zlib.crc32(host.encode()):08x}"
    return Path(place, f"{name}{of_host}")


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

    It is a lock on a file, and a name in the kernel: a file may be removed, and then another broker
    could lock a new one.

    Raises:
        RuntimeLockedError: another broker holds it.
        BrokerConflictError: its lock is not this user's alone.
    """

    def __init__(self, directory: Path, devices: str) -> None:
        self._directory = directory
        self._card = json.dumps(_card(devices))
        self._name = _take_name(directory)
        try:
            self._file = self._take_file()
        except BaseException:
            if self._name is not None:
                self._name.close()
            raise
        self._begin()

    @property
    def has_files(self) -> bool:
        """False if the lock's file, or the card, is no longer in the directory."""
        return self._has_lock_file and (self._directory / "broker.json").exists()

    def restore(self) -> None:
        """Make the directory and its files again, but not the socket.

        Raises:
            BrokerConflictError: that is not possible.
            OSError: likewise.
        """
        private_folder(self._directory, WAY_OUT)
        if not self._has_lock_file:
            before, self._file = self._file, self._take_file()
            os.close(before)
        self._begin()

    def release(self) -> None:
        """Release the lock, after the socket is gone."""
        socket_path(self._directory).unlink(missing_ok=True)
        (self._directory / "broker.json").unlink(missing_ok=True)
        os.close(self._file)
        if self._name is not None:
            self._name.close()

    @property
    def _has_lock_file(self) -> bool:
        return is_at(os.fstat(self._file), self._directory / "broker.lock")

    def _take_file(self) -> int:
        path = self._directory / "broker.lock"
        file = open_private(path, os.O_RDWR | os.O_CREAT, WAY_OUT)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            if not isinstance(error, BlockingIOError):
                raise
            raise _locked(self._directory) from error
        return file

    def _begin(self) -> None:
        # Only the holder of the lock may do this: a socket that is left over is a dead broker's.
        socket_path(self._directory).unlink(missing_ok=True)
        write_private(self._directory / "broker.json", self._card)


def is_at(status: os.stat_result, path: Path) -> bool:
    """True if what has this status, and is open, is still found at a path."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (status.st_dev, status.st_ino)


def _locked(directory: Path) -> RuntimeLockedError:
    other = holder_card(directory) or {}
    return RuntimeLockedError(
        f"A broker (process {other.get('pid', 'unknown')}, devices "
        f"{other.get('devices', 'unknown')!r}) owns {directory} already: use it, or end it "
        "with `optuna-hermes broker --stop`."
    )


def _take_name(directory: Path) -> socket.socket | None:
    """Take the name of a directory in the kernel; None if another user has it, to be in the way.

    Raises:
        RuntimeLockedError: another broker has it.
    """
    name = _kernel_name(directory)
    taken = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        taken.bind(name)
        taken.listen()  # the kernel tells a client that connects whose it is
    except OSError as error:
        taken.close()
        if error.errno != errno.EADDRINUSE:
            raise
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.setblocking(False)
            with contextlib.suppress(OSError):  # it has just ended, or is asked by many
                client.connect(name)
                if peer(client)[1] != os.getuid():
                    return None
        raise _locked(directory) from error
    return taken


def _kernel_name(directory: Path) -> str:
    """Name of a directory; with a null byte in front it is the kernel's own, and no file."""
    import hashlib  # few processes are brokers

    # In another container the same path is another folder.
    try:
        container = os.stat("/proc/self/ns/mnt").st_ino
    except OSError:
        container = 0
    whole = f"{os.getuid()}/{container}/".encode() + os.fsencode(directory)
    return f"\0optuna-hermes/{hashlib.sha256(whole).hexdigest()}"


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
