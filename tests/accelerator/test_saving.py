"""States are copied off a device between two batches, and written while the training goes on."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from optuna_hermes.suspend._tiers import _accelerators
from optuna_hermes.suspend._tiers._copies import Copies
from optuna_hermes.suspend._tiers._saver import Saver
from optuna_hermes.suspend._values._tree import pack
from optuna_hermes.testing import FakeSession
from support.accelerator import KIND, pinned_bytes
from support.accelerator.trainings import TRAININGS, expected, train

pytestmark = pytest.mark.accelerator

FIRST, SECOND = f"{KIND}:0", f"{KIND}:1"
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _nothing_cached() -> Iterator[None]:
    torch.set_num_threads(1)
    torch.accelerator.empty_host_cache()
    yield
    torch.accelerator.empty_host_cache()


def large(value: float = 1.0, device: str = FIRST) -> torch.Tensor:
    """A tensor of 4 MiB."""
    return torch.full((MIB,), value, device=device)


# -- copies ------------------------------------------------------------------------------------


def test_a_copy_is_what_was_there(tmp_path: Path) -> None:
    """Of every type, shape and device, also where the original is a view or is there twice."""
    base = torch.arange(12.0, device=FIRST).reshape(3, 4)
    tree = {
        "whole": base,
        "again": base,
        "column": base[:, 1],
        "turned": base.T,
        "number": torch.tensor(3, device=FIRST),
        "nothing": torch.zeros(0, 2, device=FIRST),
        "half": torch.ones(3, device=FIRST).to(torch.bfloat16),
        "flags": torch.tensor([True, False], device=FIRST),
        "weight": nn.Parameter(torch.ones(2, device=SECOND)),
        "here": torch.ones(2),
        "plain": [1, ("a", 2.5)],
    }
    copy = Copies().copy(tree).tree
    assert copy["whole"] is copy["again"]
    for name, value in tree.items():
        if isinstance(value, torch.Tensor):
            assert copy[name].device.type == "cpu"
            assert (copy[name].dtype, copy[name].shape) == (value.dtype, value.shape)
            assert torch.equal(copy[name], value.detach().cpu())
    assert copy["plain"] == tree["plain"]


def test_no_later_kernel_changes_a_copy() -> None:
    """On whatever stream the training writes next, to the tensors or over their memory."""
    tensor, side = large(), torch.Stream(FIRST)
    kept = Copies().copy({"weight": tensor}).tree["weight"]
    with side:
        tensor.fill_(2.0)
    torch.accelerator.synchronize(FIRST)
    assert kept.eq(1.0).all()


def test_no_earlier_kernel_is_missed() -> None:
    """Also if it was queued on another stream."""
    tensor, side = large(), torch.Stream(FIRST)
    torch.accelerator.synchronize(FIRST)
    with side:
        tensor.fill_(2.0)
    assert Copies().copy({"weight": tensor}).tree["weight"].eq(2.0).all()


def test_a_copy_lies_in_pinned_memory_that_is_used_again() -> None:
    """Two buffers take turns, however often a state is saved, and are given back on request."""
    copies, before = Copies(), pinned_bytes()
    first = copies.copy({"weight": large(1.0)})
    one = pinned_bytes() - before
    assert one >= 4 * MIB
    second = copies.copy({"weight": large(2.0)})  # the first is still being written
    assert first.tree["weight"].eq(1.0).all()
    for value in range(3, 6):
        first.release()
        first, second = second, copies.copy({"weight": large(float(value))})
        assert second.tree["weight"].eq(value).all()
    assert pinned_bytes() - before == 2 * one
    first.release()
    copies.free()
    assert pinned_bytes() - before == one  # the second is still being written
    second.release()
    assert pinned_bytes() == before


def test_memory_that_is_short_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not be swapped; the copy is the same."""
    little = psutil.virtual_memory()._replace(available=8 * MIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: little)
    before = pinned_bytes()
    copy = Copies().copy({"weight": large(3.0)})
    assert copy.tree["weight"].eq(3.0).all()
    assert pinned_bytes() == before


