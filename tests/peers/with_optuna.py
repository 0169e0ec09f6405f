"""Pytest plugin for Optuna's tests: Hermes as default sampler and pruner of every study.

``--hermes`` puts it in place; ``--sqlite`` makes a file the default storage, with or without.
"""

from __future__ import annotations

import functools
import uuid
from pathlib import Path
from typing import Any

# Before pytest puts a checkout on the path: its tests are run with the Optuna that is installed.
import optuna
import pytest
import rooms

from optuna_hermes import HermesPruner, HermesSampler


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("peers")
    group.addoption("--hermes", action="store_true", help="put Hermes in place")
    group.addoption("--sqlite", action="store_true", help="studies without a storage are in files")


def pytest_configure(config: pytest.Config) -> None:
    folder = rooms.own_folder(config)
    if config.getoption("--sqlite"):
        _put_into_files(folder)
    if config.getoption("--hermes"):
        _make_default()


def _make_default() -> None:
    begin = optuna.Study.__init__

    @functools.wraps(begin)
    def init(
        self: optuna.Study, study_name: str, storage: Any, sampler: Any = None, pruner: Any = None
    ) -> None:
        # The pruner within is Optuna's default.
        sampler = sampler or HermesSampler()
        pruner = pruner or HermesPruner(optuna.pruners.MedianPruner())
        begin(self, study_name, storage, sampler, pruner)

    optuna.Study.__init__ = init  # type: ignore[method-assign]


def _put_into_files(folder: Path) -> None:
    get_storage = optuna.storages.get_storage

    def in_file(storage: Any) -> Any:
        url = f"sqlite:///{folder / uuid.uuid4().hex}.db"
        return get_storage(url if storage is None else storage)

    optuna.storages.get_storage = in_file
