"""The benchmarks are scripts that anyone can run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_switch_cost_measures_every_tier(tmp_path: Path) -> None:
    """Its smallest case gives figures of one run and of two trials, for all three tiers."""
    script = str(BENCHMARKS / "switch_cost.py")
    options = ["--sizes=1", "--repetitions=1", "--switches=1", "--no-ray", "--json"]
    done = subprocess.run(
        [sys.executable, script, *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [row["tier"] for row in result["park_and_resume"]] == ["resident", "host", "disk"]
    assert all(row["park_seconds"] > 0 for row in result["park_and_resume"])
    by = {row["by"]: row for row in result["switches"]}
    assert list(by) == ["hermes, resident", "hermes, host", "hermes, disk"]
    assert all(
        row["switches"] >= 1 and 0 < row["median_seconds"] < row["with_first_step_seconds"]
        for row in by.values()
    )
