"""A study's storage that outlasts outages of its database."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import GrpcStorageProxy, RDBStorage
from optuna.trial import FrozenTrial, TrialState

from optuna_hermes._optuna._reports import Reports
from optuna_hermes._optuna._retry import LONGEST_RETRY_SECONDS, outage_error, with_retry
from optuna_hermes._optuna._storages import backend_of, keep_whole, line
from optuna_hermes.ledger import limited_time
from optuna_hermes.ledger._transient import BEHIND_PROXY

# Calls that are not idempotent, so not retried here: their callers check the outcome first.
_ONCE = ("create_new_trial", "set_trial_state_values")

_ASKED_ATTRIBUTE = "hermes:asked"
_PAUSES_SECONDS = (0.1, 1.0, 5.0)
"""Pauses between tries of a value that a database refuses, while it takes others: a lock passes."""


class RetryingStorage:
    """Wrapper of a storage whose calls are retried during an outage; reports are queued instead.

    It stands where Optuna expects a storage and forwards all other attributes.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.reports = Reports(self._find("set_trial_intermediate_value"))

    def __getattr__(self, name: str) -> Any:
        found = self._find(name)
        if name.startswith("get_"):
            self.reports.settle()  # whoever reads finds what it has reported
        return found if name in _ONCE or not callable(found) else partial(with_retry, found)

    def _find(self, name: str) -> Any:
        sets = name.startswith("set_") and name not in _ONCE
        if sets and isinstance(self.inner, GrpcStorageProxy):
            return partial(_set_behind_proxy, self.inner, name)
        return getattr(self.inner, name)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled as the inner storage: a queue and its thread belong to one process.
        return _same, (self.inner,)

    def set_trial_intermediate_value(
        self, trial_id: int, step: int, intermediate_value: float
    ) -> None:
        """Write a value, or queue it during an outage; only begin to inside ``beside``."""
        self.reports.put(trial_id, step, intermediate_value)
        if not self.reports.beside:
            self.reports.check()


def _set_behind_proxy(storage: GrpcStorageProxy, name: str, owner_id: int, *args: Any) -> None:
    """Call a setter of a study or a trial; what the database refuses is no outage.

    The proxy says the same of both, so another value is set between two tries: in an outage that
    fails, too.
    """
    ask = getattr(storage, f"set_{name.split('_')[1]}_system_attr")
    refused = ""
    for pause in (*_PAUSES_SECONDS, 0.0):
        try:
            getattr(storage, name)(owner_id, *args)
            return
        except Exception as error:
            if BEHIND_PROXY not in str(error):
                raise
            refused = line(error)
        ask(owner_id, _ASKED_ATTRIBUTE, True)
        time.sleep(pause)
    raise optuna.exceptions.StorageInternalError(refused)


def _same(storage: Any) -> Any:
    return storage


@contextlib.contextmanager
def retrying(study: optuna.Study) -> Iterator[None]:
    """Retry all calls to this study's storage during an outage, within the block.

    A server that vanishes without a word is an outage after a while.
    """
    before: Any = study._storage
    # Not around another one: a callback may optimize its own study, inside of such a block.
    inner = before.inner if isinstance(before, RetryingStorage) else before
    keep_whole(study)  # a line that is written again must not follow a part of it
    study._storage = RetryingStorage(inner)  # type: ignore[assignment]
    try:
        backend = backend_of(study)
        is_database = isinstance(backend, RDBStorage)
        with limited_time(backend.engine) if is_database else contextlib.nullcontext():
            yield
    finally:
        study._storage = before


def keep_reports(study: optuna.Study, trial_id: int, folder: Path) -> None:
    """Journal values while they cannot be written; report those that are there already."""
    storage: Any = study._storage
    storage.reports.keep_in(folder, trial_id)


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
    """As ``study.tell``, after the trial's values are written, with retries during an outage.

    Raises:
        DatabaseOutageError: the outage was too long; the trial is unchanged.
    """
    called = False

    def once() -> FrozenTrial:
        nonlocal called
        if called:
            # The call is not idempotent: a second one would fail if the first was committed and
            # only its answer was lost.
            known = study._storage.get_trial(trial._trial_id)
            if known.state.is_finished():
                return known
        elif not flush_reports(study, LONGEST_RETRY_SECONDS):
            raise outage_error(TimeoutError("its last values wait for it"))
        called = True
        return study.tell(trial, values, state=state)

    return with_retry(once)
