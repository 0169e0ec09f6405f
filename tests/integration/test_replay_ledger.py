"""A study that was trained for real, and its ledger in the simulator."""

from __future__ import annotations

import time

import optuna
import pytest

from optuna_hermes import HermesPruner, _optuna, optimize
from optuna_hermes.ledger import open_ledger
from optuna_hermes.replay import SimulationRules, curve_set_of, replay
from optuna_hermes.simulator import Trace

N_TRIALS, UNITS = 6, 12
UNIT_SECONDS, SET_UP_SECONDS = 0.1, 0.2


def compute(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        sum(range(1000))


def objective(trial: optuna.Trial) -> float:
    level = trial.suggest_float("level", 0.0, 1.0)
    compute(SET_UP_SECONDS)
    for unit in range(1, UNITS + 1):
        compute(UNIT_SECONDS * (1 + level))
        trial.report(level + 1 / unit, unit)
        if trial.should_prune():
            raise optuna.TrialPruned
    return level


@pytest.mark.slow
def test_the_simulator_takes_as_much_device_time(storage_url: str) -> None:
    """The replay takes what the study took, within 5 %."""
    study = optuna.create_study(storage=storage_url, study_name="real", pruner=HermesPruner())
    result = optimize(
        study,
        objective,
        n_trials=N_TRIALS,
        devices="cpu:2",
        slice_seconds=0.0,
        seed=0,
        show_progress=False,
    )
    ledger = open_ledger(_optuna.ledger_url(study))
    try:
        recorded = curve_set_of(study, ledger)
    finally:
        ledger.close()
    trace = replay(recorded.recordings, "hermes", SimulationRules(n_devices=2, switch_cost=0.0))
    assert len(trace.slices) == N_TRIALS * UNITS
    assert busy(trace) == pytest.approx(result.device_seconds, rel=0.05)


def busy(trace: Trace) -> float:
    return sum(each.end - each.start for each in trace.slices)
