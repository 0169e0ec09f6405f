"""``simulate --jobs``: simulation of policies on the jobs of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optuna_hermes.cli._output import libraries_to_stderr, note, show, show_json

if TYPE_CHECKING:
    from optuna_hermes.cluster.job_replay import JobRules
    from optuna_hermes.cluster.jobs import Job

REFERENCE = "fifo"
"""The policy that others are compared with; always simulated."""

Document = dict[str, Any]


def show_jobs(
    path: Path,
    policies: Sequence[str],
    hosts: tuple[int, int],
    slice_seconds: float | None,
    seeds: Sequence[int],
    *,
    json: bool,
) -> None:
    """Simulate a file of jobs, and print the results.

    Args:
        path: of the file. Its groups share all devices.
        policies: names; the reference is added.
        hosts: number of devices, and their number on each host.
        slice_seconds: interval of interruptions, None for none.
        seeds: of errors and random numbers.
        json: true to print JSON.
    """
    from optuna_hermes.view import jobs_view, plural

    with libraries_to_stderr():
        document = of_jobs(path, policies, hosts, slice_seconds, seeds)
    if refused := document["settings"]["refused"]:
        note(f"{plural(refused, 'job')} left out that want more than {plural(hosts[0], 'device')}.")
    if json:
        show_json(document)
        return
    show(jobs_view(document))


def of_jobs(
    path: Path,
    policies: Sequence[str],
    hosts: tuple[int, int],
    slice_seconds: float | None,
    seeds: Sequence[int],
) -> Document:
    """The document of ``simulate --jobs``: settings, and a result for each policy and seed."""
    from dataclasses import replace

    from optuna_hermes.cluster.job_files import read_jobs
    from optuna_hermes.cluster.job_replay import JobRules, check_job_policy, one_group
    from optuna_hermes.replay import parallel_map
    from optuna_hermes.view import counting

    names = list(dict.fromkeys([*policies, REFERENCE]))
    for name in names:
        check_job_policy(name)
    found = read_jobs(path)
    jobs = [replace(job, group=None, params=_params(job)) for job in found.jobs]
    rules = JobRules(groups=one_group(*hosts), slice_seconds=slice_seconds)
    each = list(product(names, seeds))
    with counting(len(each)) as step:
        results = parallel_map(partial(_result, jobs, rules), each, on_answer=step)
    return {
        "settings": {
            "trace": found.name,
            "jobs": len(jobs),
            "refused": sum(job.devices > hosts[0] for job in jobs),
            "policies": names,
            "devices": hosts[0],
            "devices_per_host": hosts[1],
            "slice_seconds": slice_seconds,
            "seeds": list(seeds),
        },
        "results": [
            {"trace": found.name, "policy": name, "seed": seed, **result}
            for (name, seed), result in zip(each, results, strict=True)
        ],
    }


def _params(job: Job) -> dict[str, Any]:
    """The parameters of a job by which policies predict: its user, with its group as a prefix."""
    user = job.params.get("user")
    return {"user": f"{job.group or ''}/{user or ''}"} if job.group or user else {}


def _result(jobs: Sequence[Job], rules: JobRules, each: tuple[str, int]) -> Document:
    from optuna_hermes.cluster.job_metrics import measure_jobs
    from optuna_hermes.cluster.job_replay import simulate_jobs

    name, seed = each
    return asdict(measure_jobs(simulate_jobs(jobs, name, rules, seed=seed)))
