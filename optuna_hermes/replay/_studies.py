"""Simulation of whole studies: a sampler that learns chooses among recorded trainings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import optuna

from optuna_hermes import _optuna
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.policies import make_policy
from optuna_hermes.replay._proposals import PRUNERS, OptunaPruning, Proposals, make_sampler
from optuna_hermes.replay._simulate import Result
from optuna_hermes.replay._table import means_of, ratios
from optuna_hermes.sampler import HermesSampler
from optuna_hermes.simulator import CurveSet, Overheads, SwitchCosts, Trace, TrialSimulator
from optuna_hermes.simulator._metrics import span_of

PLAIN = ("fifo", *PRUNERS)
"""The policies that stand for plain Optuna: their sampler is not wrapped in a HermesSampler."""


@dataclass(frozen=True, kw_only=True)
class StudyRules:
    """Settings of a replay with a sampler.

    Args:
        sampler: one of ``SAMPLERS``.
        n_devices: number of devices.
        budget: device time of the study, in median full trainings of the set.
        switch_cost: cost of changing a device's trial, as a fraction of the unit trained next.
        opening_cost: cost of opening a trial, as a fraction of its first unit.
    """

    sampler: str = "TPESampler"
    n_devices: int = 1
    budget: float = 40.0
    switch_cost: float = 0.005
    opening_cost: float = 0.0

    def __post_init__(self) -> None:
        if not self.budget > 0:
            raise InvalidInputError(f"A budget must be above 0 trainings but got {self.budget}.")


@dataclass(frozen=True, kw_only=True)
class StudyMetrics:
    """Times until a study came near the best of its pool; fractions of the budget, 1 if never.

    ``any5`` is the time until any value was within 5 % of the span between the pool's median first
    value and its best final one, ``fin5`` that until a finished trial was; the others are for 1 %.
    """

    any5: float
    any1: float
    fin5: float
    fin1: float
    trials_opened: int


def simulate_study(
    curve_set: CurveSet, policy: str, setup: StudyRules, *, seed: int
) -> StudyMetrics:
    """Simulate a study as ``study_trace`` does, and measure it.

    Raises:
        InvalidInputError: there is no such policy or sampler, or the set has no parameters.
    """
    return measure_study(study_trace(curve_set, policy, setup, seed=seed), curve_set, setup)


def study_trace(curve_set: CurveSet, policy: str, setup: StudyRules, *, seed: int) -> Trace:
    """Simulate a study that chooses among recorded trainings until its budget is spent.

    The sampler suggests a float for each parameter, and the nearest configuration not trained yet
    is trained, which the sampler is told.

    Raises:
        InvalidInputError: there is no such policy or sampler, or the set has no parameters.
    """
    sampler = make_sampler(setup.sampler, seed)
    units = max(len(recording.values) for recording in curve_set.recordings)
    _optuna.log_warnings_only()
    study = optuna.create_study(
        # Hyperband draws a trial's bracket from the study's name.
        study_name=f"seed-{seed}",
        sampler=sampler if policy in PLAIN else HermesSampler(sampler),
        pruner=PRUNERS[policy](units) if policy in PRUNERS else optuna.pruners.NopPruner(),
    )
    source = Proposals(curve_set, study)
    return TrialSimulator(
        OptunaPruning(source.to_prune) if policy in PRUNERS else make_policy(policy),
        source,
        n_devices=setup.n_devices,
        costs=SwitchCosts(fraction=setup.switch_cost),
        overheads=Overheads(opening_fraction=setup.opening_cost),
        seed=seed,
        timeout=budget_seconds(curve_set, setup),
    ).run()


def budget_seconds(curve_set: CurveSet, setup: StudyRules) -> float:
    full = statistics.median(sum(recording.seconds) for recording in curve_set.recordings)
    return setup.budget * full / setup.n_devices


def measure_study(trace: Trace, curve_set: CurveSet, setup: StudyRules) -> StudyMetrics:
    """Measure what ``study_trace`` has returned."""
    until = budget_seconds(curve_set, setup)
    lowest, span = span_of(curve_set.recordings)
    values = [(each.end, each.value) for each in trace.slices]
    finals = [(end, trace.recordings[number].final) for number, end in trace.finished.items()]

    def share(reached: list[tuple[float, float]], near: float) -> float:
        near_value = lowest + near * span
        ends = [end for end, value in reached if math.isfinite(value) and value <= near_value]
        return min([until, *ends]) / until

    return StudyMetrics(
        any5=share(values, 0.05),
        any1=share(values, 0.01),
        fin5=share(finals, 0.05),
        fin1=share(finals, 0.01),
        trials_opened=len(trace.recordings),
    )


TIMES = ("any5", "any1", "fin5", "fin1")
MEASURES = (*TIMES, "trials_opened")


def tabulate_studies(results: Sequence[Result[StudyMetrics]]) -> list[dict[str, Any]]:
    """A row for each policy, in the order of their first results.

    By name: each of ``MEASURES``, as ``means_of``; ``ratios``, the speed-ups over ``fifo`` and over
    the ``best pruner`` in each of ``TIMES``, empty where those were not simulated.
    """
    policies = list(dict.fromkeys(result.policy for result in results))
    means = {
        policy: means_of([result for result in results if result.policy == policy], MEASURES)
        for policy in policies
    }
    fifo = [means["fifo"]] if "fifo" in means else []
    pruners = [means[policy] for policy in policies if policy in PRUNERS]
    return [
        {
            "policy": policy,
            **own,
            "ratios": {
                "fifo": ratios(own, fifo, TIMES),
                "best pruner": ratios(own, pruners, TIMES),
            },
        }
        for policy, own in means.items()
    ]
