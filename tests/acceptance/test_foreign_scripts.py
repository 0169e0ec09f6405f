"""Scripts as people have them, given to ``optimize`` as they stand."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest

Cli = Callable[..., subprocess.CompletedProcess[str]]

REPORTS = """
def objective(trial):
    x = trial.suggest_float("x", -1, 1)
    for unit in range(1, 4):
        trial.report(x * x + 1 / unit, unit)
        if trial.should_prune():
            raise RuntimeError("nothing prunes here")
    return {value}
"""

STUDY = """
import optuna
from optuna_hermes import HermesPruner, HermesSampler, optimize
study = optuna.create_study(
    storage="sqlite:///own.db", sampler=HermesSampler(), pruner=HermesPruner()
)
"""

THREADED = """
import torch
weights = torch.randn(1 << 20)
mean = ((weights - weights.mean()) / weights.std()).abs().sum()
"""
"""An operation of torch that takes several threads, at import."""

FAKE_CUDA = """
#include <unistd.h>
static int owner;
int cuInit(unsigned flags) {
    if (!owner) owner = getpid();
    return owner == getpid() ? 0 : 3;
}
"""
"""As the real one says that it is not initialised in a fork of a process that has used it."""

ASKED = """
import queue
import threading
questions, answers = queue.Queue(), queue.Queue()

def answer():
    while True:
        answers.put(questions.get() ** 2)

threading.Thread(target=answer, daemon=True).start()

def square(x):
    questions.put(x)
    return answers.get(timeout=20)
