"""Checkpoints on disk: written atomically, and verified by their SHA-256 when read.

A checkpoint is one safetensors file that any reader of that format opens: the tensors of the trial
by number, and under ``tree`` the JSON text that puts them together (see ``_tree``). Its metadata
name the trial and the version of the format.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
import tempfile
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from optuna_hermes.errors import CheckpointError, CheckpointUnreachableError, UnwritableError
from optuna_hermes.model import Checkpoint
from optuna_hermes.suspend._tiers import _remote
from optuna_hermes.suspend._tiers._safetensors import Content, digest
from optuna_hermes.suspend._values._tree import pack, unpack

# Torch and safetensors are imported inside functions: each session of a trial imports this module.
if TYPE_CHECKING:
    import torch

_log = logging.getLogger("optuna_hermes.suspend")

_FORMAT = {"format": "optuna-hermes checkpoint", "version": "10"}
_TREE = "tree"
_SUFFIX = ".safetensors"
_PARTIAL = ".partial"
_ENDS = "|".join(map(re.escape, (_SUFFIX, _PARTIAL, _remote.PARTIAL)))
# safetensors itself writes to a name of the second kind first.
_OWN = re.compile(rf"\d{{6}}-unit-\d+.*({_ENDS})|\.tmp\w{{6}}")
_BRING_BACK = (
    "Bring such a file back, or close the trial: at its last value with `optuna-hermes finish "
    "NUMBER`, else with `optuna-hermes tell --trial-number NUMBER --state fail`."
)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)

T = TypeVar("T")
_Found = tuple[Checkpoint, Any, list[CheckpointError]]

_writing = threading.Lock()
"""A suspension and the thread that saves the last unit both number files in one folder."""

_ahead: tuple[object, Future[_Found | None]] | None = None
"""Key and future of the last ``read_ahead``."""


def write(
    folder: Path,
    tree: Any,
    *,
    trial: str,
    units: int,
    known: Collection[Checkpoint] = (),
    url: str | None = None,
) -> Checkpoint:
    """Write a checkpoint that survives a crash at any moment, and remove outdated ones.

    Args:
        folder: this trial's own folder.
        tree: the state, as ``pack`` takes it; must not change meanwhile.
        known: the checkpoints that the ledger names. They stay, and so do all newer ones.
        url: the folder's place in a store that other hosts reach; the file is a copy then.

    Raises:
        CheckpointError: the tree holds what cannot be stored.
        UnwritableError: the file system has no room, or does not let this user write there; or
            the store is away.
    """
    import torch

    tensors, text = pack(tree, trial)
    octets = bytearray(text.encode("utf-8", "surrogatepass"))
    tensors[_TREE] = torch.frombuffer(octets, dtype=torch.uint8)
    with _writing:
        try:
            taken = _files(folder)
        except OSError as error:
            raise UnwritableError(_why_unwritable(folder, error)) from error
        if url is not None:  # another host may have written those that the ledger names
            taken += [path for state in known if _is_named(path := Path(state.path))]
        number = 1 + max(map(_number, taken), default=0)
        path = folder.absolute() / f"{number:06d}-unit-{units}{_SUFFIX}"
        size, sha256 = _put(path, tensors, {**_FORMAT, "trial": trial})
        if url is not None:
            return _upload(
                path, url, Checkpoint(path="", units=units, size_bytes=size, sha256=sha256), known
            )
        _tidy(folder, {Path(state.path) for state in known})
    return Checkpoint(path=str(path), units=units, size_bytes=size, sha256=sha256)


def read(
    states: Sequence[Checkpoint], trial: str, folder: Path | None, url: str | None = None
) -> tuple[Checkpoint, Any] | None:
    """Read the newest checkpoint that is intact; None only if there is none at all.

    Args:
        states: newest first, as the ledger has them; their paths are checked against ``folder``. It
            may have been moved or copied since: a file there is taken by its name and digest.
        folder: this trial's own folder, outside of which nothing is read; None if it has none.
        url: its place in a store, as in ``write``.

    Returns:
        The checkpoint, and the tree that was written into it.

    Raises:
        CheckpointUnreachableError: this host cannot read one now, and no newer one can be used.
        CheckpointError: there are checkpoints, but none can be used.
    """
    global _ahead
    ahead, _ahead = _ahead, None
    inside = all(_is_in(folder, state, url) for state in states)
    if inside and ahead and ahead[0] == _key(states, trial):
        found = ahead[1].result()
    else:
        found = _search(states, trial, folder, url)
    if found is None:
        return None
    state, tree, problems = found
    if problems:
        name = Path(state.path).name
        _log.warning("%s Going on from %s, after unit %d.", problems[0], name, state.units)
    return state, tree


def read_ahead(
    states: Sequence[Checkpoint], trial: str, folder: Path | None = None, url: str | None = None
) -> None:
    """Begin the next ``read`` on a thread; dropped if that is then called for others.

    Args:
        folder, url: as for ``read``, where the trial has a place in a store.
    """
    global _ahead
    if url is None:
        # Not checked here, as the trial's own folder is not known: ``read`` does it.
        folder = Path(states[0].path).parent if states else None
    _ahead = _key(states, trial), _on_thread(_search, tuple(states), trial, folder, url)


def _key(states: Sequence[Checkpoint], trial: str) -> object:
    # With the process id: a thread that reads ahead does not survive a fork.
    return os.getpid(), trial, [(state.path, state.sha256) for state in states]


def _on_thread(call: Callable[..., T], *args: Any) -> Future[T]:
    """Call a function on a thread that no exit of the process waits for."""
    future: Future[T] = Future()
    work = (future, call, *args)
    # Not an executor: the interpreter joins the threads of executors at exit.
    try:
        threading.Thread(target=call_into, args=work, name="hermes-disk", daemon=True).start()
    except RuntimeError:  # a limit of processes is reached, for this moment
        call_into(*work)
    return future


def call_into(future: Future[T], call: Callable[..., T], *args: Any) -> None:
    """Call a function; the future has its result or its error."""
    try:
        future.set_result(call(*args))
    except BaseException as error:  # ``result()`` raises it
        future.set_exception(error)


# -- writing -----------------------------------------------------------------------------------


def _put(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> tuple[int, str]:
    """Write a file atomically; return its size and SHA-256."""
    from safetensors import SafetensorError

    partial = path.with_suffix(_PARTIAL)
    # Not by ``Path``, which raises the error of a mount that is away, outside of this ``try``.
    if os.path.islink(path.parent):
        raise UnwritableError(f"{path.parent} must be a folder, not a link: remove the link.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if partial.is_symlink():  # writing would follow it out of the folder
            partial.unlink()
        written = _write_through(partial, tensors, metadata)
        os.replace(partial, path)
        try:
            # A rename survives a power failure only once its folder is synced, too.
            _sync_folder(path.parent)
        except OSError:  # the ledger never names it: delete it, so that it takes no quota
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
    """The reason why no checkpoint can be written to a folder, with a way out; None if one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"checkpoint")
    except OSError as error:
        return _why_unwritable(folder, error)
    return None


