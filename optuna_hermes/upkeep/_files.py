"""Garbage collection of checkpoint files."""

from __future__ import annotations

import contextlib
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from optuna_hermes import _optuna
from optuna_hermes.broker._client._journal import NAME as JOURNAL
from optuna_hermes.ledger import CheckpointRecord, Ledger
from optuna_hermes.suspend._tiers import _remote
from optuna_hermes.suspend._tiers._disk import is_own

# A trial, on this host or on another, may be writing a file that the ledger does not name yet.
ORPHAN_SECONDS = 3600.0

_MOST_AT_ONCE = 500
"""Rows that one transaction drops: a running study waits for its end."""

_TRIAL_FOLDER = re.compile(r"trial-(\d+)")


@dataclass(frozen=True, kw_only=True)
class Litter:
    """Garbage among a study's checkpoints."""

    files: Mapping[Path | str, int]  # sizes in bytes, by path, or by URL where a store has it
    rows: tuple[tuple[int, str], ...]  # trials and paths to be dropped from the ledger
    # Folders that were not searched though the ledger names checkpoints there, as they were given
    # to ``optimize``; and stores.
    elsewhere: tuple[str, ...] = ()
    # Keys of studies that Optuna has deleted, with rows as above.
    rows_of_deleted: tuple[tuple[str, int, str], ...] = ()

    @property
    def size_bytes(self) -> int:
        """The size of all files."""
        return sum(self.files.values())


def find_litter(
    study: _optuna.Study,
    ledger: Ledger,
    folders: Collection[Path],
    held: Collection[int],
    now: float,
    stores: Collection[str] = (),
) -> Litter:
    """Find the checkpoints of finished trials, and those that the ledger does not name.

    ``folders`` and ``stores``, which are URLs, are this study's alone; the files of ``held`` trials
    stay.

    Raises:
        UnwritableError: a store cannot be reached.
    """
    places: list[Path | str] = [*folders, *stores]
    found = [file for place in places for file in _files(place)]
    # Read after the files: a trial's folder is made after the trial, so each folder has one here.
    trials = study.get_trials(deepcopy=False)
    over = {trial.number for trial in trials if trial.state.is_finished()}
    rows = ledger.load_checkpoints(_optuna.study_key(study))
    # The ledger may name any path: files outside of the folders are neither removed nor forgotten.
    here, elsewhere = _sorted_out(rows, folders, stores)
    stale = [row for row in here if row.number in over]
    # By the names of trial and file: the folder may be spelled in another way than in the ledger,
    # and may have been moved; and a copy of what is in a store has that file's name.
    needed = {_names(row.checkpoint.path) for row in rows if row.number not in over}
    # The ledger may learn of the checkpoints in a trial's journal long after they were written.
    unconfirmed = {file.number for file in found if _names(file.place)[1] == JOURNAL}
    litter = [
        file
        for file in found
        if _names(file.place) not in needed
        and file.number not in held
        and (
            file.number in over
            or (now - file.changed > ORPHAN_SECONDS and file.number not in unconfirmed)
        )
    ]
    return Litter(
        files={file.place: file.size_bytes for file in litter},
        rows=tuple((row.number, row.checkpoint.path) for row in stale),
        elsewhere=tuple(sorted(elsewhere)),
    )


def _names(place: Path | str) -> tuple[str, ...]:
    """The names of the trial's folder and of the file."""
    return tuple(str(place).split("/")[-2:])


def _url(row: CheckpointRecord) -> str:
    """The URL of the study in a store."""
    return row.checkpoint.path.rsplit("/", 2)[0]


def with_deleted(
    litter: Litter,
    ledger: Ledger,
    keys: Collection[str],
    folders: Collection[Path],
    stores: Collection[str] = (),
) -> tuple[Litter, tuple[str, ...]]:
    """The litter, with every checkpoint of deleted studies: ``folders`` have one for each key.

    So have ``stores``, which are URLs. What is missing is gone if it was in one of the folders, and
    that is there; else it may be on another host, or on a disk that is not mounted.

    Returns:
        The litter, and the keys of studies of which it then has all that can be found: of the
        others the ledger names checkpoints elsewhere, which nobody would find without it.

    Raises:
        UnwritableError: a store cannot be reached.
    """
    folders = [folder for folder in folders if folder.is_dir()]
    found = [folder / key for folder in folders for key in keys]
    # Keys come out of a database: "..", or a link to elsewhere, must not lead out of the folders.
    own = [each for each in found if each.resolve() == each.parent.resolve() / each.name]
    inside = [each for each in own if each.name in keys]
    names = [key for key in keys if "/" not in key and key not in ("", ".", "..")]
    urls = {f"{store}/{key}" for store in stores for key in names}
    places: list[Path | str] = [*inside, *urls]
    files = {file.place: file.size_bytes for place in places for file in _files(place)}
    elsewhere, rows = {}, []
    for key in keys:
        here, elsewhere[key] = _sorted_out(ledger.load_checkpoints(key), inside, urls, folders)
        # Another host, which has the others, cannot tell that these are gone.
        rows += [(key, row.number, row.checkpoint.path) for row in here if elsewhere[key]]
    litter = replace(
        litter,
        files={**litter.files, **files},
        elsewhere=tuple(sorted({*litter.elsewhere, *chain.from_iterable(elsewhere.values())})),
        rows_of_deleted=tuple(rows),
    )
    return litter, tuple(key for key in keys if not elsewhere[key])


