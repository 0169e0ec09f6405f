"""Checkpoints in a bucket or another store with a URL, by fsspec: the one module that imports it.

A checkpoint there is a whole object: it has its name only once all of it is there.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from optuna_hermes.errors import (
    CheckpointError,
    CheckpointUnreachableError,
    InvalidInputError,
    UnwritableError,
    sentence,
)

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # a ``Path`` has lost one of its slashes
_FLAT = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "adl"})
"""Protocols without folders: to make one there could make a bucket."""

_S3 = {"config_kwargs": {"connect_timeout": 5, "retries": {"max_attempts": 1}}}
"""Whoever writes a checkpoint tries again itself, and must not wait for long when it is told to."""

STORE_AWAY_SECONDS = 120.0
"""Time for which a store may be away while a checkpoint is read."""
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 10.0

_NO_PLACE = (errno.EROFS, errno.ENOSPC, errno.EDQUOT)
"""Errors of the local copy that would last longer than a read waits."""

_log = logging.getLogger("optuna_hermes.suspend")

PARTIAL = ".fetched"
"""Suffix of a file that is not whole yet."""


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """A file in a store, changed last at ``changed`` (Unix time)."""

    url: str
    size_bytes: int
    changed: float


def is_url(place: str | Path) -> bool:
    """True if a place is a URL and no path."""
    return _URL.match(str(place)) is not None


def check_url(place: str | Path, *, here: bool = True) -> None:
    """Refuse a URL that cannot hold checkpoints for other processes.

    ``here``: this host uses it, thus one that needs a package which is missing is refused too.

    Raises:
        InvalidInputError: with what to do instead.
    """
    url = str(place)
    protocol, separator, rest = url.partition("://")
    # Shown without what follows: there may be a password in it.
    name = f"checkpoint_dir, a URL of {protocol.partition(':')[0]},"
    host = rest.rpartition("@")[0]
    if not separator or not rest.strip("/"):
        raise InvalidInputError(f"{name} must be like s3://BUCKET/FOLDER: give it as a str.")
    if ":" in host or "?" in rest or "#" in rest or "::" in url:
        raise InvalidInputError(
            f"{name} must hold no password and no options: checkpoints are named by it in the "
            "ledger. Give them to fsspec by the store's environment variables or ~/.config/fsspec."
        )
    if protocol == "memory":
        raise InvalidInputError(f"{name} must be seen by other processes: give a folder or bucket.")
    if not here:
        return
    try:
        import fsspec

        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise InvalidInputError(
            f"{name} needs a package that is not installed ({error}): run `pip install "
            "'optuna-hermes[remote]'` for S3, or install that of another store."
        ) from error
    except ValueError as error:
        raise InvalidInputError(f"{name} must be of a kind that fsspec knows: {error}.") from error


def why_unwritable(url: str) -> str | None:
    """The reason why nothing can be written there, with a way out; None if something can."""
    probe = f"{url}/probe-{uuid.uuid4().hex}"
    try:
        with _writable(url) as store:
            _make_folder(store, url)
            store.pipe_file(probe, b"checkpoint")
            store.rm_file(probe)
    except UnwritableError as error:
        return str(error)
    return None


def put(path: Path, url: str) -> None:
    """Upload a file.

    Raises:
        UnwritableError: the store is away, or does not take it.
    """
    with _writable(url) as store:
        _make_folder(store, url.rpartition("/")[0])
        store.put_file(str(path), url)


def get(url: str, path: Path) -> None:
    """Download a file, which has its name only when it is whole.

    A store that does not answer is asked again for ``STORE_AWAY_SECONDS``: else an older checkpoint
    would be taken, or the study would end for want of one.

    Raises:
        CheckpointUnreachableError: it cannot be reached, is not for this user, or does not fit
            here.
        CheckpointError: it is not there.
    """
    until, pause = time.monotonic() + STORE_AWAY_SECONDS, _PAUSE_SECONDS
    while True:
        try:
            _download(url, path)
            return
        except Exception as error:
            problem = f"Checkpoint {url} cannot be read: {sentence(error)}"
            if isinstance(error, FileNotFoundError):
                raise CheckpointError(problem) from error
            if _lasts(error) or time.monotonic() + pause > until:
                raise CheckpointUnreachableError(problem) from error
            if pause == _PAUSE_SECONDS:
                _log.warning(
                    "waits for checkpoint %s, which cannot be read: %s", url, sentence(error)
                )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _lasts(error: Exception) -> bool:
    """True if waiting is of no use: another host, or user, might read the file."""
    return isinstance(error, PermissionError) or getattr(error, "errno", None) in _NO_PLACE


def _download(url: str, path: Path) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _store(url).get_file(url, str(partial))
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def exists(url: str) -> bool:
    """True if a file is there.

    Raises:
        CheckpointError: the store cannot be reached.
    """
    try:
        store = _store(url)
        store.invalidate_cache()
        return bool(store.exists(url))
    except Exception as error:
        raise CheckpointError(f"Checkpoint {url} cannot be read: {sentence(error)}") from error


def remove(url: str) -> None:
    """Remove a file, if it is there.

    Raises:
        UnwritableError: it cannot be removed.
    """
    with _writable(url) as store, contextlib.suppress(FileNotFoundError):
        store.rm_file(url)


def files(url: str) -> Iterator[RemoteFile]:
    """The files below a URL, at any depth.

    Raises:
        UnwritableError: the store cannot be reached.
    """
    with _writable(url) as store:
        store.invalidate_cache()  # others write there, too
        found = store.find(url, detail=True)
        top = store._strip_protocol(url).rstrip("/")
    for name, info in found.items():
        below = name[len(top) :]
        if name.startswith(f"{top}/"):
            yield RemoteFile(url=url + below, size_bytes=info["size"], changed=_changed(info))


def _store(url: str) -> Any:
    import fsspec

    protocol = url.partition("://")[0]
    mine = _S3 if protocol in ("s3", "s3a") and not fsspec.config.conf.get("s3") else {}
    # The cache of instances is fsspec's own, by thread and process.
    return fsspec.filesystem(protocol, **mine) if mine else fsspec.core.url_to_fs(url)[0]


def _make_folder(store: Any, url: str) -> None:
    if url.partition("://")[0] not in _FLAT:
        store.makedirs(url, exist_ok=True)


def _changed(info: dict[str, Any]) -> float:
    for key in ("mtime", "LastModified", "last_modified", "updated", "created"):
        value = info.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):  # of Google's store
            with contextlib.suppress(ValueError):  # Python 3.10 reads 3 or 6 digits after a point
                return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
    return float("inf")  # of unknown age: never old enough to be removed


@contextlib.contextmanager
def _writable(url: str) -> Iterator[Any]:
    """The store of a URL.

    Raises:
        UnwritableError: in place of any error within, as each store has errors of its own.
    """
    try:
        yield _store(url)
    except Exception as error:
        raise UnwritableError(
            f"Cannot write into {url}: {sentence(error)} Bring that store back, let this user "
            "write there, or give another checkpoint_dir."
        ) from error
