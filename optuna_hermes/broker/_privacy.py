"""Private folders, files and sockets of one user: made so, and refused where they are not.

Every refusal is a ``BrokerConflictError`` that says what is wrong and what to do.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from pathlib import Path

from optuna_hermes.errors import BrokerConflictError

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFREG: "a file",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a symbolic link",
}


def private_folder(path: Path, way_out: str) -> Path:
    """Return a folder that no other user can enter or replace, made if missing.

    Args:
        way_out: what its user can do if that place cannot be used.

    Raises:
        BrokerConflictError: it is a link or a file, someone else's, open to others, or cannot be
            made; or others could put their own in its place.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_above(path, way_out)
        with contextlib.suppress(FileExistsError):  # whatever it is, it is looked at
            path.mkdir(mode=0o700)
        check_private(path, stat.S_IFDIR, way_out)
    except OSError as error:
        raise BrokerConflictError(
            f"The directory {path} cannot be used ({error.filename}: {error.strerror}): {way_out}."
        ) from error
    return path


def check_private(path: Path, kind: int, way_out: str) -> None:
    """Refuse what is of another kind, belongs to someone else, or is open to others.

    Links are not followed.

    Args:
        kind: ``stat.S_IFDIR``, ``S_IFSOCK``, or ``S_IFREG`` in a folder that is closed to others.
        way_out: what its user can do besides removing it.

    Raises:
        BrokerConflictError: with what to do.
        OSError: it is not there.
    """
    _check(path, path.lstat(), kind, way_out)


def open_private(path: Path, flags: int, way_out: str) -> int:
    """Open a file of this user alone, made if the flags say so; links are not followed.

    Raises:
        BrokerConflictError: it is a link, no file, or someone else's.
        OSError: it cannot be opened.
    """
    if path.is_symlink():  # the kernel would only say "too many levels"
        check_private(path, stat.S_IFREG, way_out)
    # A pipe in its place must not hold the process up.
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    try:
        _check(path, os.fstat(handle), stat.S_IFREG, way_out)
    except BaseException:
        os.close(handle)
        raise
    return handle


def read_private(path: Path, way_out: str) -> str:
    """Return the text of a file of this user alone.

    Raises:
        BrokerConflictError: see ``open_private``.
        OSError: it cannot be read.
    """
    with os.fdopen(open_private(path, os.O_RDONLY, way_out), encoding="utf-8") as file:
        return file.read()


def write_private(path: Path, text: str) -> None:
    """Write a file of this user alone, whole or not at all; only one process may.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(partial, path)


def peer(sock: socket.socket) -> tuple[int, int]:
    """Process id and user id of a socket's other end, from the kernel."""
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, uid


def _check(path: Path, status: os.stat_result, kind: int, way_out: str) -> None:
    found = stat.S_IFMT(status.st_mode)
    if found != kind:
        raise BrokerConflictError(
            f"{path} must be {_KINDS[kind]} but is {_KINDS.get(found, 'something else')}: "
            f"remove it, or {way_out}."
        )
    if status.st_uid != os.getuid():
        raise BrokerConflictError(
            f"{path} must belong to you (uid {os.getuid()}) but belongs to uid {status.st_uid}: "
            f"{way_out}."
        )
    if kind != stat.S_IFREG and status.st_mode & 0o077:  # a file is behind its folder
        raise BrokerConflictError(
            f"{path} must be closed to others but has mode {stat.S_IMODE(status.st_mode):04o}: "
            f"run `chmod go-rwx {path}`."
        )


def _check_above(path: Path, way_out: str) -> None:
    """Refuse a path if others may rename what is in a folder above: it is writable, not sticky."""
    above = path.parent.resolve()
    for folder in (above, *above.parents):
        mode = folder.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise BrokerConflictError(
                f"{path} could be replaced by anyone, for {folder} has mode "
                f"{stat.S_IMODE(mode):04o}: run `chmod +t {folder}`, or {way_out}."
            )
