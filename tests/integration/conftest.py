"""Surroundings that are not there: a driver of NVIDIA's, a host without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a ``libnvidia-ml.so.1`` of ours: see ``fake_nvml.c``."""
    compiler = shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs gcc on Linux to compile a stand-in for the NVIDIA library")
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).with_name("fake_nvml.c")
    target = folder / "libnvidia-ml.so.1"
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(target), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return folder


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    """An environment in which torch and Lightning cannot be imported: processes begin soon."""
    folder = tmp_path / "without-torch"
    folder.mkdir()
    for name in ("torch", "lightning"):
        (folder / f"{name}.py").write_text(f"raise ImportError('no {name} in this test')\n")
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path}
