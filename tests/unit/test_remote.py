"""Checkpoints in a store that hosts reach by a URL: as safe and as exact as those in a folder."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import optuna
import pytest
import torch

from optuna_hermes.errors import (
    CheckpointError,
    CheckpointUnreachableError,
    InvalidInputError,
    UnwritableError,
)
from optuna_hermes.suspend import read, write
from optuna_hermes.suspend._tiers import _remote, _saver
from optuna_hermes.suspend._tiers._disk import read_ahead, remove_copies
from optuna_hermes.suspend._tiers._saver import Saver
from optuna_hermes.suspend._tiers._tier_mover import TierMover
from optuna_hermes.testing import FakeSession
from optuna_hermes.workers._open_study import checkpoint_place
from support.tier_contract import Training

NAME = "trial 7"


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The place of a trial's checkpoints in an empty store."""
    if request.param == "memory":
        fsspec.filesystem("memory").store.clear()
        return "memory://bucket/study/trial-00007"
    return f"file://{tmp_path}/bucket/study/trial-00007"


def tree(units: int) -> dict[str, Any]:
    return {"units": units, "weight": torch.full((4,), float(units))}


def names(url: str) -> list[str]:
    return sorted(Path(file.url).name for file in _remote.files(url))


def test_another_host_reads_the_newest_checkpoint_and_counts_on(tmp_path: Path, url: str) -> None:
    """The store is all they share; what the ledger does not name any more goes from it."""
    here, there = tmp_path / "a", tmp_path / "b"
    first = write(here, tree(1), trial=NAME, units=1, url=url)
    second = write(here, tree(2), trial=NAME, units=2, known=[first], url=url)
    assert second.path.startswith(f"{url}/000002-unit-2-")

    found = read([second, first], NAME, there, url)
    assert found is not None
    assert found[0] == second
    assert torch.equal(found[1]["weight"], torch.full((4,), 2.0))
    third = write(there, tree(3), trial=NAME, units=3, known=[second], url=url)
    assert names(url) == sorted(Path(each.path).name for each in (second, third))
    assert sorted(path.name for path in there.iterdir()) == names(url), "copies of what is there"

    remove_copies(there)
    assert list(there.iterdir()) == []
    assert len(names(url)) == 2


def test_a_number_that_two_hosts_have_used_overwrites_nothing(tmp_path: Path, url: str) -> None:
    """As after a host that was taken for dead has written once more."""
    first = write(tmp_path / "a", tree(1), trial=NAME, units=1, url=url)
    other = write(tmp_path / "b", tree(5), trial=NAME, units=1, url=url)
    for state, units in ((first, 1), (other, 5)):
        found = read([state], NAME, tmp_path / "c", url)
        assert found is not None
        assert found[1]["units"] == units


@pytest.mark.parametrize(
    ("told", "changed"),
    [
        ({"updated": "1970-01-01T00:01:00.250Z"}, 60.25),
        ({"LastModified": "Thu, 01 Jan 1970 00:01:00 GMT"}, float("inf")),
        ({"LastModified": "Thu, 01 Jan 1970 00:01:00 GMT", "created": 60}, 60.0),
        ({}, float("inf")),
    ],
)
def test_a_time_that_is_told_in_another_way_is_not_known(
    told: dict[str, Any], changed: float
) -> None:
    """Such a file is never old enough to be removed."""
    assert _remote._changed(told) == changed


