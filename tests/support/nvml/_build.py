"""Compilation of the stand-in library."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path


def why_not_built() -> str | None:
    """The reason why it cannot be compiled on this machine; None if it can."""
    if shutil.which("gcc") is None or sys.platform != "linux":
        return "needs gcc on Linux to compile a stand-in for the NVIDIA library"
    return None


def build(folder: Path) -> Path:
    """Compile it into a folder, which is to be put into ``LD_LIBRARY_PATH``."""
    source = Path(__file__).with_name("fake_nvml.c")
    target = folder / "libnvidia-ml.so.1"
    command = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(target), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return folder
