"""Messages about devices, trials and samplers while a study runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest

from optuna_hermes.broker._protocol import FailureSummary, TrialLoss
from optuna_hermes.workers._notices import DeviceNotices, Losses, Repeats
from support.statuses import device_status, study_status


def test_what_lasts_is_told_once() -> None:
    """A problem is a line after three seconds, and so is its end; what is over sooner is none."""
    lines: list[str] = []
    news = DeviceNotices(lines.append)
    for now, problem in enumerate(["", "lost", "", "lost", "lost", "lost", "lost", "lost"]):
        news.update([device_status(id="GPU-a", problem=problem), device_status(id="cpu:0")], now)
    assert lines == ["GPU-a: lost."]
    for now in range(10, 20):
        news.update([device_status(id="GPU-a")], now)
    assert lines == ["GPU-a: lost.", "GPU-a: all is well again."]


def test_each_lost_process_is_told_once(tmp_path: Path) -> None:
    """Also one after a new unit, with which the count of a trial's losses begins anew."""
    notes: list[str] = []
    statuses = {7: -9, 8: 1}
    losses = Losses(optuna.create_study(), tmp_path, statuses.get, notes.append)
    for pid in (7, 7, 8, 8):
        loss = TrialLoss(
            trial=3,
            trial_id=3,
            losses=1,
            most_losses=3,
            pid=pid,
            hung=False,
            given_up=False,
            stored=pid == 8,
        )
        assert losses.update("s", [loss]) == []
    assert ["SIGKILL" in notes[0], "exit status 1" in notes[1], len(notes)] == [True, True, 2]
    assert ["begins anew" in each for each in notes] == [True, False]


def test_a_failure_without_words_came_from_outside(tmp_path: Path) -> None:
    """As by a heartbeat that has stopped, or by `tell`: the trial's own log has nothing of it."""
    notes: list[str] = []
    losses = Losses(optuna.create_study(), tmp_path, {}.get, notes.append)
    failures = FailureSummary(first=2, error="", alike=1, hopeless=False)
    losses.say_first_failure(study_status(failures=failures))
    assert notes == [
        "Trial 2 has failed: another process has set it to FAIL in Optuna; others go on."
    ]


@pytest.mark.parametrize(("alike", "done", "said"), [(9, 1, 0), (10, 1, 1), (10, 10, 0)])
def test_failures_that_are_alike_are_told_though_a_trial_has_succeeded(
    alike: int, done: int, said: int, tmp_path: Path
) -> None:
    """The study goes on for that one, until its trials are used up; few of many are no news."""
    notes: list[str] = []
    losses = Losses(optuna.create_study(), tmp_path, {}.get, notes.append)
    failures = FailureSummary(first=2, error="x", alike=alike, hopeless=False)
    for _ in range(2):
        losses.say_alike(study_status(failures=failures, counts={"done": done}))
    assert notes == said * [
        "The last 10 trials that failed did so alike, and 1 succeeded: look into the output.log of "
        "one."
    ]


class OwnSampler(optuna.samplers.RandomSampler):
    """A sampler of a script."""


class Same(OwnSampler):
    """It draws the same for each trial, as its copies do that go through a list."""

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> float:
        return float(distribution.low)


def repeats(sampler: optuna.samplers.BaseSampler, *, step: float | None = None) -> list[str]:
    """The notes of a call that begins after two trials, and opens four."""
    notes: list[str] = []
    study = optuna.create_study(sampler=sampler)
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1, step=step), 2)
    news = Repeats(study, notes.append)
    news.pass_over()
    study.enqueue_trial({"x": 0.0})
    for done in range(1, 5):
        trial = study.ask()
        value = trial.suggest_float("x", 0, 1, step=step)
        trial.report(value, 1)
        news.update(study_status(counts={"done": done}))
    return notes


def test_a_sampler_that_gives_each_trial_the_same_is_named() -> None:
    """Once, of the trials that it has proposed in this call."""
    assert repeats(Same(seed=0)) == [
        "Trials 3, 4, 5 have the same parameters. Each has a copy of Same as it was when this "
        "call began: let it draw by a numpy.random.RandomState in an attribute, or choose by "
        "trial.number, or run study.optimize() in place of optimize()."
    ]


@pytest.mark.parametrize(
    ("make", "step"),
    [(OwnSampler, None), (Same, 0.5), (optuna.samplers.RandomSampler, None)],
    ids=["draws", "few values", "Optuna's"],
)
def test_samplers_that_do_not_repeat_are_not_named(
    make: Callable[..., optuna.samplers.BaseSampler], step: float | None
) -> None:
    """Chance gives few values again."""
    assert repeats(make(seed=0), step=step) == []
