"""Trainings of the tests on the device, suspended into each tier, to the bit.

As a script, this file is the next process of a training, ``_gpu_exact.py FOLDER KIND [--dry-run]``,
or with ``--measure`` the process that measures one.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _gpu_device import Add, Setting, open_device

Bits = dict[str, bytes]
NO_CUDNN = " without cuDNN"


def measure(setting: Setting, add: Add) -> None:
    """Add a row for each training and way of suspending it; several trainings at a time."""
    names = ["loop", "lightning"] if setting.dry else list(_trainings().TRAININGS)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        measured = {pool.submit(_in_its_process, setting, name): name for name in names}
        for each in as_completed(measured):
            rows, error = each.result()
            for row in rows:
                add(training=measured[each], **row)
            if error:
                add(training=measured[each], tier="", exact=False, error=error)


def _in_its_process(setting: Setting, name: str) -> tuple[list[dict[str, Any]], str | None]:
    """The rows of one training, and the error of its process if it had one."""
    command = [sys.executable, __file__, str(setting.folder), name, "--measure"]
    command += ["--dry-run"] * setting.dry
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"tier"')]
    lines = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
    return rows, lines[-1] if done.returncode else None


def measure_one(folder: Path, name: str, *, dry: bool) -> None:
    """Print a line of JSON for each way of suspending a training."""
    setting = open_device(folder, dry=dry)
    from optuna_hermes.errors import Suspended
    from optuna_hermes.testing import FakeSession

    with _careful(name):
        try:
            expected = _trainings().train(FakeSession(), name)
        except Exception as error:
            print(json.dumps({"tier": "none", "exact": False, "error": _short(error)}))
            return
        for tier, end in _ways(setting, name).items():
            with tempfile.TemporaryDirectory(dir=setting.folder) as checkpoints:
                try:
                    found = end(Path(checkpoints))
                except (Exception, Suspended) as error:
                    row = {"exact": False, "error": _short(error)}
                else:
                    differ = [part for part in expected if expected[part] != found[part]]
                    row = {"exact": not differ, "differ": ", ".join(differ[:3]) or None}
            print(json.dumps({"tier": tier, **row}), flush=True)


def _trainings() -> Any:
    """The trainings of the tests and of GPUs; the device must be open by now."""
    import _gpu_trainings

    return _gpu_trainings.trainings


def _ways(setting: Setting, name: str) -> dict[str, Callable[[Path], Bits]]:
    """The end of a training that is suspended, by the tier."""
    from optuna_hermes.testing import FakeSession

    trainings = _trainings()
    train, suspended = trainings.train, trainings.suspended
    # What no checkpoint holds of cuDNN's dropout is lost when somebody seeds the device.
    seeds = "recurrent" not in name or name.endswith(NO_CUDNN)
    others_train = trainings.others_train if seeds else trainings.others_allocate

    def whole(folder: Path) -> Bits:
        return train(FakeSession(), name)

    def resident(folder: Path) -> Bits:
        session = FakeSession(
            {1: "resident", 9: "resident"}, checkpoint_dir=folder, while_parked=others_train
        )
        return train(session, name)

    def host(folder: Path) -> Bits:
        session = FakeSession(
            {4: "host", 6: "host", 14: "host"}, checkpoint_dir=folder, while_parked=others_train
        )
        return train(session, name)

    def disk(folder: Path) -> Bits:
        session = FakeSession({4: "disk"}, checkpoint_dir=folder)
        return train(suspended(suspended(session, name).again({5: "disk"}), name), name)

    def saved(folder: Path) -> Bits:
        session = FakeSession(checkpoint_dir=folder)
        train(session, name)
        oldest = session.checkpoints[-1]
        return train(FakeSession(checkpoint_dir=folder, checkpoints=(oldest,)), name)

    def another_process(folder: Path) -> Bits:
        session = suspended(FakeSession({8: "disk"}, checkpoint_dir=folder), name)
        found = json.dumps([asdict(checkpoint) for checkpoint in session.checkpoints])
        command = [sys.executable, __file__, str(folder), name, *["--dry-run"] * setting.dry]
        done = subprocess.run(command, input=found, text=True, capture_output=True, check=False)
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


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


@contextlib.contextmanager
def _careful(name: str) -> Iterator[None]:
    """Deterministic kernels, and no cuDNN where the name says so."""
    import torch

    torch.use_deterministic_algorithms(True)
    with torch.backends.cudnn.flags(enabled=not name.endswith(NO_CUDNN)):
        yield


def next_process(folder: Path, name: str, *, dry: bool) -> None:
    open_device(folder, dry=dry)
    from optuna_hermes.model import Checkpoint
    from optuna_hermes.testing import FakeSession

    checkpoints: Any = tuple(Checkpoint(**each) for each in json.load(sys.stdin))
    with _careful(name):
        ended = _trainings().train(
            FakeSession(checkpoint_dir=folder, checkpoints=checkpoints), name
        )
    print(json.dumps({part: content.hex() for part, content in ended.items()}))


if __name__ == "__main__":
    be: Callable[..., None] = measure_one if "--measure" in sys.argv else next_process
    be(Path(sys.argv[1]), sys.argv[2], dry="--dry-run" in sys.argv)
