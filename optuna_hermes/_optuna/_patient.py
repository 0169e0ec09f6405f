"""A study's storage whose database may go away and come back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from optuna_hermes._optuna._patience import (
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    PATIENCE_SECONDS,
    away,
    patiently,
)
from optuna_hermes._optuna._reports import Reports
from optuna_hermes.ledger import mends

_ONCE = ("create_new_trial", "set_trial_state_values")
"""Calls that mean something else the second time: whoever makes them looks what has become."""


class PatientStorage:
    """Another storage, every call of which waits where the database is away; reports do not wait.

    It stands where Optuna expects a storage and has all that the other one has.

    Args:
        inner: the other storage.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.reports = Reports(inner.set_trial_intermediate_value)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        return found if name in _ONCE or not callable(found) else partial(patiently, found)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self.inner,)

    def set_trial_intermediate_value(
        self, trial_id: int, step: int, intermediate_value: float
    ) -> None:
        """Write a value, or keep it for later."""
        self.reports.put(trial_id, step, intermediate_value)


def _same(storage: Any) -> Any:
    return storage


@contextlib.contextmanager
def patient(study: optuna.Study) -> Iterator[None]:
    """Let everything that asks this study's storage wait for a database that is away."""
    inner = study._storage
    study._storage = PatientStorage(inner)  # type: ignore[assignment]
    try:
        yield
    finally:
        study._storage = inner


def is_late(study: optuna.Study) -> bool:
    """Whether the study's database is known to be away; never without ``patient``."""
    storage: Any = study._storage
    return isinstance(storage, PatientStorage) and storage.reports.late


def at_once(study: optuna.Study) -> Any:
    """The study's storage, without waiting."""
    storage: Any = study._storage
    return storage.inner if isinstance(storage, PatientStorage) else storage


def keep_reports(study: optuna.Study, trial_id: int, file: Path) -> None:
    """Keep values in a file while they cannot be written; report what it has kept already."""
    storage: Any = study._storage
    storage.reports.keep_in(file, trial_id)


def flush_reports(study: optuna.Study, seconds: float) -> bool:
    """Wait until every value is written; False if it took too long."""
    storage: Any = study._storage
    return bool(storage.reports.flush(seconds))


def tell(
    study: optuna.Study,
    trial: optuna.Trial,
    values: float | Sequence[float] | None,
    state: TrialState | None,
) -> FrozenTrial:
    """As ``study.tell``, after the trial's values, and as often as it takes.

    Raises:
        StorageError: the database was away for too long; the trial is as it was.
    """
    end = time.monotonic() + PATIENCE_SECONDS
    flushed, pause = False, FIRST_PAUSE_SECONDS
    while True:
        try:
            flushed = flushed or flush_reports(study, PATIENCE_SECONDS)
            if not flushed:
                raise away(TimeoutError("its last values wait for it"))
            return study.tell(trial, values, state=state)
        except Exception as error:
            if not mends(error):
                raise
            if time.monotonic() > end:
                raise away(error) from error
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        known = study._storage.get_trial(trial._trial_id)
        if known.state.is_finished():
            return known  # it was told, though the answer did not come back
