"""Write access to ledger or checkpoint folder runs no code, and reaches no other folder."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from optuna_hermes.errors import CheckpointError
from optuna_hermes.model import Checkpoint
from optuna_hermes.suspend import read, write
from optuna_hermes.suspend._tiers._disk import read_ahead

RUN = "trial 7"


def stored(folder: Path, units: int = 1, **options: Any) -> Checkpoint:
    return write(folder, {"weight": torch.ones(3)}, trial=RUN, units=units, **options)


def as_written(path: Path) -> Checkpoint:
    """Return a forged ledger's record of a file: all that can be checked is right."""
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    return Checkpoint(path=str(path), units=1, size_bytes=len(data), sha256=digest)


def forged(tree: object, **header: Any) -> bytes:
    """A file in the format of checkpoints with this tree."""
    text = json.dumps(tree).encode()
    parts = {
        "__metadata__": {"format": "optuna-hermes checkpoint", "version": "10", "trial": RUN},
        "tree": {"dtype": "U8", "shape": [len(text)], "data_offsets": [0, len(text)]},
    }
    head = json.dumps(parts | header).encode()
    return struct.pack("<Q", len(head)) + head + text


# -- reading


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["pickle", "torch", "in metadata"])
def test_a_planted_pickle_is_refused_unread(tmp_path: Path, kind: str) -> None:
    """A file whose digest the ledger vouches for is still only data."""
    folder, made = tmp_path / "trial-00007", tmp_path / "made"
    folder.mkdir()
    path = folder / "000001-unit-1.safetensors"
    if kind == "torch":
        torch.save({"weight": Bomb(made)}, path)
    else:
        payload = pickle.dumps(Bomb(made))
        text = base64.b64encode(payload).decode()
        path.write_bytes(payload if kind == "pickle" else forged({"$bytes": text}))
    if kind == "in metadata":
        found = read((as_written(path),), RUN, folder)
        assert found is not None
        assert found[1] == payload
    else:
        with pytest.raises(CheckpointError, match="must be a file that optuna-hermes wrote"):
            read((as_written(path),), RUN, folder)
    assert not made.exists()
    pickle.loads(pickle.dumps(Bomb(made)))
    assert made.exists(), "the payload works"


@pytest.mark.parametrize(
    "tree",
    [
        {"$array": ["0", "O", 1]},
        {"$scalar": ["O", "00" * 8]},
        {"$dtype": "load"},
        {"$import": "os"},
        {"$tensor": ["0", "hub"]},
        {"$array": ["tree", "|u1", 10**12]},
        {"$size": "x" * 100},
        {"$bytes": "abcde"},
        {"$bytes": "ab!d"},
        {"$bytes": "\u00e9"},
        {"$bytes": 5},
    ],
)
def test_a_forged_tree_makes_nothing_but_values(tmp_path: Path, tree: object) -> None:
    """Objects, functions and names that the format does not know are refused."""
    path = tmp_path / "000001-unit-1.safetensors"
    path.write_bytes(forged(tree))
    with pytest.raises(CheckpointError, match="cannot be decoded"):
        read((as_written(path),), RUN, tmp_path)


def test_a_header_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    """It neither crashes the reader nor is believed."""
    path = tmp_path / "000001-unit-1.safetensors"
    deep = b"[" * 200_000
    path.write_bytes(struct.pack("<Q", len(deep)) + deep)
    with pytest.raises(CheckpointError, match="must be a file that optuna-hermes wrote"):
        read((as_written(path),), RUN, tmp_path)
    path.write_bytes(forged(None).replace(b"null", b"[[[["))
    with pytest.raises(CheckpointError, match="cannot be decoded"):
        read((as_written(path),), RUN, tmp_path)


@pytest.mark.parametrize("ahead", [False, True], ids=["read", "read ahead"])
@pytest.mark.parametrize(
    "place", ["{root}/trial-00008/{name}", "{root}/trial-00007/../trial-00008/{name}"]
)
def test_a_row_that_names_another_folder_is_refused(
    tmp_path: Path, place: str, ahead: bool
) -> None:
    """Neither an absolute path nor dots lead out of the trial's own folder."""
    own, other = tmp_path / "trial-00007", tmp_path / "trial-00008"
    own.mkdir()
    state = stored(other)
    path = Path(place.format(root=tmp_path, name=Path(state.path).name))
    named = dataclasses.replace(state, path=str(path))
    if ahead:
        read_ahead((named,), RUN)
    with pytest.raises(
        CheckpointError, match=f"{path} of {RUN} must lie in its folder, {own}.*checkpoint_dir"
    ):
        read((named,), RUN, own)
    assert read((state,), RUN, other) is not None


