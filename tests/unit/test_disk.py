"""A checkpoint is on disk whole or not at all."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from optuna_hermes.errors import CheckpointError
from optuna_hermes.suspend import StoredState, newest_good, verify, write


def content(text: bytes) -> Callable[[IO[bytes]], object]:
    return lambda file: file.write(text)


def full(file: IO[bytes]) -> None:
    file.write(b"half of ")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_size_and_digest_are_those_of_the_file(tmp_path: Path) -> None:
    """What is said of a checkpoint is what is in its file."""
    state = write(tmp_path / "run", units=3, save=content(b"abc"))
    assert state.path.read_bytes() == b"abc"
    assert (state.units, state.size_bytes) == (3, 3)
    assert state.sha256 == hashlib.sha256(b"abc").hexdigest()
    verify(state, "trial 0")


def test_what_the_ledger_names_stays_with_all_that_is_newer(tmp_path: Path) -> None:
    """Older checkpoints go, and so does what a killed process left half written."""
    (tmp_path / "000009-unit-1.partial").write_bytes(b"half")
    (tmp_path / "output.log").write_bytes(b"not ours")
    states = [write(tmp_path, units=units, save=content(b"x")) for units in (1, 2, 2, 3, 4)]
    assert len(list(tmp_path.iterdir())) == 6, "while the ledger knows none, all may be needed"
    last = write(tmp_path, units=5, save=content(b"x"), known=(states[3], states[1]))
    kept = [*(states[i].path.name for i in (1, 3, 4)), last.path.name, "output.log"]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


def test_no_name_is_used_twice(tmp_path: Path) -> None:
    """A unit that is trained again gets a file of its own: the ledger still names the old one."""
    states = [write(tmp_path, units=1, save=content(b"x")) for _ in range(5)]
    assert len({state.path for state in states}) == 5


def test_full_disk(tmp_path: Path) -> None:
    """If the disk is full nothing changes, and the error names the file and the reason."""
    state = write(tmp_path, units=1, save=content(b"abc"))
    with pytest.raises(CheckpointError, match=r"000002-unit-2\.ckpt: No space left on device"):
        write(tmp_path, units=2, save=full)
    assert list(tmp_path.iterdir()) == [state.path]


def test_newest_good(tmp_path: Path) -> None:
    """The newest checkpoint that is as it was written is taken."""
    older, newest = (write(tmp_path, units=units, save=content(b"abc")) for units in (1, 2))
    assert newest_good((newest, older), "trial 7") == newest
    newest.path.write_bytes(b"abd")
    with pytest.warns(RuntimeWarning, match=r"of trial 7 is damaged.*after unit 1"):
        assert newest_good((newest, older), "trial 7") == older


def test_none_is_good() -> None:
    """No checkpoint is a beginning; checkpoints that cannot be read are an error."""
    gone = StoredState(path=Path("/nowhere/1.ckpt"), units=1, size_bytes=1, sha256="0")
    assert newest_good((), "trial 7") is None
    both = (gone, dataclasses.replace(gone, path=Path("/nowhere/0.ckpt")))
    with pytest.raises(CheckpointError, match=r"(?s)trial 7.*nowhere/1\.ckpt.*nowhere/0\.ckpt"):
        newest_good(both, "trial 7")
