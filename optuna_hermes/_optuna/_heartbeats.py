"""Optuna's heartbeats: by them a trial whose process has died is failed, and tried again."""

from __future__ import annotations

import warnings
from collections.abc import Collection

import optuna
from optuna.storages import RDBStorage
from optuna.storages._rdb.models import TrialHeartbeatModel
from optuna.storages._rdb.storage import _create_scoped_session
from optuna.trial import TrialState

from optuna_hermes._optuna._storages import backend_of


def fail_dead_trials(study: optuna.Study, ours: Collection[int]) -> None:
    """Fail trials whose process has died, as plain Optuna does before each trial.

    The retry callback of the user's storage is called for each. Trials in ``ours`` lose their
    heartbeats instead: a suspended one has no process, so any plain Optuna would fail it.

    Args:
        study: as the user made it; without a database there are no heartbeats.
        ours: numbers of the trials that are live in the study's ledger.
    """
    backend = backend_of(study)
    if not isinstance(backend, RDBStorage):
        return
    running = {
        trial._trial_id
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        if trial.number in ours
    }
    if running:
        with _create_scoped_session(backend.scoped_session) as session:
            for heartbeat in session.query(TrialHeartbeatModel):
                if heartbeat.trial_id in running:
                    session.delete(heartbeat)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # The study's own storage may be one that tries again, which has no heartbeats.
        optuna.storages.fail_stale_trials(
            optuna.load_study(study_name=study.study_name, storage=backend)
        )
