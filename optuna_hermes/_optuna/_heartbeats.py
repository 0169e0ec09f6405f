"""Optuna's heartbeats: by them a trial whose process has died is failed, and tried again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from functools import partial

import optuna
from optuna.storages import RDBStorage
from optuna.storages._rdb.models import TrialHeartbeatModel
from optuna.storages._rdb.storage import _create_scoped_session
from optuna.trial import TrialState

from optuna_hermes._optuna._retry import with_retry
from optuna_hermes._optuna._storages import backend_of

_EACH = ("_get_stale_trial_ids", "set_trial_state_values", "get_trial", "create_new_trial")
"""Methods of a storage that fail trials and enqueue them again."""


def fail_dead_trials(study: optuna.Study, live: Callable[[], Collection[int]]) -> None:
    """Fail trials whose process has died, as plain Optuna does before each trial.

    The retry callback of the user's storage is called for each. Trials that are live in the study's
    ledger lose their heartbeats instead: a suspended one has no process, so any plain Optuna would
    fail it. An outage of the database is waited for.

    Args:
        study: as the user made it; without a database there are no heartbeats.
        live: reads their numbers; called if some running trial has a heartbeat.
    """
    backend = backend_of(study)
    if not (isinstance(backend, RDBStorage) and with_retry(_pass_over_live, study, backend, live)):
        return
    # The study's own storage may be one that tries again, which has no heartbeats.
    anew = with_retry(optuna.load_study, study_name=study.study_name, storage=backend)
    # Each call by itself: of trials that were failed already the search would find none again.
    for name in _EACH:
        vars(anew._storage)[name] = partial(with_retry, getattr(anew._storage, name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.storages.fail_stale_trials(anew)


def _pass_over_live(
    study: optuna.Study, backend: RDBStorage, live: Callable[[], Collection[int]]
) -> bool:
    """Delete the heartbeats of live trials; False if no running trial has one."""
    with _create_scoped_session(backend.scoped_session) as session:
        beating = {each.trial_id for each in session.query(TrialHeartbeatModel)}
    if not beating:
        return False
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    ids = {trial.number: trial._trial_id for trial in running if trial._trial_id in beating}
    if not ids:
        return False
    ours = [ids[number] for number in live() if number in ids]
    with _create_scoped_session(backend.scoped_session) as session:
        for trial_id in ours:
            session.query(TrialHeartbeatModel).filter_by(trial_id=trial_id).delete()
    return True