def _sorted_out(
    rows: Iterable[CheckpointRecord],
    folders: Collection[Path],
    urls: Collection[str],
    searched: Collection[Path] | None = None,
) -> tuple[list[CheckpointRecord], set[str]]:
    """The rows of checkpoints that lie here or are gone, and where the others lie.

    Args:
        rows: a checkpoint lies at CHECKPOINT_DIR/STUDY/TRIAL/FILE: users know the first of these.
        folders, urls: of studies.
        searched: each CHECKPOINT_DIR in which what is missing counts as gone; None: any.
    """
    places = {folder.resolve() for folder in folders}
    parents = None if searched is None else {folder.resolve() for folder in searched}
    here, elsewhere = [], set()
    for row in rows:
        path = Path(row.checkpoint.path)
        if _remote.is_url(row.checkpoint.path):
            is_here, place = _url(row) in urls, _url(row).rpartition("/")[0]
        else:
            is_here, place = _is_here(path, places, parents), str(path.parent.parent.parent)
        if is_here:
            here.append(row)
        else:
            elsewhere.add(place)
    return here, elsewhere


def _is_here(path: Path, places: Collection[Path], parents: Collection[Path] | None) -> bool:
    """True if a checkpoint lies in a study's folder in ``places``, or is gone.

    Raises:
        OSError: it lies there, and cannot be looked at.
    """
    place = path.parent.parent.resolve()
    try:  # not by ``exists``, which is False since Python 3.14 where a mount is away
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return parents is None or place.parent in parents
    except OSError:
        if place in places:
            raise
    return place in places


def remove(study: _optuna.Study, ledger: Ledger, litter: Litter) -> None:
    """Remove files, then their rows, then folders that are empty.

    Raises:
        UnwritableError: a store cannot be reached; the rows of its files stay.
    """
    # In this order: rows whose files are gone are found again after an interruption.
    for place in litter.files:
        if isinstance(place, Path):
            place.unlink(missing_ok=True)
        else:
            _remote.remove(place)
    own = _optuna.study_key(study)
    rows = [*((own, *each) for each in litter.rows), *litter.rows_of_deleted]
    for first in range(0, len(rows), _MOST_AT_ONCE):
        with ledger.batch():
            for key, number, row in rows[first : first + _MOST_AT_ONCE]:
                ledger.drop_checkpoint(key, number, row)
    for folder in {place.parent for place in litter.files if isinstance(place, Path)}:
        with contextlib.suppress(OSError):  # it is not empty, or another `gc` was faster
            folder.rmdir()


@dataclass(frozen=True, kw_only=True)
class _File:
    place: Path | str
    number: int
    size_bytes: int
    changed: float


def _files(study: Path | str) -> Iterator[_File]:
    """The checkpoints and journals of a study's trials, in its folder or at its URL in a store."""
    for place, size_bytes, changed in _found(study):
        folder, _, name = str(place).removeprefix(f"{study}/").partition("/")
        match = _TRIAL_FOLDER.fullmatch(folder)
        # What a trial prints, or its Trainer saves there, is the user's.
        if match is not None and (is_own(name) or name in (JOURNAL, f"{JOURNAL}.new")):
            number = int(match[1])
            yield _File(place=place, number=number, size_bytes=size_bytes, changed=changed)


def _found(study: Path | str) -> Iterator[tuple[Path | str, int, float]]:
    """All files there may be, with their sizes and the times of their last changes."""
    if isinstance(study, str):
        for file in _remote.files(study):
            yield file.url, file.size_bytes, file.changed
        return
    for path in chain.from_iterable(map(_listed, _listed(study))):
        try:
            status = path.lstat()
        except OSError:  # it is gone
            continue
        if stat.S_ISREG(status.st_mode) and not path.parent.is_symlink():
            yield path, status.st_size, status.st_mtime


def _listed(folder: Path) -> list[Path]:
    """The paths in a folder: none if it is no folder, or another user's."""
    # Not by ``glob``: since Python 3.12 it finds nothing where a mount is away, either.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        return sorted(folder.iterdir())
    return []
