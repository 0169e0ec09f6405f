"""The benchmarks are scripts that anyone can run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def switch_cost(tmp_path: Path, *options: str) -> dict[str, Any]:
    script = str(BENCHMARKS / "switch_cost.py")
    short = ["--sizes=1", "--repetitions=1", "--switches=1", "--no-ray", "--json"]
    done = subprocess.run(
        [sys.executable, script, *short, *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_switch_cost_measures_a_tier(tmp_path: Path) -> None:
    """Two trials that keep their processes take turns, and host memory is where they waited."""
    result = switch_cost(tmp_path, "--tiers=host")
    (parked,) = result["park_and_resume"]
    assert parked["moved_bytes"] >= parked["state_bytes"] > 0.9e6
    assert parked["park_seconds"] > 0
    (row,) = result["switches"]
    assert row["by"] == "hermes, host"
    assert row["processes"] == 2
    assert 0 < row["median_seconds"] < row["with_first_step_seconds"]


@pytest.mark.slow
def test_switch_cost_measures_every_tier(tmp_path: Path) -> None:
    """Its smallest case gives figures for all tiers; a run on disk has a process a slice."""
    result = switch_cost(tmp_path)
    assert [row["tier"] for row in result["park_and_resume"]] == ["resident", "host", "disk"]
    processes = {row["by"]: row["processes"] for row in result["switches"]}
    assert processes.pop("hermes, disk") > 2
    assert processes == {"hermes, resident": 2, "hermes, host": 2}
    assert all(row["switches"] >= 1 for row in result["switches"])