"""


def run(cli: Cli, file: Path, storage: str, **options: object) -> subprocess.CompletedProcess[str]:
    words = ("--storage", storage, "--study-name", "s", "--n-trials", 2, "--devices", "cpu:1")
    return cli("optimize", f"{file}:objective", *words, deadline_seconds=90, **options)


def values(storage: str) -> list[float | None]:
    return [t.value for t in optuna.load_study(study_name="s", storage=storage).trials]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("optimize(study, objective, n_trials=2, devices='cpu:1')", "optimize() was called"),
        ("study.optimize(objective, n_trials=2)", "study.optimize() was called"),
        ("import sys; sys.exit('usage: ...')", "SystemExit"),
    ],
)
def test_a_script_without_a_guard_is_told_to_have_one(
    cli: Cli, storage_url: str, tmp_path: Path, call: str, words: str
) -> None:
    """A script that its import would start again and again is refused, in a line, with status 2."""
    file = tmp_path / "script.py"
    file.write_text(STUDY + REPORTS.format(value="x * x") + "\n" + call + "\n")
    done = run(cli, file, storage_url)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert words in line
    assert "script.py" in line
    assert ('if __name__ == "__main__":' in line) == ("called" in words)
    assert "Traceback" not in done.stderr


def test_an_objective_that_optimizes_is_refused(cli: Cli, storage_url: str, tmp_path: Path) -> None:
    """A study inside a trial would wait for the device that its own trial has."""
    file = tmp_path / "nested.py"
    file.write_text(STUDY + "\ndef objective(trial):\n    optimize(study, lambda trial: 1.0, 1)\n")
    done = run(cli, file, storage_url)
    assert done.returncode == 2
    assert "cannot be called in an objective" in done.stderr


def test_a_script_at_its_own_top_level_runs(tmp_path: Path) -> None:
    """``python script.py`` needs no guard: its functions go to workers by value."""
    file = tmp_path / "script.py"
    call = "optimize(study, objective, n_trials=2, devices='cpu:1', show_progress=False)"
    file.write_text(STUDY + REPORTS.format(value="x * x") + f"\n{call}\nprint(study.best_value)\n")
    done = subprocess.run(
        [sys.executable, file], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) >= 0


@pytest.mark.parametrize("name", [pytest.param("random", marks=pytest.mark.slow), "torch"])
def test_a_file_may_have_the_name_of_a_library(storage_url: str, tmp_path: Path, name: str) -> None:
    """Libraries, and the file itself, get what they mean, though files beside it have such names.

    ``wave`` is what no library imports: the file means the one beside it, as in Python.
    """
    for beside in ("queue", "types", "csv", "lightning", "wave"):
        (tmp_path / f"{beside}.py").write_text("own = 2.0\n")
    (tmp_path / f"{name}.py").write_text(
        f"import argparse, random, torch, wave\nargparse.ArgumentParser().parse_args()\n"
        f"random.random(), torch.ones(1)\n{REPORTS.format(value='wave.own')}"
    )
    program = Path(sys.executable).with_name("optuna-hermes")
    study = ("--storage", storage_url, "--study-name", "s", "--n-trials", "2", "--devices", "cpu:1")
    done = subprocess.run(
        [program, "optimize", f"{name}.py:objective", *study],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert values(storage_url) == [2.0, 2.0]


def test_a_module_is_given_none_of_optimizes_own_arguments(
    cli: Cli, storage_url: str, tmp_path: Path
) -> None:
    """As a file is not: what it parses at its top level takes neither ``--seed`` nor any other."""
    parse = "import argparse\nargparse.ArgumentParser().parse_args()\n"
    (tmp_path / "parses.py").write_text(parse + REPORTS.format(value="2.0"))
    words = ("--storage", storage_url, "--study-name", "s", "--n-trials", 2, "--devices", "cpu:1")
    done = cli("optimize", "parses:objective", *words, "--seed", 3)
    assert done.returncode == 0, done.stderr
    assert values(storage_url) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("imported", "value", "slow"),
    [
        pytest.param(THREADED, "float((weights * 2).sum() * 0 + 3)", False, id="OpenMP"),
        pytest.param(
            THREADED + "torch.set_num_threads(2)\n",
            "float((weights * 2).sum() * 0 + 3)",
            False,
            id="threads set",
            marks=pytest.mark.slow,
        ),
        pytest.param(ASKED, "square(x) * 0 + 3.0", True, id="a thread of its own"),
    ],
)
def test_what_is_imported_may_have_threads(
    cli: Cli, storage_url: str, tmp_path: Path, imported: str, value: str, slow: bool
) -> None:
    """Workers are forked once idle threads have ended; if others run they are new processes."""
    file = tmp_path / "threads.py"
    file.write_text(imported + REPORTS.format(value=value))
    done = run(cli, file, storage_url, env={"OMP_NUM_THREADS": "2"})
    assert done.returncode == 0, done.stderr
    assert values(storage_url) == [3.0, 3.0]
    assert ("Workers are not forked" in done.stderr) == slow


def test_a_notebooks_objects_may_start_threads(tmp_path: Path) -> None:
    """Objects sent to workers by value may compute as they are unpacked; a notebook has threads."""
    file = tmp_path / "script.py"
    unpacked = (
        "class Data:\n    def __setstate__(self, state):\n        self.sum = torch.ones(1 << 20)"
    )
    file.write_text(
        f"{STUDY}\nimport threading, torch\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        f"{unpacked}.mul(2).sum()\n"
        "    def __getstate__(self):\n        return 1\n"
        "data = Data()\n"
        "def objective(trial):\n    return float(torch.ones(1 << 20).mul(2).sum() * 0 + data.sum)\n"
        "if __name__ == '__main__':\n"
        "    optimize(study, objective, n_trials=2, devices='cpu:1', show_progress=False)\n"
        "    print(study.best_value)\n"
    )
    done = subprocess.run(
        [sys.executable, file],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == 2.0 * (1 << 20)


def test_cuda_may_be_asked_for_at_import(cli: Cli, storage_url: str, tmp_path: Path) -> None:
    """A fork could not use CUDA any more: workers are new processes, which import it later.

    What is asked of CUDA first finds the devices of its lease: those of others are not visible.
    """
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc to compile a stand-in for the CUDA library")
    (tmp_path / "cuda.c").write_text(FAKE_CUDA)
    library = tmp_path / "libcuda.so.1"
    words = [compiler, "-shared", "-fPIC", "-o", str(library), str(tmp_path / "cuda.c")]
    subprocess.run(words, check=True)
    file = tmp_path / "asks.py"
    file.write_text(
        f"import ctypes, os\ncuda = ctypes.CDLL({str(library)!r})\ncuda.cuInit(0)\n"
        "visible = os.environ.get('CUDA_VISIBLE_DEVICES')\n"
        + REPORTS.format(value="3.0 if (cuda.cuInit(0), visible) == (0, '') else 4.0")
    )
    done = run(cli, file, storage_url)
    assert done.returncode == 0, done.stderr
    assert "since an accelerator was used" in done.stderr
    assert values(storage_url) == [3.0, 3.0]


def test_a_file_that_only_loads_in_the_fork_server_ends_the_study(
    cli: Cli, storage_url: str, tmp_path: Path
) -> None:
    """Workers that cannot load it are not started for ever."""
    file = tmp_path / "once.py"
    file.write_text(
        ASKED + "from pathlib import Path\nPath('loaded').mkdir()\n" + REPORTS.format(value="x")
    )
    done = run(cli, file, storage_url)
    assert done.returncode == 1
    assert "FileExistsError" in done.stderr
    assert "has ended" in done.stderr


@pytest.mark.parametrize("threads", [False, True], ids=["forked", "fresh"])
def test_a_file_may_change_to_its_own_folder(threads: bool, cli: Cli, tmp_path: Path) -> None:
    """Its trials are in the database that the command line has named, seen from where it ran."""
    folder = tmp_path / "experiment"
    folder.mkdir()
    waits = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    change = "import os, pathlib\nos.chdir(pathlib.Path(__file__).parent)"
    text = f"{change}\n{waits if threads else ''}\n{REPORTS.format(value='x * x')}"
    (folder / "train.py").write_text(text)
    words = ("optimize", "experiment/train.py:objective", "--storage", "sqlite:///study.db")
    done = cli(*words, "--study-name", "s", "--n-trials", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    study = optuna.load_study(study_name="s", storage=f"sqlite:///{tmp_path}/study.db")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 2
    assert not (folder / "study.db").exists()
