"""Trials whose end the driver tells Optuna."""

from __future__ import annotations

from typing import Any

import optuna
from optuna.trial import TrialState

from optuna_hermes import _optuna


class Raises(optuna.samplers.RandomSampler):
    """Raises where it is told of a trial, as one that expects a value does."""

    def after_trial(self, *args: Any) -> None:
        raise TypeError("no value")


def test_a_trial_that_is_given_up_ends_without_its_sampler() -> None:
    """What a sampler raises or stops would end the call; an end that there is stays."""
    study = optuna.create_study(sampler=Raises())
    for _ in range(2):
        _optuna.open_trial(study)
    lost, done = study.trials
    assert _optuna.fail_trial(study, lost._trial_id) == "failed"
    assert _optuna.fail_trial(study, lost._trial_id) == "failed"
    study._storage.set_trial_state_values(done._trial_id, TrialState.COMPLETE, [1.0])
    assert _optuna.fail_trial(study, done._trial_id) == "done"
    assert [trial.state for trial in study.trials] == [TrialState.FAIL, TrialState.COMPLETE]
