"""Compilation of the simulated accelerator, once for each version of torch and of its sources."""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import filelock
import torch

_SOURCES = Path(__file__).parent
_HOST = _SOURCES.parent / "nvml" / "host.h"
_NAME = "simulated_accelerator"


def why_not_built() -> str | None:
    """The reason why it cannot be compiled on this machine; None if it can."""
    with _scripts_on_path():
        missing = [each for each in ("g++", "ninja") if shutil.which(each) is None]
    return f"Compiling the simulated accelerator needs {' and '.join(missing)}" if missing else None


def built() -> Path:
    """The compiled library; compiling takes about a minute, the first time."""
    parts = sorted([*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h"), _HOST])
    versions = f"{torch.__version__} {sys.version}"
    content = versions.encode() + b"".join(part.read_bytes() for part in parts)
    folder = _cache() / hashlib.sha256(content).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{_NAME}.so"
    # Without the lock, tests that run side by side would compile into one folder.
    with filelock.FileLock(f"{folder}.lock"):
        if not library.exists():
            _compile(parts, folder)
    return library


def _compile(parts: list[Path], folder: Path) -> None:
    from torch.utils import cpp_extension

    work = folder / "work"
    work.mkdir(exist_ok=True)
    with _scripts_on_path():
        cpp_extension.load(
            _NAME,
            [str(part) for part in parts if part.suffix == ".cpp"],
            extra_cflags=["-O1", "-g0"],
            build_directory=str(work),
            is_python_module=False,
        )
    # At last: a compilation that is killed leaves no library behind.
    os.replace(work / f"{_NAME}.so", folder / f"{_NAME}.so")


@contextlib.contextmanager
def _scripts_on_path() -> Iterator[None]:
    # The ninja of PyPI lies beside this Python, whose folder need not be on PATH.
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{sysconfig.get_path('scripts')}{os.pathsep}{before}"
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _cache() -> Path:
    return Path(tempfile.gettempdir()) / f"optuna-hermes-accelerator-{getpass.getuser()}"