@pytest.mark.parametrize("original", [False, True], ids=["moved", "copied"])
@pytest.mark.parametrize("ahead", [False, True], ids=["read", "read ahead"])
def test_a_folder_that_was_moved_has_its_checkpoints(
    tmp_path: Path, original: bool, ahead: bool
) -> None:
    """They are taken by name and digest; what is left at the old place is not read."""
    old, own = tmp_path / "old" / "trial-00007", tmp_path / "new" / "trial-00007"
    state = stored(old)
    shutil.copytree(old, own)
    if original:
        Path(state.path).write_bytes(b"of the original")
    else:
        shutil.rmtree(old)
    if ahead:
        read_ahead((state,), RUN)
    found = read((state,), RUN, own)
    assert found is not None
    assert found[0] == state  # as the ledger has it
    assert stored(own, units=2, known=(state,)).path == str(own / "000002-unit-2.safetensors")
    here = own / Path(state.path).name
    assert here.exists()
    data = here.read_bytes()
    here.write_bytes(data[:-1] + b"?")
    with pytest.raises(CheckpointError, match=f"{here} of {RUN} is damaged"):
        read((state,), RUN, own)
    here.unlink()
    (tmp_path / "elsewhere").write_bytes(data)
    here.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="must lie in its folder"):
        read((state,), RUN, own)


def test_a_database_that_was_renamed_without_its_folder(tmp_path: Path) -> None:
    """The folder is named, for no path of the ledger may lead there; a copy's original is not."""
    before, own = (tmp_path / f"{name}.db.hermes/key/trial-00007" for name in ("study", "other"))
    state = stored(before)
    moved = dataclasses.replace(state, path=f"/old{state.path}")
    place = re.escape(f"give the checkpoint_dir {tmp_path}/study.db.hermes, where it lies")
    with pytest.raises(CheckpointError, match=place):
        read((moved,), RUN, own)
    (tmp_path / "study.db").touch()
    with pytest.raises(CheckpointError, match="give the checkpoint_dir that it was written to"):
        read((moved,), RUN, own)
    assert read((moved,), RUN, before) is not None


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    """Neither read from nor written to: it could lead to another trial's, or out of all."""
    real, link = tmp_path / "real", tmp_path / "trial-00007"
    state = stored(real)
    link.symlink_to(real)
    with pytest.raises(CheckpointError, match="that is no link"):
        read((dataclasses.replace(state, path=str(link / Path(state.path).name)),), RUN, link)
    before = sorted(real.iterdir())
    with pytest.raises(CheckpointError, match=f"{link} must be a folder, not a link: remove"):
        stored(link, units=2)
    assert sorted(real.iterdir()) == before


def test_a_checkpoint_that_is_a_link_is_refused(tmp_path: Path) -> None:
    """A link in the folder leads to a file outside of it."""
    own, other = tmp_path / "trial-00007", tmp_path / "trial-00008"
    state = stored(other)
    own.mkdir()
    (own / Path(state.path).name).symlink_to(state.path)
    with pytest.raises(CheckpointError, match="must be a file, not a link or anything else"):
        read((dataclasses.replace(state, path=str(own / Path(state.path).name)),), RUN, own)


# -- writing


def test_links_in_the_folder_are_not_written_through(tmp_path: Path) -> None:
    """Links where a checkpoint or its part will be are replaced; what they lead to is unharmed."""
    folder, precious = tmp_path / "trial-00007", tmp_path / "precious"
    folder.mkdir()
    precious.write_text("mine")
    for name in ("000001-unit-1.safetensors", "000001-unit-1.partial", "000002-unit-1.partial"):
        (folder / name).symlink_to(precious)
    state = stored(folder)
    assert read((state,), RUN, folder) is not None
    assert precious.read_text() == "mine"


def test_what_a_trial_prints_does_not_go_through_a_link(tmp_path: Path) -> None:
    """A link in place of the log is removed; what it leads to is unharmed."""
    precious, log = tmp_path / "precious", tmp_path / "trial-00007" / "output.log"
    precious.write_text("mine")
    log.parent.mkdir()
    log.symlink_to(precious)
    script = (
        "import sys; from pathlib import Path; from optuna_hermes.workers._output import "
        "write_output_to; write_output_to(Path(sys.argv[1])); print('printed')"
    )
    subprocess.run([sys.executable, "-c", script, str(log)], check=True)
    assert (log.read_text(), precious.read_text()) == ("printed\n", "mine")


def test_a_ledger_with_foreign_names_removes_nothing(tmp_path: Path) -> None:
    """Rows that name what is no checkpoint neither stop a trial nor have a file removed."""
    folder = tmp_path / "trial-00007"
    first = stored(folder)
    odd = [dataclasses.replace(first, path=Path(path)) for path in ("/etc/passwd", "999999x", "..")]
    second = stored(folder, units=2, known=odd)
    assert Path(first.path).exists()
    assert Path(second.path).exists()
