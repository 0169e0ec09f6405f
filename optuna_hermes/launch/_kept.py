"""Launches on record: one file each, in the user's state folder."""

from __future__ import annotations

from pathlib import Path

import msgspec
import platformdirs

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.launch._base import Launch


def keep(launch: Launch) -> None:
    """Put a launch on record, in place of an earlier one of its name."""
    path = _path(launch.name)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(launch))


def kept(name: str) -> Launch:
    """The launch of this name.

    Raises:
        InvalidInputError: there is none on record.
    """
    try:
        return msgspec.json.decode(_path(name).read_bytes(), type=Launch)
    except FileNotFoundError:
        names = sorted(path.stem for path in _folder().glob("*.json"))
        known = f"there are {', '.join(names)}" if names else "this user has started none here"
        raise InvalidInputError(f"No launch {name!r} is on record: {known}.") from None
    except msgspec.MsgspecError as error:
        raise InvalidInputError(
            f"{_path(name)} cannot be read ({error}): remove it; the job itself is the engine's."
        ) from None


def _folder() -> Path:
    return platformdirs.user_state_path("optuna-hermes") / "launches"


def _path(name: str) -> Path:
    # A name may come from a command line: it is no path.
    return _folder() / f"{name.replace('/', '_')}.json"
