"""File locks beside an SQLite ledger: one broker at a time trains a study of a file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from pathlib import Path
from typing import final

import filelock

from optuna_hermes.errors import LedgerError

UNLOCK_SECONDS = 6.0
"""Time in which a broker that ends, or serves a study no longer, has unlocked it."""

# Another process may look at this moment: see ``is_locked``.
_POLL_SECONDS = 0.5

_held: set[tuple[int, int]] = set()
"""Device and inode of each file that this process has locked: a renamed file keeps them."""


@final
class StudyLocks:
    """The locks that this process holds on studies of a ledger's file, until it ends."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._locks: dict[str, tuple[filelock.BaseFileLock, tuple[int, int]]] = {}

    def lock(self, study: str, wait_seconds: float = _POLL_SECONDS) -> None:
        """Lock a study, by its key, against other processes; twice is no error.

        Raises:
            LedgerError: another process has it, for all this time, or the lock is another user's.
        """
        if study in self._locks:
            return
        path = self._path(study)
        # Training goes on without a lock in a read-only folder, or where locks are not supported.
        with contextlib.suppress(OSError, NotImplementedError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = filelock.FileLock(
                path,
                mode=self._mode(),
                thread_local=False,  # the thread that unlocks may be another one
                is_singleton=True,  # one file may have two URLs
            )
            try:
                lock.acquire(timeout=wait_seconds)
            except PermissionError as error:
                if _is_missing(path):
                    raise  # nobody has it
                raise LedgerError(
                    f"{path} cannot be locked: it is of another user, who may train the study. "
                    "Let that user go on with it, or give you write permission for that file too."
                ) from error
            except filelock.Timeout as error:
                if _number(path) in _held:
                    raise LedgerError(
                        f"This host's broker has the study in {self._file} open under another "
                        "path, as one that was moved while it trained: end it with `optuna-hermes "
                        "broker --stop`, then run the same command again."
                    ) from error
                raise LedgerError(
                    f"A study in a file has one broker at a time, and another one trains it in "
                    f"{self._file}: use the same runtime directory "
                    "($OPTUNA_HERMES_RUNTIME_DIR), or keep a study of several hosts in PostgreSQL "
                    "or MySQL."
                ) from error
            self._locks[study] = lock, _number(path)
            _held.add(_number(path))

    def is_locked(self, study: str, wait_seconds: float = 0.0) -> bool:
        """True if another process has locked a study, for all this time; it stays as it is."""
        path = self._path(study)
        if study in self._locks:
            return False
        try:
            path.stat()  # locking would create it
        except PermissionError:  # its folder is another user's, who may train
            return True
        except OSError:
            return False
        if not os.access(path, os.W_OK):
            return _is_locked_to_read(path)
        try:
            self.lock(study, wait_seconds)
        except LedgerError:
            return True
        self.unlock(study)
        return False

    def unlock(self, study: str) -> None:
        """Unlock a study; one that is not locked is no error."""
        if study in self._locks:
            lock, number = self._locks.pop(study)
            _held.discard(number)
            lock.release()
            # The file of several studies has another name.
            if Path(self._file).stem == study and _mark(self._file).exists():
                remove_ledger(self._file, study)

    def close(self) -> None:
        """Unlock all studies."""
        for study in tuple(self._locks):
            self.unlock(study)

    def _mode(self) -> int:
        """Permissions of a lock: those of the ledger's file, as who writes there may train."""
        try:
            return stat.S_IMODE(os.stat(self._file).st_mode) & 0o666
        except OSError:
            return 0o600

    def _path(self, study: str) -> Path:
        return Path(f"{self._file}.hermes", f"{study}.lock")


def remove_ledger(file: str, study: str) -> bool:
    """Remove a ledger in a file of its own, of a study that is over.

    Returns:
        False if another process has the study locked, which removes the file when it unlocks it.
    """
    with contextlib.suppress(OSError):
        if not os.path.exists(file):
            return True
        mark, locks = _mark(file), StudyLocks(file)
        mark.parent.mkdir(mode=0o700, exist_ok=True)
        mark.touch()  # first of all: who unlocks the study after this sees it
        try:
            locks.lock(study, 0.0)
        except LedgerError:
            return False
        for path in (mark, Path(file), Path(f"{file}-journal")):
            path.unlink(missing_ok=True)
        shutil.rmtree(mark.parent, ignore_errors=True)
        locks.close()
    return True


def _is_missing(path: Path) -> bool:
    """True if there is no such file; False also if its folder is another user's."""
    try:
        path.stat()
    except PermissionError:
        return False
    except OSError:
        return True
    return False


def _is_locked_to_read(path: Path) -> bool:
    """True if a file is locked that may only be read, or not even that."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:
        pass  # removed by now, or on a disk without locks
    return False


def _number(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _mark(file: str) -> Path:
    """The file that says of a ledger that its study is over."""
    return Path(f"{file}.hermes", "over")
