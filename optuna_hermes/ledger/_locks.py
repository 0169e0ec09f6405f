"""File locks beside an SQLite ledger: one broker at a time trains a study of a file."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import final

import filelock

from optuna_hermes.errors import LedgerError


@final
class StudyLocks:
    """The locks that this process holds on studies of a ledger's file, until it ends."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._locks: dict[str, filelock.BaseFileLock] = {}

    def lock(self, study: str) -> None:
        """Lock a study, by its key, against other processes; twice is no error.

        Raises:
            LedgerError: another process has it.
        """
        if study in self._locks:
            return
        folder = Path(f"{self._file}.hermes")
        # Training goes on without a lock in a read-only folder, or where locks are not supported.
        with contextlib.suppress(OSError, NotImplementedError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = filelock.FileLock(
                folder / f"{study}.lock",
                timeout=0,
                mode=0o600,
                thread_local=False,  # the thread that unlocks may be another one
                is_singleton=True,  # one file may have two URLs
            )
            try:
                lock.acquire()
            except filelock.Timeout as error:
                raise LedgerError(
                    f"A study in a file has one broker at a time, and another one trains it in "
                    f"{self._file}: use the same runtime directory "
                    "($OPTUNA_HERMES_RUNTIME_DIR), or keep a study of several hosts in PostgreSQL "
                    "or MySQL."
                ) from error
            self._locks[study] = lock

    def unlock(self, study: str) -> None:
        """Unlock a study; one that is not locked is no error."""
        lock = self._locks.pop(study, None)
        if lock is not None:
            lock.release()

    def close(self) -> None:
        """Unlock all studies."""
        for study in tuple(self._locks):
            self.unlock(study)
