"""A checkpoint is on disk whole or not at all, and no damaged one is ever used."""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
import re
import resource
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from optuna_hermes.errors import CheckpointError, CheckpointUnreachableError, UnwritableError
from optuna_hermes.model import Checkpoint
from optuna_hermes.suspend import read, write
from optuna_hermes.suspend._tiers import _disk
from optuna_hermes.suspend._tiers._disk import read_ahead, remove_copies
from support.disk_tier import DiskTier

RUN = "trial 7"


def tree(units: int = 1) -> dict[str, Any]:
    return {"units": units, "weight": torch.full((4,), float(units))}


def stored(folder: Path, units: int = 1, **options: Any) -> Checkpoint:
    return write(folder, tree(units), trial=RUN, units=units, **options)


def found(*states: Checkpoint) -> tuple[Checkpoint, Any]:
    result = read(states, RUN, Path(states[0].path).parent)
    assert result is not None
    return result


def as_written(path: Path) -> Checkpoint:
    """Return the ledger's record of a file as it is now."""
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    return Checkpoint(path=str(path), units=1, size_bytes=len(data), sha256=digest)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """The kernel refuses longer files, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# -- writing -----------------------------------------------------------------------------------


def test_size_and_digest_are_those_of_the_file(tmp_path: Path) -> None:
    """The record of a checkpoint says what is in its file."""
    state = stored(tmp_path / "run", 3)
    assert state == Checkpoint(
        path=str(tmp_path / "run" / "000001-unit-3.safetensors"),
        units=3,
        size_bytes=Path(state.path).stat().st_size,
        sha256=hashlib.sha256(Path(state.path).read_bytes()).hexdigest(),
    )
    assert names(tmp_path / "run") == [Path(state.path).name]


def test_anybody_can_see_what_it_is(tmp_path: Path) -> None:
    """Other readers of safetensors find tensors with their dtypes, the text, and whose it is."""
    with safe_open(stored(tmp_path).path, "pt") as file:
        assert file.metadata() == {
            "format": "optuna-hermes checkpoint",
            "version": "10",
            "trial": RUN,
        }
        assert file.get_tensor("0").tolist() == [1.0] * 4
        text = bytes(file.get_tensor("tree").tolist())
    assert text == b'{"units":1,"weight":{"$tensor":["0"]}}'


def test_what_the_ledger_names_stays_with_all_that_is_newer(tmp_path: Path) -> None:
    """Older checkpoints go, and so does what a killed process left half written."""
    (tmp_path / "000009-unit-1.partial").write_bytes(b"half")
    (tmp_path / ".tmpAb3dEf").write_bytes(b"half")
    for name in ("output.log", "users.partial"):
        (tmp_path / name).write_bytes(b"not ours")
    states = [stored(tmp_path, units) for units in (1, 2, 2, 3, 4)]
    assert len(names(tmp_path)) == 7, "while the ledger knows none, all may be needed"
    last = stored(tmp_path, 5, known=(states[3], states[1]))
    kept = [*(Path(states[i].path).name for i in (1, 3, 4)), Path(last.path).name]
    assert names(tmp_path) == [*kept, "output.log", "users.partial"]


@pytest.mark.parametrize(("mask", "mode"), [(0o002, 0o664), (0o077, 0o600)])
def test_who_may_read_it_is_as_for_any_new_file(mask: int, mode: int, tmp_path: Path) -> None:
    """Users of one group share a study if their umask says so, which is not changed."""
    before = os.umask(mask)
    try:
        state = stored(tmp_path)
    finally:
        assert os.umask(before) == mask
    assert Path(state.path).stat().st_mode & 0o777 == mode


def test_no_name_is_used_twice(tmp_path: Path) -> None:
    """A unit that is trained again gets a file of its own: the ledger still names the old one."""
    assert len({stored(tmp_path).path for _ in range(5)}) == 5


def test_full_disk(tmp_path: Path) -> None:
    """If the file system refuses nothing changes, and the error names the file and the reason."""
    state = stored(tmp_path)
    big = {"weight": torch.zeros(10_000)}
    with (
        largest_file(1000),
        pytest.raises(CheckpointError, match=r"000002-unit-2\.safetensors: .*File too large"),
    ):
        write(tmp_path, big, trial=RUN, units=2)
    assert names(tmp_path) == [Path(state.path).name]
    assert found(state)[0] == state


def test_a_disk_that_fails_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint whose bytes the disk did not take is none, though they could be read back."""
    state = stored(tmp_path)

    def fsync(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError, match=r"unit-2\.safetensors: Input/output error"):
        stored(tmp_path, 2)
    assert names(tmp_path) == [Path(state.path).name]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_no_room_turns_out_late(
    name: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that says so only as the bytes are to be safe: nothing is left, and why is known."""
    state = stored(tmp_path)

    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, refuse)
    with pytest.raises(
        UnwritableError, match=rf"unit-2\.safetensors: {os.strerror(number)}\. Make"
    ):
        stored(tmp_path, 2)
    assert names(tmp_path) == [Path(state.path).name]


def test_no_room_for_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose name the folder did not keep takes no room either."""
    state = stored(tmp_path)

    def refuse(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_disk, "_sync_folder", refuse)
    with pytest.raises(UnwritableError):
        stored(tmp_path, 2)
    assert names(tmp_path) == [Path(state.path).name]


def test_a_file_system_that_syncs_no_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files themselves are synced there; nothing more can be done."""
    sync = os.fsync

    def refuse(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(handle)

    monkeypatch.setattr(os, "fsync", refuse)
    state = stored(tmp_path)
    assert names(tmp_path) == [Path(state.path).name]


def test_no_room_as_safetensors_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library has the system's error in its text; one without is not of the file system."""
    texts = iter(["I/O error: No space left (os error 28)", "Is no tensor"])

    def refuse(*arguments: object) -> None:
        raise SafetensorError(next(texts))

    monkeypatch.setattr("safetensors.torch.save_file", refuse)
    with pytest.raises(UnwritableError):
        stored(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        stored(tmp_path)
    assert not isinstance(caught.value, UnwritableError)


def test_no_old_checkpoint_can_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is safe is one, though a full disk may not even take a name away."""
    states = [stored(tmp_path, units) for units in (1, 2, 3)]

    def refuse(path: Path, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert found(stored(tmp_path, 4, known=states[1:]))[1]["units"] == 4


def test_a_mount_that_goes_away_once_a_checkpoint_is_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint holds, and what is outdated is removed later."""
    first, second = stored(tmp_path, 1), stored(tmp_path, 2)
    safe = threading.Event()
    replace = os.replace

    def put(*paths: Path) -> None:
        replace(*paths)
        safe.set()

    def refuse(call: Callable[..., Any], path: Any, *args: Any, **named: Any) -> Any:
        if safe.is_set() and path == tmp_path:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return call(path, *args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", put)
        for name in ("stat", "listdir", "scandir"):
            patch.setattr(os, name, partial(refuse, getattr(os, name)))
        third = stored(tmp_path, 3, known=[second])
        remove_copies(tmp_path)
    assert names(tmp_path) == [Path(each.path).name for each in (first, second, third)]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_stopped_before_the_rename(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was not renamed does not count, and is not left behind."""
    state = stored(tmp_path)

    def replace(source: Path, target: Path) -> None:
        assert source.exists()
        raise error

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises((CheckpointError, KeyboardInterrupt)):
        stored(tmp_path, 2)
    assert names(tmp_path) == [Path(state.path).name]


def test_no_folder_can_be_made(tmp_path: Path) -> None:
    """A file in the place of the folder is an error that names the checkpoint."""
    (tmp_path / "run").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"run/000001-unit-1\.safetensors: File exists"):
        stored(tmp_path / "run")


def test_what_cannot_be_stored(tmp_path: Path) -> None:
    """A tree that cannot be packed is refused before anything is written."""
    with pytest.raises(CheckpointError, match=r"of trial 7 .* but history / 0 holds a"):
        write(tmp_path, {"history": [object()]}, trial=RUN, units=1)
    assert names(tmp_path) == []


# -- reading -----------------------------------------------------------------------------------


def test_no_checkpoint_is_a_beginning() -> None:
    """Nothing to read is no error."""
    assert read((), RUN, None) is None


def test_tensors_that_were_read_are_no_views(tmp_path: Path) -> None:
    """A gradient among them is detached in place by fastai's optimizers, for one."""
    gradient = found(stored(tmp_path))[1]["weight"]
    gradient.detach_().zero_()
    assert not gradient.any()


def test_the_newest_is_read(tmp_path: Path) -> None:
    """The newest checkpoint gives the tree that was written."""
    older, newest = stored(tmp_path, 1), stored(tmp_path, 2)
    state, back = found(newest, older)
    assert state == newest
    assert back["units"] == 2
    assert back["weight"].tolist() == [2.0] * 4


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def replaced(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def linked(path: Path) -> None:
    path.symlink_to(path.rename(path.with_suffix(".elsewhere")))


def made_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def made_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (Path.unlink, "cannot be read: No such file or directory"),
        (cut, r"must have \d+ bytes but has \d+"),
        (emptied, r"must have \d+ bytes but has 0"),
        (replaced, "is damaged: its SHA-256 must be [0-9a-f]{64} but is [0-9a-f]{64}"),
        (linked, "must be a file, not a link"),
        (made_a_folder, "must be a file"),
        (made_a_pipe, "must be a file"),
    ],
)
def test_the_one_before_is_read_when_the_newest_is_bad(
    harm: Callable[[Path], object],
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A warning names file, trial and reason, and says from where the trial goes on."""
    older, newest = stored(tmp_path, 1), stored(tmp_path, 2)
    harm(Path(newest.path))
    new, old = Path(newest.path).name, Path(older.path).name
    expected = rf"{new} of trial 7 {reason}.* Going on from {old}, after"
    state, back = found(newest, older)
    assert state == older
    assert back["units"] == 1
    assert re.search(expected, caplog.text)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_one_that_cannot_be_read_now_is_no_bad_one(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is away for a moment: no older checkpoint is taken for the newest."""
    older, newest = stored(tmp_path, 1), stored(tmp_path, 2)
    real = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if path == newest.path:
            raise OSError(number, os.strerror(number))
        return real(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        reason = os.strerror(number)
        with pytest.raises(CheckpointUnreachableError, match=f"unit-2.* cannot be read: {reason}"):
            found(newest, older)
    assert found(newest, older)[0] == newest


def test_none_is_good(tmp_path: Path) -> None:
    """Checkpoints of which none can be read are an error that names them all."""
    states = stored(tmp_path, 2), stored(tmp_path, 1)
    cut(Path(states[0].path))
    Path(states[1].path).unlink()
    with pytest.raises(
        CheckpointError, match=r"No checkpoint of trial 7 .*000001-unit-2.*000002-unit-1"
    ):
        read(states, RUN, tmp_path)


def test_every_byte_counts(tmp_path: Path) -> None:
    """One flipped bit, wherever it is, is noticed and called damage."""
    state = stored(tmp_path)
    good = Path(state.path).read_bytes()
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << position % 8
        Path(state.path).write_bytes(bad)
        with pytest.raises(CheckpointError, match="is damaged"):
            read((state,), RUN, tmp_path)


def of_another_trial(path: Path) -> None:
    Path(write(path.parent, tree(), trial="trial 8", units=1).path).rename(path)


def of_another_version(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"version":"10"', b'"version":"09"'))


def of_someone_else(path: Path) -> None:
    save_file({"weight": torch.ones(3)}, path, {"format": "pt"})


def without_metadata(path: Path) -> None:
    save_file({"weight": torch.ones(3)}, path)


def without_a_tree(path: Path) -> None:
    save_file({"0": torch.ones(3)}, path, {**_disk._FORMAT, "trial": RUN})


def of_an_unknown_dtype(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"F99"'))


def of_another_shape(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"shape":[4]', b'"shape":[9]'))


def of_overlapping_tensors(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"data_offsets":[16', b'"data_offsets":[12'))


def of_text(path: Path) -> None:
    path.write_text("A short one.")


def of_a_long_header(path: Path) -> None:
    path.write_bytes(b"\xff" * 8)


def of_nothing(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("wrote", "reason"),
    [
        (of_another_trial, "must be of trial 7 but is of trial 8"),
        (of_another_version, "must have format version 10 but has 09"),
        (of_someone_else, "must be a file that optuna-hermes wrote"),
        (without_metadata, "must be a file that optuna-hermes wrote"),
        (without_a_tree, "cannot be decoded: KeyError"),
        (of_an_unknown_dtype, "cannot be decoded: KeyError"),
        (of_another_shape, "cannot be decoded: RuntimeError"),
        (of_overlapping_tensors, "must be a file that optuna-hermes wrote"),
        (of_text, "must be a file that optuna-hermes wrote"),
        (of_a_long_header, "must be a file that optuna-hermes wrote"),
        (of_nothing, "must be a file that optuna-hermes wrote"),
    ],
)
def test_whole_but_not_a_checkpoint_of_this_run(
    wrote: Callable[[Path], object],
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A file that the ledger takes for ours, and is not, is an error like damage is."""
    older, newest = stored(tmp_path, 1), stored(tmp_path, 2)
    content = Path(newest.path).read_bytes()
    wrote(Path(newest.path))
    assert Path(newest.path).read_bytes() != content
    with pytest.raises(CheckpointError, match=f"{Path(newest.path).name} of trial 7 {reason}"):
        read((as_written(Path(newest.path)),), RUN, tmp_path)
    assert found(as_written(Path(newest.path)), older)[0] == older
    assert f"Going on from {Path(older.path).name}" in caplog.text


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._marker),)


@pytest.mark.parametrize("save", [torch.save, pickle.dump])
def test_nothing_is_unpickled(save: Callable[..., object], tmp_path: Path) -> None:
    """A pickle in the place of a checkpoint is refused and does nothing, in all its forms."""
    marker, path = tmp_path / "exploded", Path(stored(tmp_path).path)
    with path.open("wb") as file:
        save(Bomb(marker), file)
    with pytest.raises(CheckpointError, match="must be a file that optuna-hermes wrote"):
        read((as_written(path),), RUN, tmp_path)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Bomb(marker)))
    assert marker.exists(), "it would have done something"


# -- reading ahead -----------------------------------------------------------------------------


@pytest.fixture
def read_threads() -> Callable[[], None]:
    """``read_threads()`` waits until what was begun ahead is read."""

    def wait() -> None:
        for thread in threading.enumerate():
            if thread.name == "hermes-disk":
                thread.join(30)

    return wait


def test_read_ahead(tmp_path: Path, read_threads: Callable[[], None]) -> None:
    """A checkpoint that was read ahead is not read again, and not kept."""
    states = [stored(tmp_path)]
    read_ahead(states, RUN)
    read_threads()
    Path(states[0].path).unlink()
    assert read(tuple(states), RUN, tmp_path) is not None
    with pytest.raises(CheckpointError, match="No such file"):
        read(states, RUN, tmp_path)


def test_a_warning_of_reading_ahead(
    tmp_path: Path, read_threads: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A fault found in reading ahead is told where the checkpoint is asked for."""
    older, newest = stored(tmp_path, 1), stored(tmp_path, 2)
    cut(Path(newest.path))
    read_ahead((newest, older), RUN)
    read_threads()
    assert not caplog.records
    read((newest, older), RUN, tmp_path)
    assert f"Going on from {Path(older.path).name}" in caplog.text


def test_an_error_of_reading_ahead(tmp_path: Path) -> None:
    """That there is nothing to go on from is raised where it is asked for."""
    state = stored(tmp_path)
    cut(Path(state.path))
    read_ahead((state,), RUN)
    with pytest.raises(CheckpointError, match="No checkpoint of trial 7"):
        read((state,), RUN, tmp_path)


def test_something_else_was_read_ahead(tmp_path: Path) -> None:
    """Other checkpoints, and those of another trial, are read as if nothing had been."""
    one, two = stored(tmp_path, 1), stored(tmp_path, 2)
    read_ahead((one,), RUN)
    state, back = found(two)
    assert (state, back["units"]) == (two, 2)
    read_ahead((one,), RUN)
    with pytest.raises(CheckpointError, match="must be of trial 8 but is of trial 7"):
        read((one,), "trial 8", tmp_path)


def test_what_another_process_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_threads: Callable[[], None]
) -> None:
    """A fork has no thread that reads for it, and reads by itself."""
    state = stored(tmp_path)
    read_ahead((state,), RUN)
    read_threads()
    Path(state.path).unlink()
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(CheckpointError, match="No such file"):
        read((state,), RUN, tmp_path)


# -- the tier ----------------------------------------------------------------------------------


@dataclass
class Run:
    """A ``State`` as simple as can be."""

    units: int = 1
    name: str = RUN
    can_store: bool = True
    can_offload: bool = True

    def ended(self) -> bool:
        return False

    def roots(self) -> Iterable[object]:
        return ()

    def waits(self) -> None:
        """See ``CleanPoint``."""

    def saved(self) -> None:
        """See ``CleanPoint``."""

    def dump(self) -> dict[str, Any]:
        return tree(self.units)


def test_the_tier_gives_back_what_it_stored_last(tmp_path: Path) -> None:
    """Nothing stays on the device, and the tree of the last suspension comes back."""
    disk = DiskTier(tmp_path, known=tuple)
    for units in (1, 2):
        held = disk.suspend(Run(units))
        assert (held.device_bytes, held.host_bytes) == (0, 0)
        assert held.stored is not None
        assert held.stored.units == disk.resume()["units"] == units


def test_the_tier_keeps_what_the_ledger_names_now(tmp_path: Path) -> None:
    """Each suspension asks which files must stay."""
    known: list[Checkpoint] = []
    disk = DiskTier(tmp_path, lambda: known)
    states = [disk.suspend(Run(units)).stored for units in (1, 2)]
    known += [state for state in states[1:] if state is not None]
    disk.suspend(Run(3))
    assert names(tmp_path) == ["000002-unit-2.safetensors", "000003-unit-3.safetensors"]


def test_the_tier_reads_what_it_wrote_or_says_so(tmp_path: Path) -> None:
    """A trial that was never stored, or whose file is damaged, does not begin again in silence."""
    disk = DiskTier(tmp_path, known=tuple)
    with pytest.raises(CheckpointError, match="must be suspended into"):
        disk.resume()
    held = disk.suspend(Run())
    assert held.stored is not None
    cut(Path(held.stored.path))
    with pytest.raises(CheckpointError, match=r"of trial 7 must have \d+ bytes"):
        disk.resume()
