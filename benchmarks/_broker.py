"""A broker of its own for a benchmark."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from optuna_hermes.broker._election import RUNTIME_DIR_VARIABLE, socket_path

START_SECONDS = 60.0


@contextmanager
def broker(
    folder: Path, devices: str, command: Sequence[str] | None = None
) -> Iterator[psutil.Process]:
    """A broker that listens in ``folder``, where this process and its children find it too.

    It stays until the end of the block, however idle it is, and logs to ``broker.log``.

    Args:
        folder: empty, and this benchmark's alone.
        devices: as ``--devices``.
        command: starts a broker that differs from the usual one.
    """
    directory = folder / "run"
    os.environ[RUNTIME_DIR_VARIABLE] = str(directory)
    usual = [sys.executable, "-m", "optuna_hermes", "broker", "--devices", devices]
    with (folder / "broker.log").open("wb") as log:
        process = subprocess.Popen(command or usual, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not socket_path(directory).exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit((folder / "broker.log").read_text())
            time.sleep(0.02)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()
