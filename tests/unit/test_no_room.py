"""A disk that takes nothing costs no trial: what should be stored waits in memory until it does."""

from __future__ import annotations

import errno
import logging
import os
import resource
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

from optuna_hermes.errors import CheckpointError, CheckpointUnreachableError, UnwritableError
from optuna_hermes.pytorch import PyTorchLoop
from optuna_hermes.suspend import read, rng_state, set_rng_state, write
from optuna_hermes.suspend._tiers import _saver
from optuna_hermes.suspend._tiers._disk import read_ahead, why_unwritable
from optuna_hermes.suspend._tiers._saver import Saver
from optuna_hermes.suspend._tiers._tier_mover import TierMover
from optuna_hermes.testing import FakeSession
from support.tier_contract import Training

RUN = "trial 7"


class FullDisk:
    """Refuses to make anything safe until there is ``room``, as the kernel does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = False
        self.refused = 0
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self)
        monkeypatch.setattr(_saver, "RETRY_SECONDS", 0.01)
        monkeypatch.setattr(_saver, "_SHARE", 0)

    def __call__(self, descriptor: int) -> None:
        if not self.room:
            self.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        self._fsync(descriptor)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    return FullDisk(monkeypatch)


def tree(units: int) -> dict[str, Any]:
    return {"units": units, "weight": torch.full((4,), float(units))}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_checkpoint_waits_for_room(
    disk: FullDisk, tmp_path: Path, wait_for: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The trial goes on, people are told once, and the checkpoint is written as there is room."""
    session = FakeSession(checkpoint_dir=tmp_path)
    saver = Saver(session, RUN)
    saver.begin(tree(1), units=1)
    wait_for(lambda: disk.refused > 2)
    saver.finish(wait=False)
    assert saver.busy
    assert list(tmp_path.glob("*.safetensors")) == []
    (warning,) = warnings_of(caplog)
    assert warning.startswith("Trial 7 goes on without a new checkpoint. Cannot write checkpoint ")
    assert warning.endswith("000001-unit-1.safetensors: No space left on device. Make room there.")
    disk.room = True
    wait_for(lambda: session.states)
    saver.finish(wait=True)
    assert not saver.busy
    assert not saver.gave_up
    assert [path.name for path in tmp_path.iterdir()] == ["000001-unit-1.safetensors"]
    found = read(session.checkpoints, RUN, tmp_path)
    assert found is not None
    assert found[1]["units"] == 1


def test_a_later_state_takes_the_place_of_one_that_waits(
    disk: FullDisk, tmp_path: Path, wait_for: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Only the newest waits in memory, it alone is written, and nothing more is said."""
    session = FakeSession(checkpoint_dir=tmp_path)
    saver = Saver(session, RUN)
    for units in (1, 2, 3):
        refused = disk.refused
        saver.begin(tree(units), units=units)
        wait_for(lambda refused=refused: disk.refused > refused)
    disk.room = True
    wait_for(lambda: session.states)
    saver.finish(wait=True)
    assert [state.units for state in session.states] == [3]
    assert len(warnings_of(caplog)) == 1
    disk.room = False
    saver.begin(tree(4), units=4)
    wait_for(lambda: len(warnings_of(caplog)) == 2)  # another time that the disk is full
    saver.finish(wait=True)
    assert saver.gave_up
    assert not saver.busy


def test_a_save_that_was_given_up_for_a_suspension_is_due_again(
    disk: FullDisk, tmp_path: Path, wait_for: Callable[..., Any]
) -> None:
    """The trial waits on its device instead, and goes on as soon as it gets that again."""

    def makes_room() -> None:
        disk.room = True

    session = FakeSession({6: "disk"}, checkpoint_dir=tmp_path, while_parked=makes_room)
    run = PyTorchLoop(optuna.create_study().ask(), {"model": torch.nn.Linear(1, 1)}, session)
    for unit in run.epochs(2):
        for batch in run.batches(range(4)):
            session.tick()
            if (unit, batch) == (1, 1):
                wait_for(lambda: disk.refused)  # that of the unit before
        run.report(0.0)
    assert session.parks == ["resident"]
    assert [state.units for state in session.states] == [1]


def test_what_cannot_be_stored_is_the_trials_end(tmp_path: Path) -> None:
    """Waiting would not help."""
    saver = Saver(FakeSession(checkpoint_dir=tmp_path), RUN)
    saver.begin({"object": object()}, units=1)
    with pytest.raises(CheckpointError, match="must hold only tensors"):
        saver.finish(wait=True)


def a_file(folder: Path) -> Callable[[], object]:
    folder.write_text("")
    return folder.unlink


def a_file_above(folder: Path) -> Callable[[], object]:
    folder.parent.rmdir()
    folder.parent.write_text("")
    return folder.parent.unlink


def a_link(folder: Path) -> Callable[[], object]:
    folder.symlink_to("/tmp")
    return folder.unlink


def forbidden(folder: Path) -> Callable[[], object]:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    folder.mkdir(mode=0o500)
    return lambda: folder.chmod(0o700)


@pytest.mark.parametrize("fault", [a_file, a_file_above, a_link, forbidden])
def test_a_folder_that_cannot_be_written(
    fault: Callable[[Path], Callable[[], object]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The trial waits in memory, people are told once what to do; it is stored once it can be."""
    folder = tmp_path / "study" / "trial"
    folder.parent.mkdir()
    undo = fault(folder)
    run = Training()
    run.train(1)
    parking = TierMover(folder, lambda: ())
    for _ in range(2):
        assert parking.put(run, "disk").stored is None
        assert parking.tier == "resident"
        parking.back()
    (warning,) = warnings_of(caplog)
    assert warning.startswith("Trial 7 waits where it is: ")
    if fault is not a_link:
        assert warning.endswith(" Let this user write there, or give another checkpoint_dir.")
    undo()
    assert parking.put(run, "disk").stored is not None


class Mount:
    """A file system whose own folder cannot be looked at while it is ``away``."""

    def __init__(self, folder: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.away = False
        self.refused = 0
        self._folder = str(folder)
        self._error = number, os.strerror(number)
        for name in ("stat", "lstat", "listdir", "scandir", "mkdir", "open"):
            monkeypatch.setattr(os, name, partial(self._call, getattr(os, name)))
        monkeypatch.setattr(_saver, "RETRY_SECONDS", 0.01)
        monkeypatch.setattr(_saver, "_SHARE", 0)

    def _call(self, call: Callable[..., Any], path: Any, *args: Any, **named: Any) -> Any:
        if self.away and str(path).startswith(self._folder):
            self.refused += 1
            raise OSError(*self._error)
        return call(path, *args, **named)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOTCONN, errno.EACCES, errno.EIO])
