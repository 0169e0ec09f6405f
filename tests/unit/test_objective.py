"""Objectives by name and by value."""

from __future__ import annotations

import subprocess
import sys
import threading
from ast import literal_eval
from pathlib import Path

import pytest

from optuna_hermes.errors import ObjectiveError
from optuna_hermes.workers._objective import arguments, pack, unpack


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "study_of_mine.py"
    path.write_text("limit = 3\n\n\ndef objective(trial):\n    return trial + limit\n")
    return path


def test_a_function_of_a_file_is_found(script: Path) -> None:
    """``FILE.py:NAME`` needs no package around the file."""
    assert unpack(pack(f"{script}:objective"), "study")(1) == 4


def test_a_path_in_sys_path_is_passed_over(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python searches texts alone, so a script may have others there and not notice."""
    monkeypatch.setattr(sys, "path", [*sys.path, script.parent])
    assert unpack(f"{script}:objective", "study")(1) == 4


def test_a_function_of_a_module_is_found() -> None:
    """``module:NAME`` is what Python itself would import."""
    assert unpack(pack("math:sqrt"), "study")(4.0) == 2.0


def test_a_closure_goes_by_value() -> None:
    """A function defined in a function, or in a notebook's cell, is sent whole."""
    offset = 5
    assert unpack(pack(lambda trial: trial + offset), "study")(1) == 6


def test_what_cannot_be_sent_is_refused() -> None:
    """A lock in a closure is named before any process is started."""
    lock = threading.Lock()
    with pytest.raises(ObjectiveError, match="picklable"):
        pack(lambda trial: lock)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("objective", "FILE.py:NAME"),
        (":objective", "FILE.py:NAME"),
        ("file.py:", "FILE.py:NAME"),
        ("nowhere.py:objective", "No file 'nowhere.py'"),
        ("no.such.module:objective", "no.such.module"),
        ("math:nothing", "No function 'nothing'"),
    ],
)
def test_what_is_not_there_is_named(target: str, words: str) -> None:
    """The message says which part of the name is wrong."""
    with pytest.raises(ObjectiveError, match=words):
        unpack(target, "study")


def test_functions_that_are_there_are_listed(script: Path) -> None:
    """A misspelt name is answered with the names there are."""
    with pytest.raises(ObjectiveError, match=r"there: objective"):
        unpack(f"{script}:objectiv", "study")


def test_a_file_that_raises_is_said_to(tmp_path: Path) -> None:
    """An error at import is the file's own, and is shown."""
    path = tmp_path / "broken_study.py"
    path.write_text("1 / 0\n")
    with pytest.raises(ObjectiveError, match="ZeroDivisionError"):
        unpack(f"{path}:objective", "study")


DRAWS = """
import random
import numpy as np

def draw():
    return random.random(), np.random.rand(), np.random.default_rng().random(), {torch}

drawn = draw()

def objective(trial):
    return drawn, draw()[:2]
"""

LOOKS_FOR_TORCH = """
import importlib.util

found = importlib.util.find_spec("torch")  # as transformers does long before it imports torch
import torch
"""

LOADS_BY_TORCH = """
from optuna_hermes import once

def load():
    import torch
    return torch.rand(())

data = once(load)
"""

UNPACKS = """
import random, sys
import numpy as np
from optuna_hermes.workers import _fork_server  # as wherever objectives are unpacked
from optuna_hermes.workers._objective import unpack

{first}
random.seed(3), np.random.seed(3)
print(unpack({target!r}, {study!r})(None), len(sys.meta_path))
"""


@pytest.mark.parametrize(
    ("target", "imports"),
    [
        ("drawing.py:objective", "from torch.utils.data import Dataset"),
        ("drawing:objective", "import torch"),
        ("drawing.py:objective", LOOKS_FOR_TORCH),
        ("drawing:objective", LOADS_BY_TORCH),
    ],
)
def test_what_an_import_draws_is_the_same_in_each_process_of_a_study(
    target: str, imports: str, tmp_path: Path
) -> None:
    """A split at the top of the file, also by an imported torch; in other studies it is another."""
    torch = "__import__('torch').rand(()).item()"
    (tmp_path / "drawing.py").write_text(f"{imports}\n{DRAWS.format(torch=torch)}")
    first, again, other = (
        subprocess.run(
            [sys.executable, "-c", UNPACKS.format(first=first, target=target, study=study)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for first, study in (("", "one"), ("import torch", "one"), ("", "other"))
    )
    assert first == again
    drawn, drawn_by_other = (literal_eval(said.rpartition(" ")[0])[0] for said in (first, other))
    assert not {*drawn} & {*drawn_by_other}


@pytest.mark.parametrize(
    ("script", "target", "own"),
    [
        ("/bin/optuna-hermes", "train:objective", False),
        ("/home/me/train.py", "train:objective", True),
        ("/home/me/train.py", "other:objective", False),
        ("/home/me/pkg/train.py", "pkg.train:objective", True),
        ("/home/me/pkg/train.py", "other.train:objective", False),
        ("/home/me/pkg/__main__.py", "pkg:objective", True),
        ("/home/me/train.py", "/home/me/train.py:objective", True),
        ("/home/me/train.py", "/other/train.py:objective", False),
        (None, "train:objective", False),
    ],
)
def test_arguments_are_those_of_the_script_alone(
    script: str | None, target: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any other import gets none of them, though it may parse some at its top level."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", script, raising=False)
    monkeypatch.setattr(sys, "argv", ["script", "--seed", "3"])
    place = target.rpartition(":")[0]
    assert arguments(target) == (["script", "--seed", "3"] if own else [place])
    assert arguments(b"a function") == ["script", "--seed", "3"]
