"""Imports in an objective's code that the fork server makes for all workers."""

from __future__ import annotations

import functools
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from optuna_hermes.suspend._values import _generators
from optuna_hermes.workers._preload import imported_late, preload, read_code

SCRIPT = """
import optuna

def data():
    import numpy as np
    return np.zeros(3)

class Trains:
    def fit(self):
        def step():
            from torch.utils.data import DataLoader
            return DataLoader
        return step

    def __call__(self, trial):
        return 1.0

def objective(trial):
    from optuna_hermes import HermesCallback
    return data().sum()

def trivial(trial):
    return 1.0
"""


def script(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    exec(SCRIPT, vars(module))
    return module


def test_loggers_that_are_used_before_any_callback_take_versions_of_their_own(
    tmp_path: Path,
) -> None:
    """Also where other trials begin at the same time."""
    loggers = pytest.importorskip("lightning.pytorch.loggers")
    preload(script("logs").objective)
    made = [loggers.CSVLogger(tmp_path, "study") for _ in range(2)]
    assert [logger.version for logger in made] == [0, 1]


def test_functions_and_classes_of_the_module_are_read() -> None:
    """Also those that the objective does not call itself: it may call who calls them."""
    module = script("a_script")
    named = imported_late(module.objective)
    assert {"numpy", "torch", "torch.utils.data", "optuna_hermes.HermesCallback"} <= named
    assert "optuna" not in named  # which is there


@pytest.mark.parametrize(
    "make",
    [
        lambda module: module.trivial,
        lambda module: functools.partial(module.trivial),
        lambda module: module.Trains(),
        lambda module: module.Trains().__call__,
    ],
)
def test_kinds_of_objectives(make: Any) -> None:
    """A function, a partial, an object that can be called, and a method."""
    assert "torch" in imported_late(make(script("a_script")))


def test_what_has_no_code_of_its_own_names_nothing() -> None:
    """Such as a function of a library in C."""
    assert imported_late(abs) == set()


def test_a_broken_library_is_left_to_who_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation of torchvision that does not fit torch's raises RuntimeError."""

    class Broken:
        def find_spec(self, name: str, *rest: object) -> None:
            if name == "torchvision":
                raise RuntimeError("operator torchvision::nms does not exist")

    def objective(trial: Any) -> float:
        import torchvision  # noqa: F401

        return 1.0

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    preload(objective)
    assert "torchvision" not in sys.modules


def test_code_that_was_read_is_not_read_again() -> None:
    """A worker, which is a fork, searches the objective's code before its first batch."""
    module = script("another_script")
    read_code(module.objective)
    before = _generators._global_names.cache_info()
    _generators.holders_in(_generators.GeneratorOwner("loop 0", module.objective))
    after = _generators._global_names.cache_info()
    assert after.misses == before.misses
    assert after.hits > before.hits