def _why_unwritable(folder: Path, error: OSError) -> str:
    return f"Cannot write into {folder}: {error.strerror}. {_way_out(error.errno)}"


def _way_out(number: int | None) -> str:
    if number in _NO_ROOM:
        return "Make room there."
    if number == errno.EFBIG:
        return "Raise the limit of a file's size (`ulimit -f`), or give another checkpoint_dir."
    return "Let this user write there, or give another checkpoint_dir."


def _system_number(error: Exception) -> int | None:
    """The operating system's number of an error; safetensors has it in its text only."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return None if found is None else int(found[1])


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # ``_tidy`` removes it later
        path.unlink(missing_ok=True)


def _write_through(
    path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]
) -> tuple[int, str]:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata)
    with path.open("rb", buffering=0) as file:
        _let_others_read(file.fileno())
        # In parallel: fsync waits for the disk, the digest needs the CPU, and both take as long.
        synced = _on_thread(os.fsync, file.fileno())
        sha256 = digest(file)
        synced.result()
        return os.fstat(file.fileno()).st_size, sha256


def _let_others_read(descriptor: int) -> None:
    """Give a file the mode of any new file: safetensors keeps it to this user."""
    # Not by ``os.umask``, which would change it for the other threads meanwhile.
    with contextlib.suppress(OSError):  # not every file system has modes
        status = Path("/proc/self/status").read_bytes()  # a process may have any name
        found = re.search(rb"^Umask:\s*([0-7]+)$", status, re.MULTILINE)
        if found is not None:
            os.fchmod(descriptor, 0o666 & ~int(found[1], 8))


def _upload(path: Path, url: str, written: Checkpoint, known: Collection[Checkpoint]) -> Checkpoint:
    """Upload a file, which becomes the copy of what is there; remove what is outdated there."""
    # By its content: a host that lost the trial may have written one of the same number there.
    name = f"{path.stem}-{written.sha256[:12]}{_SUFFIX}"
    copy = path.with_name(name)
    try:
        os.replace(path, copy)
        _remote.put(copy, f"{url}/{name}")
    except OSError as error:
        _remove(path)
        raise UnwritableError(f"Cannot write checkpoint {copy}: {error.strerror}.") from error
    except UnwritableError:
        _remove(copy)  # no other host can read it: it is written again
        raise
    names = {Path(state.path).name for state in known if state.path == f"{url}/{_name(state)}"}
    _tidy(path.parent, {path.with_name(each) for each in names})
    newest_known = max((_number(Path(each)) for each in names), default=0)
    with contextlib.suppress(UnwritableError):  # ``gc`` removes it later
        for file in _remote.files(url):
            there = Path(file.url)
            if _is_named(there) and _number(there) < newest_known and there.name not in names:
                _remote.remove(file.url)
    return replace(written, path=f"{url}/{name}")


def _name(state: Checkpoint) -> str:
    """The name of a checkpoint's file, where it is one's name."""
    name = state.path.rpartition("/")[2]
    return name if _is_named(Path(name)) else ""


def remove_copies(folder: Path) -> None:
    """Remove the files of a trial that is over from this host; those in a store stay."""
    with contextlib.suppress(OSError):  # ``gc`` removes them later
        for path in _files(folder):
            _remove(path)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that syncs files alone
            raise
    finally:
        os.close(handle)


def _tidy(folder: Path, known: Collection[Path]) -> None:
    named = [path for path in known if _is_named(path)]  # paths from the database are not trusted
    newest_known = max((_number(path) for path in named), default=0)
    names = {path.name for path in named}  # their folder may be spelled in another way
    with contextlib.suppress(OSError):  # the checkpoint is safe: a later call removes them
        for path in _listed(folder):
            partial = path.suffix != _SUFFIX  # of a process killed while it wrote or fetched
            # Newer files than the newest known one stay: the process that wrote one may have died
            # before the ledger had it.
            if partial or (_number(path) < newest_known and path.name not in names):
                _remove(path)


def _files(folder: Path) -> list[Path]:
    return [path for path in _listed(folder) if path.suffix == _SUFFIX]


def _listed(folder: Path) -> list[Path]:
    """The checkpoints of a folder, whole or partial; none if there is no folder.

    Raises:
        OSError: it cannot be read now. ``Path.glob`` would find nothing, on some Pythons.
    """
    try:
        return [folder / name for name in os.listdir(folder) if is_own(name)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_own(name: str) -> bool:
    """True if a file in a trial's folder is a checkpoint, whole or partial, and not the user's."""
    return _OWN.fullmatch(name) is not None


def _is_named(path: Path) -> bool:
    """True if a file has the name of a checkpoint."""
    return path.name[:6].isdecimal() and path.name[6:7] == "-"


def _number(path: Path) -> int:
    # The number in the name, not the file's time: clocks may be set back.
    return int(path.name.split("-", 1)[0])


# -- reading -----------------------------------------------------------------------------------


def _search(
    states: Sequence[Checkpoint], trial: str, folder: Path | None, url: str | None
) -> _Found | None:
    """Return the newest usable checkpoint, its tree, and the errors of the newer ones."""
    problems: list[CheckpointError] = []
    for state in states:
        try:
            here = _located(folder, state, url)
            if here is None:
                root = None if folder is None else _folder_before(folder, state.path)
                where = "the checkpoint_dir that it was written to"
                if root is not None:
                    where = f"the checkpoint_dir {root}, where it lies beside a renamed database"
                raise CheckpointError(
                    f"Checkpoint {state.path} of {trial} must lie in its folder, "
                    f"{folder if url is None else url}, that is "
                    f"no link: give {where}, or move it there."
                )
            return state, _load_here(folder, here, trial), problems
        except CheckpointUnreachableError:
            raise  # it may be whole: no older one is taken for it
        except CheckpointError as error:
            problems.append(error)
    if not problems:
        return None
    raise CheckpointError(
        f"No checkpoint of {trial} can be used, and it is not started again in silence: "
        + " ".join(str(problem) for problem in problems)
        + f" {_BRING_BACK}"
    ) from problems[0]


def _located(folder: Path | None, state: Checkpoint, url: str | None) -> Checkpoint | None:
    """A checkpoint in its trial's folder, which may have been moved or copied; None if outside."""
    if _is_in(folder, state, url):
        return state
    if folder is None or os.path.islink(folder) or _remote.is_url(state.path):
        return None
    here = moved_file(folder, state.path)
    return None if here is None else replace(state, path=str(here))