def test_a_folder_whose_mount_is_away(
    number: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wait_for: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No trial ends: a unit waits, a suspended one stays in memory, a stored one is read later."""
    folder = tmp_path / "trial"
    session = FakeSession(checkpoint_dir=folder)
    saver = Saver(session, RUN)
    saver.begin(tree(1), units=1)
    saver.finish(wait=True)
    mount = Mount(folder, number, monkeypatch)
    mount.away = True
    with pytest.raises(
        CheckpointUnreachableError, match=f"unit-1.* cannot be read: {os.strerror(number)}"
    ):
        read(session.checkpoints, RUN, folder)
    parking = TierMover(folder, lambda: ())
    assert parking.put(Training(), "disk").stored is None
    assert parking.tier == "resident"
    refused = mount.refused
    saver.begin(tree(2), units=2)
    wait_for(lambda: mount.refused > refused)
    saver.finish(wait=False)
    assert saver.busy
    mount.away = False
    wait_for(lambda: len(session.states) == 2)
    saver.finish(wait=True)
    found = read(session.checkpoints, RUN, folder)
    assert found is not None
    assert found[1]["units"] == 2
    assert all(os.strerror(number) in warning for warning in warnings_of(caplog))
    assert len(warnings_of(caplog)) == 2


def test_no_thread_can_be_started(
    disk: FullDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a limit of processes the trial itself writes and reads, and waits for no room."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    session = FakeSession(checkpoint_dir=tmp_path)
    saver = Saver(session, RUN)
    saver.begin(tree(1), units=1)
    saver.finish(wait=False)
    assert saver.gave_up
    assert not saver.busy
    disk.room = True
    saver.begin(tree(2), units=2)
    saver.finish(wait=False)
    assert not saver.gave_up
    assert not saver.busy
    read_ahead(session.checkpoints, RUN)
    found = read(session.checkpoints, RUN, tmp_path)
    assert found is not None
    assert found[1]["units"] == 2


def test_as_another_user(tmp_path: Path) -> None:
    """A folder of somebody else is refused by the kernel, and that is said."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    theirs = Path(tempfile.mkdtemp(prefix="hermes-", dir="/tmp"))
    theirs.chmod(0o755)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        os.write(writer, str(why_unwritable(theirs / "study")).encode())
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(reader, 1000).decode()
    for end in (reader, writer):
        os.close(end)
    theirs.rmdir()
    assert said == (
        f"Cannot write into {theirs / 'study'}: Permission denied. Let this user write there, or "
        "give another checkpoint_dir."
    )


def test_a_file_that_a_limit_makes_too_large(tmp_path: Path) -> None:
    """The limit is named (``ulimit -f``): this user may write there."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(UnwritableError) as error:
            write(tmp_path, {"weight": torch.zeros(10_000)}, trial=RUN, units=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(error.value).endswith(
        " Raise the limit of a file's size (`ulimit -f`), or give another checkpoint_dir."
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("first", ["disk", "host", "resident"])
def test_a_trial_that_should_be_stored_waits_where_it_is(
    first: Any, disk: FullDisk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It can be asked again, goes on unchanged, and is stored as there is room."""
    run, rng = Training(), rng_state()
    run.train(1)
    parking = TierMover(tmp_path, lambda: ())
    parking.put(run, first)
    held = parking.put(run, "disk")
    assert held.stored is None
    assert parking.tier == ("resident" if first == "disk" else first)
    assert list(tmp_path.iterdir()) == []
    assert parking.can_store(run)
    parking.back()
    run.train(2)
    parking.put(run, "disk")
    (warning,) = warnings_of(caplog)
    assert warning.startswith("Trial 7 waits where it is: Cannot write checkpoint ")
    parking.back()
    twin = Training()
    set_rng_state(rng)
    twin.train(2)
    assert run.losses == twin.losses
    disk.room = True
    stored = parking.put(run, "disk").stored
    assert stored is not None
    assert parking.tier == "disk"
    assert read((stored,), RUN, tmp_path) is not None