def test_what_is_written_is_not_copied_once_more() -> None:
    """Small tensors lie in one block of memory; for each its own bytes are written."""
    tree = {str(number): torch.full((3,), float(number), device=FIRST) for number in range(5)}
    copy = Copies().copy(tree).tree
    tensors, _ = pack(copy, "trial 7")
    theirs = {each.untyped_storage().data_ptr() for each in copy.values()}
    assert {each.untyped_storage().data_ptr() for each in tensors.values()} == theirs
    assert all(each.untyped_storage().nbytes() == 12 for each in copy.values())


# -- checkpoints while a trial goes on ---------------------------------------------------------


@pytest.mark.parametrize("kind", TRAININGS)
def test_saved_while_it_trains(kind: str, tmp_path: Path) -> None:
    """A training that is killed goes on from what was saved, and ends as it would have."""
    session = FakeSession(checkpoint_dir=tmp_path)
    assert train(session, kind) == expected(kind)
    oldest = session.checkpoints[-1]
    assert oldest.units < 3
    again = FakeSession(checkpoint_dir=tmp_path, checkpoints=(oldest,))
    assert train(again, kind) == expected(kind)


def test_the_time_that_it_takes_is_told(tmp_path: Path) -> None:
    """Copying stops the training; writing does not."""
    session = FakeSession(checkpoint_dir=tmp_path)
    saver = Saver(session, "trial 7")
    saver.begin({"weight": large()}, units=1)
    saver.finish(wait=True)
    assert 0 < session.blocked_seconds < 60


def test_a_suspended_trial_pins_nothing_for_its_checkpoints(
    tmp_path: Path, wait_for: Callable[..., Any]
) -> None:
    """It may wait for hours; what its process pins nobody else can have."""
    before, seen = pinned_bytes(), []

    class Patient(FakeSession):
        def tick(self) -> None:
            if self._batches == 8:  # the checkpoint of the first unit is written
                seen.append(pinned_bytes() - before)
                wait_for(lambda: self.states)
            super().tick()

    session = Patient(
        {9: "resident"},
        checkpoint_dir=tmp_path,
        while_parked=lambda: seen.append(pinned_bytes() - before),
    )
    train(session, "loop")
    assert seen[0] > seen[1]


OBJECTIVE = """
import torch
from support.accelerator import KIND, install

def objective(trial):
    install()
    from optuna_hermes.pytorch import suspendable
    weight = torch.nn.Parameter(torch.ones(1 << 20, device=f"{KIND}:0"))
    optimizer = torch.optim.SGD([weight], trial.suggest_float("lr", 0.01, 0.1))
    run = suspendable(trial, optimizer=optimizer, weight=torch.nn.ParameterList([weight]))
    for _ in run.epochs(3):
        for _ in run.batches(range(4)):
            optimizer.zero_grad()
            (weight ** 2).mean().backward()
            optimizer.step()
        run.report((weight ** 2).mean().item())
    return run.value
"""


def test_it_is_counted_in_a_study(
    cli: Callable[..., subprocess.CompletedProcess[str]],
    storage_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As device time outside of batches."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    file = tmp_path / "objective.py"
    file.write_text(OBJECTIVE)
    options = ("--storage", storage_url, "--study-name", "s", "--n-trials", 2, "--json")
    done = cli("optimize", f"{file}:objective", *options, "--devices", "cpu:1")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["overhead_seconds"]["saving"] > 0
    assert sum(found["overhead_seconds"].values()) < found["elapsed_seconds"]


# -- what a checkpoint cannot hold -------------------------------------------------------------


def test_dropout_of_cudnn_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As soon as a trial is saved, once for its study."""
    monkeypatch.setitem(_accelerators._KINDS, KIND, _accelerators._Cuda)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    caplog.set_level(logging.WARNING)
    for number in range(2):
        train(FakeSession(checkpoint_dir=tmp_path / f"{number}"), "loop-recurrent")
    said = [each.getMessage() for each in caplog.records if "cuDNN" in each.getMessage()]
    assert len(said) == 1
    assert "Put nn.Dropout between layers of their own" in said[0]
