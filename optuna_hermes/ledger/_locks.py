"""Locks beside a ledger that is a file: one broker at a time keeps a study there."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import final

import filelock

from optuna_hermes.errors import LedgerError


@final
class StudyLocks:
    """The studies of a file that this process keeps to itself, until it ends.

    Args:
        file: the ledger's.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._locks: dict[str, filelock.BaseFileLock] = {}

    def lock(self, study: str) -> None:
        """Keep other processes from a study, by its key; twice is no error.

        Raises:
            LedgerError: another process has it.
        """
        if study in self._locks:
            return
        folder = Path(f"{self._file}.hermes")
        # A folder that cannot be written to, or locked in, is no reason not to train.
        with contextlib.suppress(OSError, NotImplementedError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = filelock.FileLock(
                folder / f"{study}.lock",
                timeout=0,
                mode=0o600,
                thread_local=False,
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
        """Let other processes have a study; one that is not locked is no error."""
        lock = self._locks.pop(study, None)
        if lock is not None:
            lock.release()

    def close(self) -> None:
        """Let other processes have them all."""
        for study in tuple(self._locks):
            self.unlock(study)
