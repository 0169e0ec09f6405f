"""Every rival keeps the contract of policies but for pruning, and stops whom Optuna would stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import optuna
import pytest
from hypothesis import HealthCheck, given, settings
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, SuccessiveHalvingPruner

from optuna_hermes.model import Curve, Device, Snapshot, TrialView
from optuna_hermes.policies import Fifo
from optuna_hermes.simulator import (
    RIVALS,
    FixedList,
    Recording,
    TrialSimulator,
    arrange,
    make_rival,
)
from optuna_hermes.testing import PolicyContract
from optuna_hermes.testing.policy import curves, snapshots

N_UNITS = 13

KNOWN = [Recording(values=(final,), seconds=(1.0,)) for final in (0.5, math.nan, 0.1, -math.inf)]
"""Recordings that the oracles know; of trials with higher numbers they know nothing."""

PRUNERS: Mapping[str, Callable[[], BasePruner]] = {
    "asha-stop": lambda: SuccessiveHalvingPruner(min_resource=1, reduction_factor=3),
    "hyperband-stop": lambda: HyperbandPruner(max_resource=N_UNITS, reduction_factor=3),
    "median-stop": lambda: MedianPruner(),
}

_inherited = settings(suppress_health_check=[HealthCheck.differing_executors], deadline=None)


class StopContract(PolicyContract):
    """The contract of a policy that prunes: what it prunes it need not run."""

    prunes = True

    @_inherited
    @given(snapshot=snapshots())
    def test_no_device_stays_empty_that_could_be_used(self, snapshot: Snapshot) -> None:
        """Only suspended trials are pruned, none twice, and the rest are served as FIFO would."""
        decision = self.policy.decide(snapshot)
        suspended = {
            trial.number for trial in snapshot.trials if trial.state in ("parked", "stored")
        }
        assert len(decision.pruned) == len(suspended.intersection(decision.pruned))
        rest = tuple(trial for trial in snapshot.trials if trial.number not in decision.pruned)
        fifo = Fifo().decide(replace(snapshot, trials=rest))
        assert decision.assignments == fifo.assignments

    @_inherited
    @given(curve=curves)
    def test_one_trial_gets_the_one_device(self, curve: Curve) -> None:
        """A trial that is alone is compared with nobody: only NaN can stop it."""
        trial = TrialView(number=7, state="parked", curve=curve, waiting_since=0.0)
        snapshot = Snapshot(devices=(Device(id="cpu:0", free=True),), trials=(trial,))
        decision = self.policy.decide(snapshot)
        if decision.pruned:
            assert decision.pruned == (7,)
            assert math.isnan(curve.values[-1])
        else:
            assert [each.trial for each in decision.assignments] == [7]


class TestAshaStop(StopContract):
    policy = make_rival("asha-stop", KNOWN)


class TestHyperbandStop(StopContract):
    policy = make_rival("hyperband-stop", KNOWN)


class TestMedianStop(StopContract):
    policy = make_rival("median-stop", KNOWN)


class TestOracle(PolicyContract):
    policy = make_rival("oracle", KNOWN)


class TestOracleBreadth(PolicyContract):
    policy = make_rival("oracle-breadth", KNOWN)


def test_no_rival_is_left_out() -> None:
    """Every rival that users can name has its contract checked here."""
    suites = [*PolicyContract.__subclasses__(), *StopContract.__subclasses__()]
    checked = {type(suite.policy) for suite in suites if suite is not StopContract}
    assert checked >= {type(make_rival(name, KNOWN)) for name in RIVALS}


def trainings(seed: int, n_trials: int = 60) -> list[Recording]:
    """Falling curves with noise; some have NaN in them, and some values are equal."""
    rng = np.random.default_rng(seed)
    floors = rng.uniform(0.0, 1.0, (n_trials, 1))
    values = floors + rng.uniform(0.1, 2.0, (n_trials, 1)) / np.arange(1, N_UNITS + 1)
    values = (values + rng.normal(0.0, 0.1, values.shape)).round(1)
    values[rng.random(values.shape) < 0.01] = math.nan
    values[:, -1] = floors[:, 0]
    seconds = (1.0,) * N_UNITS
    return [Recording(values=tuple(row), seconds=seconds) for row in values.tolist()]


def pruned_by_optuna(
    pruner: BasePruner, reports: Sequence[tuple[int, int, float]]
) -> dict[int, int]:
    """Return the last unit of each trial that a pruner stops, by (number, unit, value) in order."""
    study = optuna.create_study(study_name="", pruner=pruner)
    trials = [study.ask() for _ in range(1 + max(number for number, _, _ in reports))]
    pruned: dict[int, int] = {}
    for number, unit, value in reports:
        trials[number].report(value, step=unit)
        if unit == N_UNITS:
            study.tell(trials[number], value)
        elif trials[number].should_prune():
            pruned[number] = unit
    return pruned


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize("name", PRUNERS)
@pytest.mark.parametrize("n_devices", [1, 4])
def test_a_stopping_rule_stops_whom_optuna_stops(name: str, n_devices: int) -> None:
    """Told the same reports, Optuna's pruner stops the same trials after the same units."""
    for seed in range(3):
        recordings = arrange(name, trainings(seed))
        policy = make_rival(name, recordings)
        trace = TrialSimulator(policy, FixedList(recordings), n_devices=n_devices).run()
        units = {each.number: each.unit for each in trace.slices}
        stopped = {number: units[number] for number in trace.pruned}
        reports = [(each.number, each.unit, each.value) for each in trace.slices]
        assert len(stopped) >= 10
        assert pruned_by_optuna(PRUNERS[name](), reports) == stopped
