"""Checkpoints on disk: a file is there whole or not at all, and a damaged one is never used.

A checkpoint is one safetensors file that any reader of that format opens: the tensors of the run
by number, and under ``tree`` the JSON text that puts them together (see ``_tree``). Its metadata
name the run and the version of all this. Torch and safetensors are imported inside the functions.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import tempfile
import threading
import warnings
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from optuna_hermes.errors import CheckpointError, SuspendError, UnwritableError
from optuna_hermes.model import TierName
from optuna_hermes.suspend._base import Held, State, StoredState, Tier
from optuna_hermes.suspend._safetensors import Content, digest
from optuna_hermes.suspend._tree import pack, unpack

if TYPE_CHECKING:
    import torch

_FORMAT = {"format": "optuna-hermes checkpoint", "version": "1"}
_TREE = "tree"
_SUFFIX = ".safetensors"
_PARTIAL = ".partial"
_LIBRARY_PARTIAL = ".tmp*"  # safetensors itself writes to such a name first
_BRING_BACK = (
    "Bring such a file back, or close the trial with `optuna-hermes tell --trial-number NUMBER "
    "--state fail`."
)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

T = TypeVar("T")
_Found = tuple[StoredState, Any, list[CheckpointError]]

_writing = threading.Lock()
"""A run may be suspended while a thread still writes its last unit: they number the same folder."""

_ahead: tuple[object, Future[_Found | None]] | None = None
"""What ``read_ahead`` was last asked for."""


class Disk(Tier):
    """A run waits in a file; its process may go.

    Args:
        folder: this run's own folder.
        known: the checkpoints that the ledger names, whose files must stay.
    """

    name: TierName = "disk"

    def __init__(self, folder: Path, known: Callable[[], Collection[StoredState]]) -> None:
        self._folder = folder
        self._known = known
        self._stored: tuple[StoredState, str] | None = None

    def suspend(self, state: State) -> Held:
        """See ``Tier``. What the run has in memory is its owner's to let go."""
        if not state.stores:
            raise SuspendError(
                f"{state.name.capitalize()} cannot be stored from here: suspend it in memory."
            )
        stored = write(
            self._folder, state.dump(), run=state.name, units=state.units, known=self._known()
        )
        self._stored = stored, state.name
        return Held(device_bytes=0, stored=stored)

    def resume(self) -> Any:
        """See ``Tier``; it may be resumed more than once."""
        if self._stored is None:
            raise CheckpointError(
                f"A run must be suspended into {self._folder} before it can be resumed from there."
            )
        return _load(*self._stored)


def write(
    folder: Path,
    tree: Any,
    *,
    run: str,
    units: int,
    known: Collection[StoredState] = (),
) -> StoredState:
    """Write a checkpoint that survives a crash at any moment, and forget those it has outlived.

    Args:
        folder: this run's own folder.
        tree: the state, as ``pack`` takes it; nobody may change it meanwhile.
        run: whose it is, as a message names it.
        units: units the run has reported.
        known: what the ledger names. It stays, and so does all that is newer, for the ledger may
            not hear of it before everything dies.

    Raises:
        CheckpointError: the tree holds what cannot be stored.
        UnwritableError: the file system has no room, or does not let this user write there.
    """
    tensors, text = pack(tree, run)
    tensors[_TREE] = _octets(text.encode("utf-8", "surrogatepass"))
    with _writing:
        path = _next_path(folder.absolute(), units)
        size, sha256 = _put(path, tensors, {**_FORMAT, "run": run})
        _tidy(folder, {state.path for state in known})
    return StoredState(path=path, units=units, size_bytes=size, sha256=sha256)


def read(
    states: Sequence[StoredState], run: str, folder: Path | None
) -> tuple[StoredState, Any] | None:
    """Read the newest checkpoint that is as it was written; None only if there is none at all.

    Args:
        states: newest first, as the ledger has them: where they say to lie is not believed.
        run: whose they are, as a message should name it.
        folder: this run's own folder, outside of which nothing is read; None if it has none.

    Returns:
        The checkpoint, and the tree that was written into it.

    Raises:
        CheckpointError: there are checkpoints, but none can be used.
    """
    global _ahead
    ahead, _ahead = _ahead, None
    if all(_is_in(folder, state) for state in states) and ahead and ahead[0] == _key(states, run):
        found = ahead[1].result()
    else:
        found = _search(states, run, folder)
    if found is None:
        return None
    state, tree, problems = found
    if problems:
        warnings.warn(
            f"{problems[0]} Going on from {state.path.name}, after unit {state.units}.",
            RuntimeWarning,
            stacklevel=2,
        )
    return state, tree


def read_ahead(states: Sequence[StoredState], run: str) -> None:
    """Begin on a thread what the next ``read`` will be asked for.

    If that is asked for something else, what was read here is dropped.
    """
    global _ahead
    folder = states[0].path.parent if states else None  # ``read`` will know whether that is right
    _ahead = _key(states, run), _on_thread(_search, tuple(states), run, folder)


def _key(states: Sequence[StoredState], run: str) -> object:
    # The process too: a thread does not survive a fork.
    return os.getpid(), run, [(state.path, state.sha256) for state in states]


