"""JobEnvironment that are not there: a driver of NVIDIA's, a host without torch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support import nvml


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a ``libnvidia-ml.so.1`` of ours: see ``fake_nvml.c``."""
    reason = nvml.why_not_built()
    if reason is not None:
        pytest.skip(reason)
    return nvml.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    """An environment in which torch and Lightning cannot be imported: processes begin soon."""
    folder = tmp_path / "without-torch"
    folder.mkdir()
    for name in ("torch", "lightning"):
        (folder / f"{name}.py").write_text(f"raise ImportError('no {name} in this test')\n")
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path}
