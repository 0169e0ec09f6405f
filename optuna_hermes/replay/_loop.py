"""Simulation of whole studies: a sampler that learns chooses among recorded trainings."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import optuna
from optuna.samplers import BaseSampler

from optuna_hermes import _optuna
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.policies import Policy, make_policy
from optuna_hermes.replay._loop_pruners import PRUNERS, Stopping
from optuna_hermes.replay._loop_source import Proposals, make_sampler
from optuna_hermes.sampler import HermesSampler
from optuna_hermes.simulator import Cluster, CurveSet, Recording, SwitchCosts, Trace
from optuna_hermes.simulator._metrics import span_of

PLAIN = ("fifo", *PRUNERS)
"""The policies that stand for plain Optuna: their sampler is not wrapped in a HermesSampler."""


@dataclass(frozen=True, kw_only=True)
class LoopSetup:
    """Settings of a replay with a sampler.

    Args:
        sampler: one of ``SAMPLERS``.
        n_devices: number of devices.
        budget: device time of the study, in median full trainings of the set.
        switch_cost: cost of changing a device's trial, as a fraction of the unit trained next.

    Raises:
        InvalidInputError: the budget is not positive.
    """

    sampler: str = "TPESampler"
    n_devices: int = 1
    budget: float = 40.0
    switch_cost: float = 0.005

    def __post_init__(self) -> None:
        if not self.budget > 0:
            raise InvalidInputError(f"A budget must be above 0 trainings but got {self.budget}.")


@dataclass(frozen=True, kw_only=True)
class LoopMetrics:
    """Times until a study came near the best of its pool; fractions of the budget, 1 if never.

    Near is within 5 % or 1 % of the span between the pool's median first value and its best final
    one.

    Args:
        any5: time until any value was within 5 %.
        any1: time until any value was within 1 %.
        fin5: time until a finished trial was within 5 %.
        fin1: time until a finished trial was within 1 %.
        trials_opened: number of trainings that were begun.
    """

    any5: float
    any1: float
    fin5: float
    fin1: float
    trials_opened: int


def run_loop(curve_set: CurveSet, policy: str, setup: LoopSetup, *, seed: int) -> LoopMetrics:
    """Simulate a study that chooses among recorded trainings until its budget is spent.

    Each parameter is scaled to its rank in [0, 1], the sampler suggests one float for each, and
    the nearest configuration not trained yet is trained; the study keeps the floats.
    Under the policies of ``PLAIN`` the study is plain Optuna's; under the others its sampler is a
    ``HermesSampler``, as in a live study.

    Args:
        curve_set: the pool, with parameters.
        policy: name of a policy, or of one of ``PRUNERS``.
        setup: the settings.
        seed: for the sampler and the policy.

    Raises:
        InvalidInputError: there is no such policy or sampler, or the set has no parameters.
    """
    sampler = make_sampler(setup.sampler, seed)
    units = max(len(recording.values) for recording in curve_set.recordings)
    study = _new_study(policy, sampler, units, seed)
    source = Proposals(curve_set, study)
    chosen: Policy = Stopping(source.condemned) if policy in PRUNERS else make_policy(policy)
    until = budget_seconds(curve_set, setup)
    costs = SwitchCosts(fraction=setup.switch_cost)
    cluster = Cluster(chosen, source, n_devices=setup.n_devices, costs=costs, seed=seed)
    return _measured(cluster.run(until), curve_set.recordings, until)


def budget_seconds(curve_set: CurveSet, setup: LoopSetup) -> float:
    """Duration of a study: its budget of device time over the number of devices."""
    full = statistics.median(sum(recording.seconds) for recording in curve_set.recordings)
    return setup.budget * full / setup.n_devices


def _new_study(policy: str, sampler: BaseSampler, units: int, seed: int) -> optuna.Study:
    _optuna.log_warnings_only()
    plain = policy in PLAIN
    return optuna.create_study(
        # Hyperband draws a trial's bracket from the study's name.
        study_name=f"seed-{seed}",
        sampler=sampler if plain else HermesSampler(sampler),
        pruner=PRUNERS[policy](units) if policy in PRUNERS else optuna.pruners.NopPruner(),
    )


def _measured(trace: Trace, pool: tuple[Recording, ...], until: float) -> LoopMetrics:
    lowest, span = span_of(pool)
    values = [(each.end, each.value) for each in trace.slices]
    finals = [(end, trace.recordings[number].final) for number, end in trace.finished.items()]

    def share(reached: list[tuple[float, float]], near: float) -> float:
        ends = [end for end, value in reached if value <= lowest + near * span]
        return min([until, *ends]) / until

    return LoopMetrics(
        any5=share(values, 0.05),
        any1=share(values, 0.01),
        fin5=share(finals, 0.05),
        fin1=share(finals, 0.01),
        trials_opened=len(trace.recordings),
    )
