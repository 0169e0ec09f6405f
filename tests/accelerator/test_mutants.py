"""Faults that are planted into the product are noticed on the simulated accelerator.

As a script, this file trains with a fault that ends its process: ``test_mutants.py FOLDER``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from optuna_hermes.model import TierName
from optuna_hermes.suspend._tiers._accelerators import Accelerator
from optuna_hermes.suspend._tiers._arena import Arena
from optuna_hermes.testing import FakeSession
from optuna_hermes.workers import _fork_safety
from optuna_hermes.workers._fork_safety import Unsafe, why_not_fork
from support.accelerator import install, waiting
from support.accelerator.trainings import DEVICE, expected, others_train, suspended, train

pytestmark = pytest.mark.accelerator


class Hasty:
    """A stream that is never waited for."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        pass


def is_exact(tier: TierName, folder: Path) -> bool:
    """True if a training that is suspended once ends as the one that never was."""
    session = FakeSession({3: tier}, checkpoint_dir=folder, while_parked=others_train)
    if tier == "disk":
        session = suspended(session, "loop")
    return train(session, "loop") == expected("loop")


def left_behind(tier: TierName, folder: Path) -> int:
    """Return the amount of work that is queued when another trial gets the device."""
    left: list[int] = []
    train(
        FakeSession({3: tier}, checkpoint_dir=folder, while_parked=lambda: left.append(waiting())),
        "loop",
    )
    return left[0]


@pytest.fixture(autouse=True)
def _without_a_fault(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    expected("loop")


@pytest.mark.parametrize("tier", ["resident", "host", "disk"])
def test_nothing_is_noticed_without_a_fault(tier: TierName, tmp_path: Path) -> None:
    """Else the tests below would say nothing."""
    assert is_exact(tier, tmp_path)


def test_a_device_that_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Work is left to the next trial, and checkpoints are of tensors that are not written yet."""
    monkeypatch.setattr(Accelerator, "synchronize", lambda self, device: None)
    assert left_behind("resident", tmp_path / "resident") > 0
    assert not is_exact("disk", tmp_path / "disk")


def test_a_stream_that_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The training goes on before its tensors are back."""
    new, on = Accelerator.stream, Accelerator.on
    monkeypatch.setattr(Accelerator, "stream", lambda self, device: Hasty(new(self, device)))
    monkeypatch.setattr(Accelerator, "on", lambda self, hasty: on(self, hasty.stream))
    assert not is_exact("host", tmp_path)


def test_a_checkpoint_that_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A trial that goes on at once changes what is still to be copied."""
    new, on = Accelerator.stream, Accelerator.on
    monkeypatch.setattr(Accelerator, "stream", lambda self, device: Hasty(new(self, device)))
    monkeypatch.setattr(Accelerator, "on", lambda self, hasty: on(self, hasty.stream))
    session = FakeSession(checkpoint_dir=tmp_path)
    train(session, "loop")
    again = FakeSession(checkpoint_dir=tmp_path, checkpoints=session.checkpoints[-1:])
    assert train(again, "loop") != expected("loop")


@pytest.mark.parametrize("tier", ["resident", "disk"])
def test_a_forgotten_generator(
    tier: TierName, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Others, or the next process, draw other numbers on the device."""
    monkeypatch.setattr(Accelerator, "rng_states", lambda self: [])
    assert not is_exact(tier, tmp_path)


def test_a_context_that_is_made_before_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has used a device is not forked; without the check it would be."""
    torch.ones(1, device=DEVICE)
    assert why_not_fork() is Unsafe.ACCELERATOR
    monkeypatch.setattr(_fork_safety, "_accelerators_work", lambda: True)
    assert why_not_fork() is not Unsafe.ACCELERATOR


def test_device_memory_that_the_cpu_touches(tmp_path: Path) -> None:
    """The process ends at once."""
    folders = [str(Path(__file__).parents[1]), *sys.path]
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert done.stdout == "touching\n"


def touch(folder: Path) -> None:
    def keep(arena: Arena, storages: Sequence[torch.UntypedStorage]) -> None:
        print("touching", flush=True)
        for storage in storages:
            ctypes.string_at(storage.data_ptr(), storage.nbytes())

    install()
    Arena.keep = keep  # type: ignore[method-assign]
    train(FakeSession({3: "host"}, checkpoint_dir=folder), "loop")


if __name__ == "__main__":
    touch(Path(sys.argv[1]))
