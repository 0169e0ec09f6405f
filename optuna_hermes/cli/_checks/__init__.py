"""The checks of ``doctor``, a module for each subject."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from optuna_hermes.cli._checks import _around, _host, _software, _storage
from optuna_hermes.cli._checks._base import Check
from optuna_hermes.errors import HermesError

__all__ = ["Check", "check_all"]

Look = Callable[[], Iterable[Check]]


def check_all(storage: str | None = None, study_name: str | None = None) -> list[Check]:
    """Run all checks; one that raises counts as failed.

    Args:
        storage: Optuna's storage URL, None to look at no storage.
        study_name: a study in it, None to look at none.
    """
    return [check for name, look in _looks(storage, study_name) for check in _guarded(name, look)]


def _looks(storage: str | None, study_name: str | None) -> Iterator[tuple[str, Look]]:
    yield "Python", _software.python
    yield "packages", _software.packages
    yield "optional packages", _software.optional_packages
    yield "NVIDIA driver", _host.nvidia_driver
    yield "devices", _host.devices
    yield "runtime folder", _host.runtime_folder
    yield "broker", _host.broker
    yield "SLURM", _around.slurm
    yield "container", _around.container
    yield "working folder", _around.working_folder
    if storage is None:
        yield "SQLite commit", _storage.sqlite_here
    else:
        yield "storage", partial(_storage.storage, storage)
        if study_name is not None:
            yield f"study {study_name!r}", partial(_storage.study, storage, study_name)
    yield "limits", _host.limits
    yield "room", _host.room


def _guarded(name: str, look: Look) -> list[Check]:
    try:
        return list(look())
    except HermesError as error:
        return [Check(name=name, state="fail", found=str(error))]
    except (OSError, sqlite3.Error) as error:
        hint = "The check itself did not work: see the message."
        return [Check(name=name, state="fail", found=repr(error), hint=hint)]
