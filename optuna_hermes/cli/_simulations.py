"""The documents of ``simulate``: settings, a line for each simulation, and the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from optuna_hermes import replay
from optuna_hermes.cli._output import note
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.policies import check_simulated_policy
from optuna_hermes.simulator import RIVALS
from optuna_hermes.view.formats import plural
from optuna_hermes.view.simulation import counting

if TYPE_CHECKING:
    from optuna_hermes.cluster.job_replay import JobRules
    from optuna_hermes.cluster.jobs import ClusterJob
    from optuna_hermes.replay import Result, SimulationRules
    from optuna_hermes.replay._studies import StudyMetrics, StudyRules
    from optuna_hermes.simulator import CurveSet

Document = dict[str, Any]
Job = TypeVar("Job", bound=tuple[Any, ...])
Answer = TypeVar("Answer")

# The policy that others are compared with; always simulated.
REFERENCE = "fifo"

# About ten minutes of each policy and seed.
MOST_SLICES = 1_000_000


def of_lists(
    sets: Sequence[CurveSet],
    policies: Sequence[str],
    n_trials: int,
    n_devices: int,
    switch_cost: float,
    seeds: Sequence[int],
) -> Document:
    """Simulate lists of trials that are drawn beforehand."""
    names = list(dict.fromkeys([*policies, *replay.REFERENCES]))
    for name in names:
        check_simulated_policy(name, RIVALS)
    rules = replay.SimulationRules(n_devices=n_devices, n_trials=n_trials, switch_cost=switch_cost)
    simulate = partial(replay.simulate_one, sets, rules)
    document = _of_sets(sets, names, rules, seeds, simulate, replay.tabulate)
    document["settings"]["trials"] = n_trials
    return document


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

    The ``budget`` of a study is device time, in median full trainings.
    """
    # Here, since only these import Optuna: that takes a second.
    from optuna_hermes.replay._proposals import PRUNERS, make_sampler
    from optuna_hermes.replay._studies import StudyRules, tabulate_studies

    names = list(dict.fromkeys([*policies, REFERENCE]))
    for name in names:
        check_simulated_policy(name, PRUNERS, "With a sampler a policy")
    # Raises for an unknown name before anything is simulated.
    make_sampler(sampler, 0)
    rules = StudyRules(sampler=sampler, n_devices=n_devices, budget=budget, switch_cost=switch_cost)
    document = _of_sets(
        sets, names, rules, seeds, partial(_study_result, sets, rules), tabulate_studies
    )
    document["settings"] |= {"sampler": sampler, "budget": budget}
    document["table"].sort(key=lambda row: row["fin1"])
    return document


def _of_sets(
    sets: Sequence[CurveSet],
    policies: Sequence[str],
    rules: SimulationRules | StudyRules,
    seeds: Sequence[int],
    simulate: Callable[[tuple[int, str, int]], Result[Any]],
    tabulate: Callable[[Sequence[Result[Any]]], Sequence[Document]],
) -> Document:
    jobs = list(product(range(len(sets)), policies, seeds))
    answers, failed = _simulated(simulate, jobs)
    results = list(answers.values())
    return {
        "settings": {
            "sets": [
                {"name": each.name, "family": each.family, "trials": len(each.recordings)}
                for each in sets
            ],
            "policies": policies,
            "devices": rules.n_devices,
            "seeds": list(seeds),
            "switch_cost": rules.switch_cost,
        },
        "failed": failed,
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
        "table": tabulate(results),
    }


def _simulated(
    simulate: Callable[[Job], Answer], jobs: Sequence[Job]
) -> tuple[dict[Job, Answer], dict[str, str]]:
    """The answers to jobs, which end with a policy and a seed, but for policies that failed.

    What each of those did comes beside them, by its name.
    """
    with counting(len(jobs)) as step:
        found = replay.parallel_map(partial(_or_error, simulate), jobs, on_answer=step)
    answers = dict(zip(jobs, found, strict=True))
    failed = {job[-2]: each for job, each in answers.items() if isinstance(each, InvalidInputError)}
    if REFERENCE in failed:  # not for what it decided
        raise failed[REFERENCE]
    return (
        {
            job: each
            for job, each in answers.items()
            if job[-2] not in failed and not isinstance(each, InvalidInputError)
        },
        {name: str(error) for name, error in failed.items()},
    )


def _or_error(simulate: Callable[[Job], Answer], job: Job) -> Answer | InvalidInputError:
    try:
        return simulate(job)
    except InvalidInputError as error:
        return error


