"""Name by which other hosts know the broker of a runtime directory."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def instance_in(directory: Path, host: str) -> str:
    """Return the name of a directory's broker: made by the first one, kept by the next ones.

    A directory has one broker at a time, which holds its lock: so what the one before had is the
    next one's, and no broker of another directory or host ever has the name.

    Args:
        directory: the runtime directory.
        host: this host's name, for people who read it.

    Raises:
        OSError: the file system refuses.
    """
    path = directory / "instance"
    if not path.exists():
        partial = path.with_suffix(".new")
        with open(partial, "w", opener=_for_its_user) as file:
            file.write(f"{host[:64]}-{uuid.uuid4().hex[:16]}")
        partial.replace(path)  # as a whole or not at all
    return path.read_text()


def _for_its_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
