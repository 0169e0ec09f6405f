"""The shipped learning curves, and the script that records such curves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optuna_hermes.policies import make_policy
from optuna_hermes.simulator import (
    CurveSet,
    FixedList,
    TrialSimulator,
    arrange,
    make_rival,
    measure,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
SHIPPED = sorted((EXAMPLES / "curves").glob("*.npz"))
MAX_BYTES = 600_000


def record(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, EXAMPLES / "record_curves.py", "--out", out, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def arrays_of(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all tasks, three trials of two epochs each."""
    out = tmp_path_factory.mktemp("recorded") / "curves"
    done = record(out, "--trials=3", "--units=2", "--seed=1")
    assert done.returncode == 0, done.stderr
    return out


def test_recorded_curves_are_curve_sets(recorded: Path) -> None:
    """Every task's file can be simulated, and is named like a shipped one."""
    paths = sorted(recorded.glob("*.npz"))
    assert [path.name for path in paths] == [path.name for path in SHIPPED]
    for path in paths:
        trainings = CurveSet.from_arrays(path.stem, arrays_of(path)).recordings
        assert [len(each.values) for each in trainings] == [2, 2, 2]
        assert len(trainings[0].params) == 8


def test_the_same_seed_records_the_same_values(recorded: Path, tmp_path: Path) -> None:
    """The recorded values depend on the seed; only the seconds differ from time to time."""
    file = "sklearn-diabetes-mlp.npz"
    done = record(tmp_path, "--trials=3", "--units=2", "--seed=1", "--task=diabetes-mlp")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [file]
    first, again, shipped = (
        arrays_of(folder / file) for folder in (recorded, tmp_path, EXAMPLES / "curves")
    )
    assert np.array_equal(first["params"], again["params"])
    assert np.array_equal(first["value"], again["value"])
    assert not np.array_equal(first["params"], shipped["params"][:3])


def test_nothing_to_record_is_refused(tmp_path: Path) -> None:
    """Without a unit there is no curve: status 2."""
    done = record(tmp_path, "--units=0")
    assert done.returncode == 2
    assert "there must be a trial and a unit at least" in done.stderr


def test_the_shipped_curves_are_small_and_say_what_they_are() -> None:
    """Together they stay small; each names its metric, source and licence, and is measured."""
    assert len(SHIPPED) == 4
    assert sum(path.stat().st_size for path in SHIPPED) < MAX_BYTES
    for path in SHIPPED:
        arrays = arrays_of(path)
        meta = json.loads(str(arrays["meta"]))
        assert meta["name"] == path.stem
        assert meta["measured"] is True
        assert all(meta[key] for key in ("family", "metric", "direction", "source", "licence"))
        assert np.isfinite(arrays["value"]).all()
        assert arrays["value"].max() <= 10.001 * np.median(arrays["value"][:, 0])


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_shipped_curves_can_be_simulated(path: Path) -> None:
    """FIFO trains all of a set; the oracle finds its best trial first, in this trial's time."""
    trials = CurveSet.from_arrays(path.stem, arrays_of(path)).draw(100, seed=0)
    trace = TrialSimulator(make_policy("fifo"), FixedList(trials)).run()
    fifo = measure(trace, trials, 1)
    assert len(trace.finished) == len(trials)
    assert max(trace.finished.values()) == pytest.approx(fifo.work_seconds)

    trials = arrange("oracle", trials)
    oracle = measure(
        TrialSimulator(make_rival("oracle", trials), FixedList(trials)).run(), trials, 1
    )
    assert oracle.best_seconds == pytest.approx(sum(trials[0].seconds))
    assert oracle.best_seconds < fifo.best_seconds