def _study_result(
    sets: Sequence[CurveSet], setup: StudyRules, job: tuple[int, str, int]
) -> Result[StudyMetrics]:
    from optuna_hermes.replay import Result
    from optuna_hermes.replay._studies import simulate_study

    index, policy, seed = job
    chosen = sets[index]
    metrics = simulate_study(chosen, policy, setup, seed=seed)
    return Result(
        curve_set=chosen.name, family=chosen.family, policy=policy, seed=seed, metrics=metrics
    )


def of_jobs(
    path: Path,
    policies: Sequence[str],
    hosts: tuple[int, int],
    slice_seconds: float | None,
    seeds: Sequence[int],
) -> Document:
    """Simulate the jobs of a cluster, whose groups share all devices.

    ``hosts`` are the number of devices, and their number on each host; ``slice_seconds`` is the
    interval of interruptions, None for none.
    """
    from optuna_hermes.cluster.job_files import COLUMNS, read_jobs
    from optuna_hermes.cluster.job_replay import (
        JOB_POLICIES,
        NEED_SLICES,
        NEED_VALUES,
        ORACLE_SLICE_SECONDS,
        JobRules,
        one_group,
    )

    names = list(dict.fromkeys([*policies, REFERENCE]))
    for name in names:
        check_simulated_policy(name, JOB_POLICIES, "With jobs a policy")
    found = read_jobs(path)
    if found.instead_of_devices:
        note(
            f"Each job wants 1 device: {path} has no column {' or '.join(COLUMNS['devices'])} but "
            f"{', '.join(found.instead_of_devices)}."
        )
    alike = [name for name in names if name in NEED_SLICES]
    if alike and slice_seconds is None:
        note(f"Without --slice-seconds fifo-backfill decides as they do: {', '.join(alike)}.")
    if alike := [name for name in names if name in NEED_VALUES]:
        note(f"As jobs report no values fifo-backfill decides as they do: {', '.join(alike)}.")
    jobs = [replace(job, group=None, params=_user(job)) for job in found.jobs]
    least = min(job.devices for job in jobs)
    if least > hosts[0]:
        raise InvalidInputError(
            f"Some job must fit on {plural(hosts[0], 'device')} but each wants {least} or more: "
            "give more --devices."
        )
    interrupts = slice_seconds is None and "srtf" in names
    if interrupts:
        _check_slices(jobs, hosts[0], ORACLE_SLICE_SECONDS, "Without --slice-seconds srtf")
    _check_slices(jobs, hosts[0], slice_seconds, "--slice-seconds")
    rules = JobRules(groups=one_group(*hosts), slice_seconds=slice_seconds)
    each = list(product(names, seeds))
    results, failed = _simulated(partial(_job_result, jobs, rules), each)
    return {
        "settings": {
            "trace": found.name,
            "jobs": len(jobs),
            "left_out": found.left_out,
            "refused": sum(job.devices > hosts[0] for job in jobs),
            "policies": names,
            "devices": hosts[0],
            "devices_per_host": hosts[1],
            "slice_seconds": slice_seconds,
            **({"srtf_slice_seconds": ORACLE_SLICE_SECONDS} if interrupts else {}),
            "seeds": list(seeds),
        },
        "results": [
            {"trace": found.name, "policy": name, "seed": seed, **result}
            for (name, seed), result in results.items()
        ],
        "failed": failed,
    }


def _check_slices(
    jobs: Sequence[ClusterJob],
    n_devices: int,
    slice_seconds: float | None,
    given: str,
) -> None:
    """Refuse slices of which there would be too many to simulate."""
    served = [job for job in jobs if job.devices <= n_devices]
    # The jobs cannot end sooner: after the last one's time, nor before all the work is done.
    span = max(job.submitted + job.work.total for job in served) - served[0].submitted
    work = sum(job.work.total * job.devices for job in served) / n_devices
    least = max(span, work) / MOST_SLICES
    if slice_seconds is not None and 0 < slice_seconds < least:
        raise InvalidInputError(
            f"{given} must give {MOST_SLICES} slices at most, so be {least:.3g} or more "
            f"for these jobs, but got {slice_seconds:g}."
        )


def _user(job: ClusterJob) -> dict[str, Any]:
    # Policies predict by it. Groups share all devices here, and users of two may have one name.
    user = job.params.get("user")
    return {"user": f"{job.group or ''}/{user or ''}"} if job.group or user else {}


def _job_result(jobs: Sequence[ClusterJob], rules: JobRules, each: tuple[str, int]) -> Document:
    from optuna_hermes.cluster.job_metrics import measure_jobs
    from optuna_hermes.cluster.job_replay import simulate_jobs

    name, seed = each
    return asdict(measure_jobs(simulate_jobs(jobs, name, rules, seed=seed)))
