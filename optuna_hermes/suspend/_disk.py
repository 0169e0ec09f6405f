"""Checkpoints on disk: a file is there whole or not at all, and a damaged one is never used."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import IO

from optuna_hermes.errors import CheckpointError
from optuna_hermes.suspend._base import StoredState

_SUFFIX = ".ckpt"
_PARTIAL = ".partial"
_CHUNK_BYTES = 1 << 20


def write(
    folder: Path,
    *,
    units: int,
    save: Callable[[IO[bytes]], object],
    known: Collection[StoredState] = (),
) -> StoredState:
    """Write a checkpoint that survives a crash at any moment, and forget those it has outlived.

    Args:
        folder: this run's own folder.
        units: units the run has reported.
        save: writes the checkpoint into the file it is given, from front to back.
        known: what the ledger names. It stays, and so does all that is newer, for the ledger may
            not hear of it before everything dies.

    Raises:
        CheckpointError: the file system refused; what was there before is still there.
    """
    number = 1 + max((_number(path) for path in _files(folder)), default=0)
    path = folder.absolute() / f"{number:06d}-unit-{units}{_SUFFIX}"
    partial = path.with_suffix(_PARTIAL)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        size, digest = _write_through(partial, save)
        os.replace(partial, path)
        _sync_folder(folder)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CheckpointError(
            f"Cannot write checkpoint {path}: {error.strerror or error}. Make room there."
        ) from error
    _tidy(folder, {state.path for state in known})
    return StoredState(path=path, units=units, size_bytes=size, sha256=digest)


def verify(state: StoredState, run: str) -> None:
    """Read a checkpoint and compare it with what was written.

    Args:
        state: what was written.
        run: whose it is, as the message should name it.

    Raises:
        CheckpointError: it is missing, cut short or damaged.
    """
    try:
        size, digest = state.path.stat().st_size, _digest(state.path)
    except OSError as error:
        raise CheckpointError(
            f"Checkpoint {state.path} of {run} cannot be read: {error.strerror or error}."
        ) from error
    if size != state.size_bytes:
        raise CheckpointError(
            f"Checkpoint {state.path} of {run} must have {state.size_bytes} bytes but has {size}."
        )
    if digest != state.sha256:
        raise CheckpointError(
            f"Checkpoint {state.path} of {run} is damaged: its SHA-256 must be {state.sha256} but "
            f"is {digest}."
        )


def newest_good(states: Sequence[StoredState], run: str) -> StoredState | None:
    """The newest checkpoint that can be read; None only if there is none at all.

    Args:
        states: newest first.
        run: whose they are, as a message should name it.

    Raises:
        CheckpointError: there are checkpoints, but all are damaged.
    """
    problems: list[CheckpointError] = []
    for state in states:
        try:
            verify(state, run)
        except CheckpointError as error:
            problems.append(error)
            continue
        if problems:
            warnings.warn(
                f"{problems[0]} Going on from {state.path.name}, after unit {state.units}.",
                RuntimeWarning,
                stacklevel=2,
            )
        return state
    if problems:
        raise CheckpointError(
            f"No checkpoint of {run} can be used, and it is not started again in silence: "
            + " ".join(str(problem) for problem in problems)
        ) from problems[0]
    return None


class _Hashing:
    """A file that knows the digest of all that was written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        self.size += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def _write_through(path: Path, save: Callable[[IO[bytes]], object]) -> tuple[int, str]:
    with path.open("wb") as file:
        hashing = _Hashing(file)
        save(hashing)  # type: ignore[arg-type]  # it writes and flushes, nothing else
        file.flush()
        os.fsync(file.fileno())
    return hashing.size, hashing.hexdigest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _tidy(folder: Path, known: Collection[Path]) -> None:
    newest_known = max((_number(path) for path in known), default=0)
    for path in _files(folder):
        if _number(path) < newest_known and path not in known:
            path.unlink(missing_ok=True)
    for path in folder.glob(f"*{_PARTIAL}"):  # of a process that was killed while writing
        path.unlink(missing_ok=True)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.glob(f"*-unit-*{_SUFFIX}") if path.name[:6].isdigit()]


def _number(path: Path) -> int:
    # Not the time of the file: clocks are set back.
    return int(path.name.split("-", 1)[0])


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
