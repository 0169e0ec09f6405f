"""Launches on record: one file each, in the user's state folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import platformdirs

from optuna_hermes.errors import InvalidInputError, LaunchError
from optuna_hermes.launch._base import Launch, at_work
from optuna_hermes.launch._names import launcher

_ROOM = 16_384
"""Bytes of a record, at most."""


@contextlib.contextmanager
def record(name: str) -> Iterator[Callable[[Launch], None]]:
    """Make room for the record of a launch that begins inside the block.

    It yields what puts the launch on record, in place of an earlier one of its name; that raises
    ``LaunchError``, which names the job, if it cannot.

    Raises:
        InvalidInputError: no file can be written where launches are kept.
        LaunchError: the earlier one is at work, or its engine cannot be asked.
    """
    path = _path(name)
    new = path.with_suffix(".new")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new.write_bytes(bytes(_ROOM))  # of a quota, too
    except OSError as error:
        raise InvalidInputError(
            f"Launches are kept in {path.parent}, which cannot be written ({error.strerror}): make "
            "room there, or set XDG_STATE_HOME to another folder."
        ) from None

    def keep(launch: Launch) -> None:
        try:
            with new.open("r+b") as file:
                file.write(msgspec.json.encode(launch))
                file.truncate()
            new.replace(path)
        except OSError as error:
            raise LaunchError(
                f"{name!r} is started ({launch.launcher} {launch.id}), but not on record "
                f"({error.strerror}): end it by {launch.launcher}'s own command."
            ) from error

    try:
        if path.exists():
            _refuse_second(kept(name))
        yield keep
    finally:
        new.unlink(missing_ok=True)


def _refuse_second(earlier: Launch) -> None:
    """Refuse a launch whose record would replace that of a job at work, wherever that is."""
    place = f"{earlier.launcher} {earlier.place}".rstrip()
    try:
        is_at_work = launcher(earlier.launcher).is_at_work(earlier)
    except LaunchError as error:
        raise LaunchError(
            f"An earlier job {earlier.name!r} ({place}) may be at work: start another one by "
            f"--name, or remove {_path(earlier.name)} if it has ended. {error}"
        ) from error
    if is_at_work:
        raise at_work(earlier.name)


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
    except (OSError, msgspec.MsgspecError) as error:
        reason = getattr(error, "strerror", error)
        raise InvalidInputError(
            f"{_path(name)} cannot be read ({reason}): remove it; the job itself is the engine's."
        ) from None


def _folder() -> Path:
    return platformdirs.user_state_path("optuna-hermes") / "launches"


def _path(name: str) -> Path:
    # A name may come from a command line: it is no path.
    return _folder() / f"{name.replace('/', '_')}.json"
