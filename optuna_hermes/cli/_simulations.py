"""The documents of ``simulate``: settings, a line for each simulation, and the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from optuna_hermes.errors import UnknownPolicyError

if TYPE_CHECKING:
    from optuna_hermes.replay._studies import StudyResult, StudyRules
    from optuna_hermes.simulator import CurveSet

Document = dict[str, Any]


def of_lists(
    sets: Sequence[CurveSet],
    policies: Sequence[str],
    n_trials: int,
    n_devices: int,
    switch_cost: float,
    seeds: Sequence[int],
) -> Document:
    """Simulate lists of trials that are drawn beforehand.

    Args:
        sets: from which they are drawn.
        policies: names; those that every policy is compared with are added.
        n_trials: number of trials of each set.
        n_devices: number of devices.
        switch_cost: of a device that changes trials, as a fraction of a unit.
        seeds: of the draws.
    """
    from optuna_hermes import replay
    from optuna_hermes.view import counting

    names = list(dict.fromkeys([*policies, *replay.REFERENCES]))
    for name in names:
        replay.check_policy(name)
    rules = replay.SimulationRules(n_devices=n_devices, n_trials=n_trials, switch_cost=switch_cost)
    with counting(len(sets) * len(names) * len(seeds)) as step:
        results = replay.simulate(sets, names, rules, seeds=seeds, on_result=step)
    return {
        "settings": {
            **_settings(sets, names, n_devices, switch_cost, seeds),
            "trials": n_trials,
        },
        "results": [
            {
                "set": each.curve_set,
                "family": each.family,
                "policy": each.policy,
                "seed": each.seed,
                **asdict(each.metrics),
            }
            for each in results
        ],
        "table": [
            {
                "policy": row.policy,
                **row.means,
                "switches": row.switches,
                "killed_best": row.killed_best,
                "ratios": row.ratios,
                "families": row.families,
            }
            for row in replay.tabulate(results)
        ],
    }


def with_sampler(
    sets: Sequence[CurveSet],
    policies: Sequence[str],
    sampler: str,
    budget: float,
    n_devices: int,
    switch_cost: float,
    seeds: Sequence[int],
) -> Document:
    """Simulate studies whose sampler chooses among all trials of a set.

    Args:
        sets: with parameters.
        policies: names; ``fifo`` is added.
        sampler: name of one of Optuna's.
        budget: device time of a study, in median full trainings.
        n_devices: number of devices.
        switch_cost: of a device that changes trials, as a fraction of a unit.
        seeds: of the samplers.
    """
    from optuna_hermes.replay import parallel_map
    from optuna_hermes.replay._proposals import make_sampler
    from optuna_hermes.replay._studies import StudyRules, tabulate_studies
    from optuna_hermes.view import counting

    names = list(dict.fromkeys([*policies, "fifo"]))
    for name in names:
        _check_policy(name)
    make_sampler(sampler, 0)  # raises for an unknown name before anything is simulated
    setup = StudyRules(sampler=sampler, n_devices=n_devices, budget=budget, switch_cost=switch_cost)
    jobs = list(product(range(len(sets)), names, seeds))
    with counting(len(jobs)) as step:
        runs = parallel_map(partial(_study_result, sets, setup), jobs, on_answer=step)
    families = {each.name: each.family for each in sets}
    return {
        "settings": {
            **_settings(sets, names, n_devices, switch_cost, seeds),
            "sampler": sampler,
            "budget": budget,
        },
        "results": [
            {
                "set": run.curve_set,
                "family": families[run.curve_set],
                "policy": run.policy,
                "seed": run.seed,
                **asdict(run.metrics),
            }
            for run in runs
        ],
        "table": [
            {
                "policy": row.policy,
                **row.means,
                "ratios": {"fifo": row.over_fifo, "best pruner": row.over_pruners},
            }
            for row in sorted(tabulate_studies(runs), key=lambda row: row.means["fin1"])
        ],
    }


def _study_result(
    sets: Sequence[CurveSet], setup: StudyRules, job: tuple[int, str, int]
) -> StudyResult:
    from optuna_hermes.replay._studies import StudyResult, simulate_study

    index, policy, seed = job
    metrics = simulate_study(sets[index], policy, setup, seed=seed)
    return StudyResult(curve_set=sets[index].name, policy=policy, seed=seed, metrics=metrics)


def _check_policy(name: str) -> None:
    """Refuse a policy that a study with a sampler cannot have.

    Raises:
        UnknownPolicyError: no policy has this name, or it must know all trials beforehand.
    """
    from optuna_hermes.policies import POLICIES
    from optuna_hermes.replay import check_policy
    from optuna_hermes.replay._proposals import PRUNERS
    from optuna_hermes.simulator.rivals import RIVALS

    known = [*POLICIES, *PRUNERS]
    if name in known:
        return
    if name in RIVALS or ":" not in name:
        raise UnknownPolicyError(
            f"With a sampler a policy must be one of {', '.join(known)}, or module:Class of your "
            f"own, but got {name!r}."
        )
    check_policy(name)


def _settings(
    sets: Sequence[CurveSet],
    policies: Sequence[str],
    n_devices: int,
    switch_cost: float,
    seeds: Sequence[int],
) -> Document:
    return {
        "sets": [
            {"name": each.name, "family": each.family, "trials": len(each.recordings)}
            for each in sets
        ],
        "policies": list(policies),
        "devices": n_devices,
        "seeds": list(seeds),
        "switch_cost": switch_cost,
    }
