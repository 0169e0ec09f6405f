"""Trainings of the tests on the device, suspended into each tier, to the bit.

As a script, this file is the next process of a training: ``_gpu_exact.py FOLDER KIND [--dry-run]``.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _gpu_device import Add, Setting, open_device

Bits = dict[str, bytes]
NO_CUDNN = " without cuDNN"


def measure(setting: Setting, add: Add) -> None:
    """Add a row for each training and way of suspending it."""
    import torch

    from support.accelerator.trainings import TRAININGS

    torch.use_deterministic_algorithms(True)
    kinds = ["loop", "lightning"] if setting.dry else list(TRAININGS)
    for kind in kinds:
        _measure_kind(setting, add, kind, kind)
        if "recurrent" in kind:
            with torch.backends.cudnn.flags(enabled=False):
                _measure_kind(setting, add, kind, kind + NO_CUDNN)


def _measure_kind(setting: Setting, add: Add, kind: str, name: str) -> None:
    from optuna_hermes.testing import FakeSession
    from support.accelerator.trainings import train

    try:
        expected = train(FakeSession(), kind)
    except Exception as error:  # the next training may work
        add(training=name, tier="none", exact=False, error=_short(error))
        return
    for tier, end in _ways(setting, name).items():
        with tempfile.TemporaryDirectory(dir=setting.folder) as folder:
            try:
                found = end(Path(folder), kind)
            except Exception as error:
                add(training=name, tier=tier, exact=False, error=_short(error))
                continue
        differ = [part for part in expected if expected[part] != found[part]]
        add(training=name, tier=tier, exact=not differ, differ=", ".join(differ[:3]) or None)


def _ways(setting: Setting, name: str) -> dict[str, Callable[[Path, str], Bits]]:
    """The end of a training that is suspended, by the tier."""
    from optuna_hermes.testing import FakeSession
    from support.accelerator.trainings import others_train, suspended, train

    def whole(folder: Path, kind: str) -> Bits:
        return train(FakeSession(), kind)

    def resident(folder: Path, kind: str) -> Bits:
        session = FakeSession(
            {1: "resident", 9: "resident"}, checkpoint_dir=folder, while_parked=others_train
        )
        return train(session, kind)

    def host(folder: Path, kind: str) -> Bits:
        session = FakeSession(
            {4: "host", 6: "host", 14: "host"}, checkpoint_dir=folder, while_parked=others_train
        )
        return train(session, kind)

    def disk(folder: Path, kind: str) -> Bits:
        session = FakeSession({4: "disk"}, checkpoint_dir=folder)
        return train(suspended(suspended(session, kind).again({5: "disk"}), kind), kind)

    def saved(folder: Path, kind: str) -> Bits:
        session = FakeSession(checkpoint_dir=folder)
        train(session, kind)
        oldest = session.checkpoints[-1]
        return train(FakeSession(checkpoint_dir=folder, checkpoints=(oldest,)), kind)

    def another_process(folder: Path, kind: str) -> Bits:
        session = suspended(FakeSession({8: "disk"}, checkpoint_dir=folder), kind)
        found = json.dumps([asdict(checkpoint) for checkpoint in session.checkpoints])
        command = [sys.executable, __file__, str(folder), kind, *["--dry-run"] * setting.dry]
        cudnn = "0" if name.endswith(NO_CUDNN) else "1"
        done = subprocess.run(
            command,
            input=found,
            env={**os.environ, "TRAININGS_CUDNN": cudnn},
            text=True,
            capture_output=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        ended = json.loads(done.stdout.splitlines()[-1])
        return {part: bytes.fromhex(text) for part, text in ended.items()}

    return {
        "none": whole,
        "resident": resident,
        "host": host,
        "disk": disk,
        "saved while it trains": saved,
        "disk, another process": another_process,
    }


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


@contextlib.contextmanager
def _as_before() -> Iterator[None]:
    import torch

    torch.use_deterministic_algorithms(True)
    with torch.backends.cudnn.flags(enabled=os.environ["TRAININGS_CUDNN"] == "1"):
        yield


def next_process(folder: Path, kind: str, *, dry: bool) -> None:
    open_device(folder, dry=dry)
    from optuna_hermes.model import Checkpoint
    from optuna_hermes.testing import FakeSession
    from support.accelerator.trainings import train

    checkpoints: Any = tuple(Checkpoint(**each) for each in json.load(sys.stdin))
    with _as_before():
        ended = train(FakeSession(checkpoint_dir=folder, checkpoints=checkpoints), kind)
    print(json.dumps({name: content.hex() for name, content in ended.items()}))


if __name__ == "__main__":
    next_process(Path(sys.argv[1]), sys.argv[2], dry="--dry-run" in sys.argv)
