"""The benchmark that waits for a GPU is run, in all its parts, without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.accelerator, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def dry_run(out: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """The exit status, the document and the page of a dry run."""
    command = [sys.executable, str(SCRIPT), "--dry-run", "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (out / "gpu.json").exists(), done.stderr
    found: dict[str, Any] = json.loads((out / "gpu.json").read_text())
    return done.returncode, found["parts"], (out / "gpu.md").read_text()


def test_every_part_runs(tmp_path: Path) -> None:
    """None fails, each has rows, and the page has them all."""
    status, parts, page = dry_run(tmp_path)
    assert {name: part["error"] for name, part in parts.items()} == dict.fromkeys(parts)
    assert status == 0
    names = "device exact switch turns contexts saving study live beside ddp nvml mig hooks"
    assert list(parts) == names.split()
    assert all(part["rows"] for part in parts.values())
    assert page.count("\n## ") == len(parts)
    assert all(row["exact"] for row in parts["exact"]["rows"])
    assert {row["tier"] for row in parts["switch"]["rows"]} == {"resident", "host", "disk"}
    (ranks,) = parts["ddp"]["rows"]
    assert ranks["stops"] == 3
    assert ranks["at_the_same_batch"]
    assert ranks["exact"]
    assert {row["trials"] for row in parts["study"]["rows"]} == {3}
    (live,) = parts["live"]["rows"]
    assert live["complete"] == 3
    assert live["went_wrong"] == "nothing"


def test_a_part_that_fails_is_a_line(tmp_path: Path) -> None:
    """The others are run all the same, and a later run adds what it was to be."""
    status, parts, page = dry_run(tmp_path, "--parts", "device,mig", "--seconds", "0.01")
    assert status == 1
    assert [part["error"] for part in parts.values()] == ["it ran past its limit of 0 s"] * 2
    assert page.count("**Failed**: it ran past its limit of 0 s") == 2
    status, parts, page = dry_run(tmp_path, "--parts", "mig")
    assert status == 0
    assert parts["mig"]["error"] is None
    assert parts["mig"]["rows"]
    assert page.count("**Failed**") == 1