def moved_file(folder: Path, place: str) -> Path | None:
    """The file of this checkpoint's name in a trial's folder, wherever it was written to."""
    here = folder / Path(place).name
    try:
        there = stat.S_ISREG(os.lstat(here).st_mode)
    except OSError as error:
        there = error.errno not in _GONE  # it cannot be read now: ``_load`` says why
    return here if there and _is_named(here) else None


def _folder_before(folder: Path, place: str) -> Path | None:
    """The folder of checkpoints whose SQLite file was renamed, where it lies beside the new one."""
    inside = Path(*folder.parts[-2:], Path(place).name)
    with contextlib.suppress(OSError, IndexError):  # this only helps to say where it is
        for root in sorted(folder.parents[2].glob("*.hermes")):
            # Of a file that was copied, not renamed, the folder is the original's.
            if (root / inside).is_file() and not root.with_suffix("").exists():
                return root
    return None


def _is_in(folder: Path | None, state: Checkpoint, url: str | None) -> bool:
    """True if a checkpoint lies directly in a trial's folder, which must not be a link."""
    # Not by ``Path``, which raises the error of a mount that is away: ``_load`` handles it.
    if folder is None or os.path.islink(folder):
        return False
    if _remote.is_url(state.path):
        return url is not None and bool(_name(state)) and state.path == f"{url}/{_name(state)}"
    return Path(state.path).parent.resolve() == folder.resolve()


