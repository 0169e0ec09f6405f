"""Fixtures for tests of real engines."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.engines import OBJECTIVE, Cluster, Training


@pytest.fixture
def training(tmp_path: Path) -> Training:
    (tmp_path / "train.py").write_text(OBJECTIVE)
    return Training(tmp_path)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    programs = ("slurmctld", "slurmd", "munged", "sbatch")
    missing = [name for name in programs if not shutil.which(name)]
    if missing:
        pytest.skip(f"needs {missing[0]}: apt-get install slurm-wlm munge")
    if os.geteuid() != 0:
        pytest.skip("SLURM's daemons are started as root")
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    folder.chmod(0o755)
    made = Cluster(folder)
    try:
        made.start()
        yield made
    finally:
        made.close()
        shutil.rmtree(folder, ignore_errors=True)
