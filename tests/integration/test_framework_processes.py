"""Runs of every framework go on in another process as in their first one.

As a script, this file is that process: ``test_framework_processes.py FOLDER``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from optuna_hermes.model import Checkpoint
from optuna_hermes.testing import FakeSession

HERE = Path(__file__).parent
RUNS = [
    ("test_boosting", "xgboost-columns"),
    ("test_boosting", "lightgbm-columns"),
    ("test_sklearn", "network"),
    ("test_huggingface", "plain"),
]


def frameworks(folder: Path) -> Iterator[tuple[Any, str, Path, tuple[Any, ...]]]:
    """Module, case, checkpoints, and what its functions are given before the case."""
    for module, case in RUNS:
        spec = importlib.util.spec_from_file_location(module, HERE / f"{module}.py")
        assert spec is not None
        assert spec.loader is not None
        loaded: Any = importlib.util.module_from_spec(spec)
        sys.modules[module] = loaded
        spec.loader.exec_module(loaded)
        place = folder / case
        yield loaded, case, place, (place,) if module == "test_huggingface" else ()


def end(of: Any) -> str:
    return json.dumps(of if isinstance(of, str) else of[1])


@pytest.mark.slow
def test_new_process(tmp_path: Path) -> None:
    """With other first weights and random numbers, and none of the first one's memory."""
    pytest.importorskip("transformers")
    expected = {}
    for module, case, place, more in frameworks(tmp_path):
        session = FakeSession({8: "disk"}, checkpoint_dir=place)
        (state,) = module.suspended(session, *more, case).checkpoints[:1]
        (place / "state.json").write_text(json.dumps({**asdict(state), "path": str(state.path)}))
        expected[case] = end(module.train(FakeSession(), *(place / "out" for _ in more), case))
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for case, left in expected.items():
        assert (tmp_path / case / "end.json").read_text() == left, case


STUDY = """
import optuna
from tuned import objective

from optuna_hermes import HermesPruner, HermesSampler, optimize
from optuna_hermes.suspend._state import seed_everything, trial_seed

study = optuna.create_study(
    storage="sqlite:///study.db", sampler=HermesSampler(), pruner=HermesPruner()
)
result = optimize(
    study, "tuned:objective", n_trials=3, devices="cpu:1", policy="round-robin",
    slice_seconds=0.05, seed=3,
)
assert result.switches, result
for trial in study.trials:
    seed_everything(trial_seed(3, trial.number))
    again = objective(optuna.trial.FixedTrial(trial.params, trial.number))
    assert again == trial.value, (trial.number, again, trial.value)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["huggingface_trainer", "lightgbm_boosting", "sklearn_partial_fit", "xgboost_boosting"],
)
def test_study(name: str, tmp_path: Path) -> None:
    """Trials that take turns have the values of trials that nobody suspends, bit for bit."""
    example = HERE.parents[1] / "examples" / f"{name}.py"
    fewer = ", epochs=2" if name == "huggingface_trainer" else ""
    (tmp_path / "tuned.py").write_text(
        f"import runpy\nexample = runpy.run_path({str(example)!r})['objective']\n\n\n"
        f"def objective(trial):\n    return example(trial{fewer})\n"
    )
    (tmp_path / "study.py").write_text(STUDY)
    command = [sys.executable, "study.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    for module, case, place, more in frameworks(Path(sys.argv[1])):
        found = json.loads((place / "state.json").read_text())
        stored = Checkpoint(**found)
        session = FakeSession(checkpoint_dir=place, checkpoints=(stored,))
        options = {"seed": 99} if more else {}
        left = module.train(session, *(place / "out" for _ in more), case, **options)
        (place / "end.json").write_text(end(left))