def test_a_copy_is_read_without_the_store(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host that wrote a checkpoint, or has read ahead, downloads nothing."""
    stored = write(tmp_path / "a", tree(1), trial=NAME, units=1, url=url)
    read_ahead([stored], NAME, tmp_path / "b", url)
    assert read([stored], NAME, tmp_path / "b", url) is not None
    monkeypatch.setattr(_remote, "get", None)
    assert read([stored], NAME, tmp_path / "a", url) is not None
    assert read([stored], NAME, tmp_path / "b", url) is not None


def test_a_damaged_copy_is_fetched_again(tmp_path: Path, url: str) -> None:
    """The store has it intact, so that no older one is taken."""
    stored = write(tmp_path / "a", tree(1), trial=NAME, units=1, url=url)
    (copy,) = tmp_path.glob("a/*.safetensors")
    intact = copy.read_bytes()
    copy.write_bytes(intact[:-1] + b"?")
    found = read([stored], NAME, tmp_path / "a", url)
    assert found is not None
    assert found[1]["units"] == 1
    assert copy.read_bytes() == intact


def test_what_was_changed_in_the_store_is_refused(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The digest is compared after a download; the one before it is taken, with a warning."""
    first = write(tmp_path / "a", tree(1), trial=NAME, units=1, url=url)
    second = write(tmp_path / "a", tree(2), trial=NAME, units=2, known=[first], url=url)
    store, _ = fsspec.core.url_to_fs(url)
    store.pipe_file(second.path, b"x" * second.size_bytes)
    found = read([second, first], NAME, tmp_path / "b", url)
    assert "SHA-256" in caplog.text
    assert found is not None
    assert found[0] == first
    store.rm_file(first.path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read([first], NAME, tmp_path / "c", url)


@pytest.mark.parametrize("place", ["{url}/../x/{name}", "{url}/{name}/", "{url}x/{name}"])
def test_a_ledger_cannot_name_an_object_elsewhere(tmp_path: Path, url: str, place: str) -> None:
    """Nothing is fetched from outside of the trial's place, nor without one."""
    stored = write(tmp_path / "a", tree(1), trial=NAME, units=1, url=url)
    name = Path(stored.path).name
    other = type(stored)(
        path=place.format(url=url, name=name), units=1, size_bytes=1, sha256=stored.sha256
    )
    for state, where in ((other, url), (stored, None)):
        with pytest.raises(CheckpointError, match="must lie in its folder"):
            read([state], NAME, tmp_path / "b", where)
    assert not (tmp_path / "b").exists()


class AwayStore:
    """Takes nothing until it is ``back``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.back = False
        self.refused = 0
        self._put = _remote._store
        monkeypatch.setattr(_remote, "_store", self)
        monkeypatch.setattr(_saver, "RETRY_SECONDS", 0.01)
        monkeypatch.setattr(_saver, "_SHARE", 0)

    def __call__(self, url: str) -> Any:
        if not self.back:
            self.refused += 1
            raise RuntimeError("Could not connect to the endpoint URL")
        return self._put(url)


def test_a_checkpoint_waits_for_a_store_that_is_away(
    tmp_path: Path,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    wait_for: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As for room on a disk: people are told once, no copies pile up, and it is written then."""
    away = AwayStore(monkeypatch)
    session = FakeSession(checkpoint_dir=tmp_path / "a", checkpoint_url=url)
    saver = Saver(session, NAME)
    saver.begin(tree(1), units=1)
    wait_for(lambda: away.refused > 2)
    saver.finish(wait=False)
    assert saver.busy
    (said,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert said.startswith("Trial 7 goes on without a new checkpoint. Cannot write into ")
    assert "Could not connect to the endpoint URL. Bring that store back" in said
    away.back = True
    wait_for(lambda: session.states)
    saver.finish(wait=True)
    assert not saver.gave_up
    assert [each.path for each in session.states] == [f"{url}/{names(url)[0]}"]
    assert [path.name for path in (tmp_path / "a").iterdir()] == names(url)


def test_a_checkpoint_is_read_once_its_store_is_back(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither is an older one taken, nor is the trial given up."""
    monkeypatch.setattr(_remote, "_PAUSE_SECONDS", 0.01)
    here = tmp_path / "a"
    first = write(here, tree(1), trial=NAME, units=1, url=url)
    second = write(here, tree(2), trial=NAME, units=2, known=[first], url=url)
    (here / second.path.rpartition("/")[2]).unlink()
    away = AwayStore(monkeypatch)
    monkeypatch.setattr(time, "sleep", lambda seconds: setattr(away, "back", away.refused > 2))
    found = read([second, first], NAME, here, url)
    assert found is not None
    assert found[0] == second
    (said,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert said.startswith(f"waits for checkpoint {second.path}")


def test_a_store_that_stays_away_is_not_waited_for_without_end(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the checkpoint."""
    monkeypatch.setattr(_remote, "STORE_AWAY_SECONDS", 0.05)
    monkeypatch.setattr(_remote, "_PAUSE_SECONDS", 0.01)
    only = write(tmp_path / "a", tree(1), trial=NAME, units=1, url=url)
    AwayStore(monkeypatch)
    with pytest.raises(CheckpointUnreachableError, match="cannot be read: Could not connect"):
        read([only], NAME, tmp_path / "b", url)


@pytest.mark.parametrize(
    "error",
    [PermissionError("Access Denied"), OSError(errno.ENOSPC, "No space left on device")],
    ids=["not for this user", "no place here"],
)
def test_what_another_host_could_read_is_not_waited_for(
    error: OSError, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is an older one taken for it."""
    first = write(tmp_path / "a", tree(1), trial=NAME, units=1, url=url)
    second = write(tmp_path / "a", tree(2), trial=NAME, units=2, known=[first], url=url)

    def refuse(*words: object) -> None:
        raise error

    monkeypatch.setattr(_remote, "_download", refuse)
    monkeypatch.setattr(time, "sleep", None)
    with pytest.raises(CheckpointUnreachableError, match="cannot be read"):
        read([second, first], NAME, tmp_path / "b", url)


def test_a_trial_waits_in_memory_while_its_store_is_away(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked to go to disk, stays, and goes there once the store is back."""
    away = AwayStore(monkeypatch)
    training = Training()
    mover = TierMover(tmp_path / "a", lambda: [], url)
    assert mover.put(training, "disk").stored is None
    assert mover.tier == "resident"
    away.back = True
    stored = mover.put(training, "disk").stored
    assert mover.tier == "disk"
    assert stored is not None
    assert read([stored], training.name, tmp_path / "b", url) is not None


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("memory://bucket/runs", "seen by other processes"),
        ("ftp://ann:s3cret@host/runs", "must hold no password"),
        ("s3://bucket/runs?secret=s3cret", "must hold no password"),
        ("nonsense://bucket/runs", "fsspec knows"),
        (Path("s3://bucket/runs"), "give it as a str"),
        ("s3://", "like s3://BUCKET/FOLDER"),
    ],
)
def test_a_url_that_cannot_hold_checkpoints_is_refused_without_its_secrets(
    place: str | Path, words: str
) -> None:
    """One line that says what to do, for a log that others read."""
    with pytest.raises(InvalidInputError) as caught:
        _remote.check_url(place)
    assert words in str(caught.value)
    assert "s3cret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_store_is_tried_before_a_study_begins(tmp_path: Path, url: str) -> None:
    """Nothing is left of the trial, and a place that takes nothing is named."""
    _remote.check_url(f"file://{tmp_path}")
    assert _remote.why_unwritable(url) is None
    assert names(url) == []
    (tmp_path / "file").touch()
    assert "Cannot write into file://" in str(_remote.why_unwritable(f"file://{tmp_path}/file/x"))


def test_copies_are_elsewhere_where_the_usual_place_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container: without a copy a trial of another host could not be read."""
    (tmp_path / "study.db.hermes").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    url = f"file://{tmp_path}/bucket"
    unused: Any = SimpleNamespace(shared=False)
    study = optuna.create_study(storage=f"sqlite:///{tmp_path}/study.db")
    root, place, problem = checkpoint_place(study, unused, url, print)
    assert problem is None
    assert root.parent == tmp_path / f"optuna-hermes-copies-{os.getuid()}"
    assert str(place).startswith(f"{url}/")


def test_a_store_that_is_away_is_no_empty_one(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage collection must not believe that all is gone."""
    AwayStore(monkeypatch)
    with pytest.raises(UnwritableError):
        names(url)
    with pytest.raises(CheckpointError):
        _remote.exists(f"{url}/x")
