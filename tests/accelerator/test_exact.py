"""A training on an accelerator that is suspended is, bit for bit, the one that never was.

As a script, this file is the next process of a training: ``test_exact.py FOLDER KIND``.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

from optuna_hermes.model import Checkpoint, TierName
from optuna_hermes.suspend._values._custom import ValueReader, ValueWriter
from optuna_hermes.suspend._values._kept import KeptValues
from optuna_hermes.suspend._values._tree import frozen
from optuna_hermes.testing import FakeSession
from support.accelerator import KIND, install, waiting
from support.accelerator.trainings import (
    DEVICE,
    TRAININGS,
    expected,
    others_train,
    suspended,
    train,
)

pytestmark = pytest.mark.accelerator


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


# -- exactness ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TRAININGS)
def test_in_memory(kind: str, tmp_path: Path) -> None:
    """A trial that waits on its device, and in host memory, goes on as it was."""
    yields: dict[int, TierName] = {1: "resident", 4: "host", 6: "host", 9: "resident", 14: "host"}
    session = FakeSession(yields, checkpoint_dir=tmp_path, while_parked=others_train)
    assert train(session, kind) == expected(kind)
    assert session.parks == ["resident", "host", "host", "resident", "host"]


@pytest.mark.parametrize("kind", TRAININGS)
def test_on_disk(kind: str, tmp_path: Path) -> None:
    """A trial that is stored, within epochs and between, is resumed as it was."""
    session = FakeSession({4: "disk"}, checkpoint_dir=tmp_path)
    session = suspended(session, kind).again({2: "disk"})
    session = suspended(session, kind).again({5: "disk"})
    assert train(suspended(session, kind), kind) == expected(kind)


@pytest.mark.parametrize("kind", TRAININGS)
def test_from_host_memory_to_disk(kind: str, tmp_path: Path) -> None:
    """A trial that waited in host memory is stored from there."""
    session = FakeSession(
        {7: "host"}, checkpoint_dir=tmp_path, while_parked=others_train, evicts=("disk",)
    )
    assert train(suspended(session, kind), kind) == expected(kind)


@pytest.mark.parametrize("kind", TRAININGS)
def test_in_another_process(kind: str, tmp_path: Path) -> None:
    """A trial is resumed by a process that has never used the device."""
    session = suspended(FakeSession({8: "disk"}, checkpoint_dir=tmp_path), kind)
    found = json.dumps([asdict(checkpoint) for checkpoint in session.checkpoints])
    folders = [str(Path(__file__).parents[1]), *sys.path]
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path), kind],
        input=found,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]  # Hugging Face's Trainer prints what it logs
    ended = {name: bytes.fromhex(text) for name, text in json.loads(last).items()}
    assert ended == expected(kind)


def next_process(folder: Path, kind: str) -> None:
    install()
    torch.set_num_threads(1)
    checkpoints = tuple(Checkpoint(**each) for each in json.load(sys.stdin))
    ended = train(FakeSession(checkpoint_dir=folder, checkpoints=checkpoints), kind)
    print(json.dumps({name: content.hex() for name, content in ended.items()}))


# -- what others find on the device ------------------------------------------------------------


@pytest.mark.parametrize("tier", ["resident", "host"])
def test_the_device_is_idle_when_it_is_handed_on(tier: TierName, tmp_path: Path) -> None:
    """Else the next trial would be timed with the rest of this one's work."""
    left: list[int] = []
    session = FakeSession(
        {3: tier}, checkpoint_dir=tmp_path, while_parked=lambda: left.append(waiting())
    )
    train(session, "loop")
    assert left == [0]


def test_the_device_is_empty_while_a_trial_waits_in_host_memory(tmp_path: Path) -> None:
    """All that its objects lead to is gone, and the cache of the allocator with it."""
    left: list[int] = []

    def look() -> None:
        left.append(torch.accelerator.memory_allocated(DEVICE))
        torch.accelerator.synchronize(DEVICE)

    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated(DEVICE)
    train(FakeSession({3: "host"}, checkpoint_dir=tmp_path, while_parked=look), "loop")
    assert left[0] <= before


def test_a_value_comes_back_to_the_device() -> None:
    """Also where none is there now, from a checkpoint, whose tensors are in the CPU's memory."""
    kind, value, *rest = ValueWriter().write_only("it", torch.ones(3, device=f"{KIND}:0"))
    back = ValueReader(None).node([kind, value.cpu(), *rest], None)
    assert (back.device, back.tolist()) == (torch.device(f"{KIND}:0"), [1.0] * 3)


def test_kept_values_may_be_on_the_device_in_part() -> None:
    """As a copy of Adam's state is, which counts steps in main memory."""
    weight = nn.Parameter(torch.ones(3, device=DEVICE))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.ones(3, device=DEVICE)
    optimizer.step()
    kept, back = KeptValues(), KeptValues()
    kept.values["best"] = copy.deepcopy(optimizer.state_dict())
    kept.values["loss"] = [torch.ones((), device=DEVICE)]
    back.load_state_dict(frozen(kept.state_dict(dict)), dict)
    devices = {name: each.device.type for name, each in back.values["best"]["state"][0].items()}
    assert devices == {"step": "cpu", "exp_avg": KIND, "exp_avg_sq": KIND}
    assert back.values["loss"][0].device.type == KIND


if __name__ == "__main__":
    next_process(Path(sys.argv[1]), sys.argv[2])