def _on_thread(call: Callable[..., T], *args: Any) -> Future[T]:
    """Call a function on a thread that no exit of the process waits for."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call(*args))
        except BaseException as error:  # it is raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=work, name="hermes-disk", daemon=True).start()
    return future


# -- writing -----------------------------------------------------------------------------------


def _next_path(folder: Path, units: int) -> Path:
    number = 1 + max((_number(path) for path in _files(folder)), default=0)
    return folder / f"{number:06d}-unit-{units}{_SUFFIX}"


def _put(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> tuple[int, str]:
    """Let the file appear whole; size and SHA-256."""
    from safetensors import SafetensorError

    partial = path.with_suffix(_PARTIAL)
    if path.parent.is_symlink():
        raise UnwritableError(f"{path.parent} must be a folder, not a link: remove the link.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if partial.is_symlink():  # it would lead elsewhere
            partial.unlink()
        written = _write_through(partial, tensors, metadata)
        os.replace(partial, path)
        try:
            _sync_folder(path.parent)
        except OSError:  # nobody will be told of it: it must not take the room of others
            _remove(path)
            raise
    except (OSError, SafetensorError) as error:
        number = _system_number(error)
        kind = CheckpointError if number is None else UnwritableError
        reason = getattr(error, "strerror", None) or error
        raise kind(f"Cannot write checkpoint {path}: {reason}. {_way_out(number)}") from error
    finally:
        _remove(partial)
    return written


def why_unwritable(folder: Path) -> str | None:
    """Why no checkpoint can be written below a folder, and what to do; None if one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"checkpoint")
    except OSError as error:
        return f"Cannot write into {folder}: {error.strerror}. {_way_out(error.errno)}"
    return None


def _way_out(number: int | None) -> str:
    if number in _NO_ROOM:
        return "Make room there."
    return "Let this user write there, or give another checkpoint_dir."


def _system_number(error: Exception) -> int | None:
    """The operating system's number of an error; safetensors has it in its text only."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return None if found is None else int(found[1])


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # it is tidied up later
        path.unlink(missing_ok=True)


def _write_through(
    path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]
) -> tuple[int, str]:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata)
    with path.open("rb", buffering=0) as file:
        synced = _on_thread(os.fsync, file.fileno())  # the disk and the digest take as long
        sha256 = digest(file)
        synced.result()
        return os.fstat(file.fileno()).st_size, sha256


def _octets(data: bytes) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _tidy(folder: Path, known: Collection[Path]) -> None:
    named = (path for path in known if _is_named(path))  # a ledger may name anything
    newest_known = max((_number(path) for path in named), default=0)
    for path in _files(folder):
        if _number(path) < newest_known and path not in known:
            _remove(path)
    for pattern in (f"*{_PARTIAL}", _LIBRARY_PARTIAL):  # of a process killed while writing
        for path in folder.glob(pattern):
            _remove(path)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.glob(f"*-unit-*{_SUFFIX}") if _is_named(path)]


def _is_named(path: Path) -> bool:
    """Whether it has the name of a checkpoint."""
    return path.name[:6].isdecimal() and path.name[6:7] == "-"


def _number(path: Path) -> int:
    # Not the time of the file: clocks are set back.
    return int(path.name.split("-", 1)[0])


# -- reading -----------------------------------------------------------------------------------


def _search(states: Sequence[StoredState], run: str, folder: Path | None) -> _Found | None:
    """The newest checkpoint that can be used, its tree, and what is wrong with those before it."""
    problems: list[CheckpointError] = []
    for state in states:
        try:
            if not _is_in(folder, state):
                raise CheckpointError(
                    f"Checkpoint {state.path} of {run} must lie in its folder, {folder}, that is "
                    "no link: give the checkpoint_dir that it was written to."
                )
            return state, _load(state, run), problems
        except CheckpointError as error:
            problems.append(error)
    if not problems:
        return None
    raise CheckpointError(
        f"No checkpoint of {run} can be used, and it is not started again in silence: "
        + " ".join(str(problem) for problem in problems)
        + f" {_BRING_BACK}"
    ) from problems[0]


def _is_in(folder: Path | None, state: StoredState) -> bool:
    """Whether a checkpoint lies directly in a run's folder, which is no link to another's."""
    if folder is None or folder.is_symlink():
        return False
    return state.path.parent.resolve() == folder.resolve()


def _load(state: StoredState, run: str) -> Any:
    """The tree of a checkpoint whose bytes are those that were written."""
    name = f"Checkpoint {state.path} of {run}"
    try:
        if not stat.S_ISREG(state.path.lstat().st_mode):
            raise CheckpointError(f"{name} must be a file, not a link or anything else.")
        # What has become a link since is not followed.
        handle = os.open(state.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(handle, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != state.size_bytes:
                raise CheckpointError(f"{name} must have {state.size_bytes} bytes but has {size}.")
            content = Content.read(file, size)
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror or error}.") from error
    if content.sha256 != state.sha256:
        raise CheckpointError(
            f"{name} is damaged: its SHA-256 must be {state.sha256} but is {content.sha256}."
        )
    try:
        return _decoded(name, content, run)
    except CheckpointError:
        raise
    except Exception as error:  # whoever wrote it did not keep to the format
        raise CheckpointError(f"{name} cannot be decoded: {error!r}.") from error


def _decoded(name: str, content: Content, run: str) -> Any:
    metadata = content.header.get("__metadata__", {})
    if metadata.get("format") != _FORMAT["format"]:
        raise CheckpointError(f"{name} must be a file that optuna-hermes wrote, and is not.")
    if metadata["version"] != _FORMAT["version"]:
        raise CheckpointError(
            f"{name} must have format version {_FORMAT['version']} but has "
            f"{metadata['version']}: go on with the optuna-hermes that wrote it."
        )
    if metadata["run"] != run:
        raise CheckpointError(f"{name} must be of {run} but is of {metadata['run']}.")
    tensors = content.tensors()
    text = tensors.pop(_TREE).numpy().tobytes()
    return unpack(tensors, text.decode("utf-8", "surrogatepass"))