def _load_here(folder: Path | None, state: Checkpoint, trial: str) -> Any:
    """As ``_load``; a copy of one in a store is fetched if it is missing or cannot be used.

    Raises:
        CheckpointUnreachableError: it cannot be fetched, or read, on this host now.
        CheckpointError: it is gone, or cannot be used.
    """
    if folder is None or not _remote.is_url(state.path):
        return _load(state, trial)
    copy = replace(state, path=str(folder / _name(state)))
    if os.path.lexists(copy.path):
        with contextlib.suppress(CheckpointError):
            return _load(copy, trial)
    _remote.get(state.path, Path(copy.path))
    return _load(copy, trial)


def _load(state: Checkpoint, trial: str) -> Any:
    """Read and verify a checkpoint; return its tree."""
    name = f"Checkpoint {state.path} of {trial}"
    try:
        if not stat.S_ISREG(os.lstat(state.path).st_mode):
            raise CheckpointError(f"{name} must be a file, not a link or anything else.")
        # O_NOFOLLOW: the file may have become a link since lstat.
        handle = os.open(state.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(handle, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != state.size_bytes:
                raise CheckpointError(f"{name} must have {state.size_bytes} bytes but has {size}.")
            content = Content.read(file, size)
    except OSError as error:
        kind = CheckpointError if error.errno in _GONE else CheckpointUnreachableError
        raise kind(f"{name} cannot be read: {error.strerror or error}.") from error
    if content.sha256 != state.sha256:
        raise CheckpointError(
            f"{name} is damaged: its SHA-256 must be {state.sha256} but is {content.sha256}."
        )
    try:
        return _decoded(name, content, trial)
    except CheckpointError:
        raise
    # The digest is right, but the content breaks the format: any error may come of it.
    except Exception as error:
        raise CheckpointError(f"{name} cannot be decoded: {error!r}.") from error


def _decoded(name: str, content: Content, trial: str) -> Any:
    metadata = content.header.get("__metadata__", {})
    if metadata.get("format") != _FORMAT["format"]:
        raise CheckpointError(f"{name} must be a file that optuna-hermes wrote, and is not.")
    if metadata["version"] != _FORMAT["version"]:
        raise CheckpointError(
            f"{name} must have format version {_FORMAT['version']} but has "
            f"{metadata['version']}: go on with the optuna-hermes that wrote it."
        )
    if metadata["trial"] != trial:
        raise CheckpointError(f"{name} must be of {trial} but is of {metadata['trial']}.")
    tensors = content.tensors()
    text = tensors.pop(_TREE).numpy().tobytes()
    return unpack(tensors, text.decode("utf-8", "surrogatepass"))
