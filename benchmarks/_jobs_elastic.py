"""Elastic jobs: the rows of ``jobs.py`` about ``elastic/``.

The eight workloads of 160 jobs that were published with AdaptDL (Qiao et al., "Pollux", OSDI 2021)
on 16 hosts of 4 devices, decided about every 60 seconds; other devices cost a job 30 seconds, as in
the simulator published with it (`-1s`: one second, as where jobs are rescaled in place). `fifo`
and `las` give every job the devices and the batch size that it was submitted with, `ones` and `smd`
choose both. Jobs say how many epochs are left, `-blind` ones do not. `fifo` lets a job wait in
front that does not fit, `fifo-backfill` does not. `las` has the thresholds of Tiresias, as with
`simulate --jobs`, `las-trials` those that are made for trials, and `las-16h` the one of Pollux'
simulator, which was chosen for these workloads. The utility of a completion time is that of `smd`:
a half at three times what the job takes alone as it was submitted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _elastic_files import read_application, read_elastic_jobs

from optuna_hermes.cluster.job_estimates import alone_seconds
from optuna_hermes.cluster.job_metrics import measure_jobs
from optuna_hermes.cluster.job_replay import JOB_POLICIES
from optuna_hermes.cluster.job_simulator import JobSimulator
from optuna_hermes.cluster.jobs import JobTrace
from optuna_hermes.cluster.smd import PATIENCE, utility
from optuna_hermes.policies import Fifo, LeastAttainedService, Ones, Policy, Smd

HOSTS = [4] * 16
SLICE_SECONDS = 60.0


class Rival(NamedTuple):
    """A policy, and what its jobs are like.

    Args:
        make: a new policy.
        most: devices that a job can be given, None for those it wants, with its own batch size.
        told: whether a job says how many epochs are left.
        slices: whether jobs are interrupted.
        restart_seconds: of a job that gets other devices.
    """

    make: Callable[[], Policy]
    most: int | None = None
    shows_epochs_left: bool = True
    slices: bool = True
    restart_seconds: float = 30.0


RIVALS = {
    "fifo": Rival(lambda: Fifo(backfill=False), slices=False),
    "fifo-backfill": Rival(Fifo, slices=False),
    "las-trials": Rival(LeastAttainedService),
    "las": Rival(lambda: JOB_POLICIES["las"](0)[0]),
    "las-16h": Rival(lambda: LeastAttainedService(thresholds=(57600,))),
    "ones": Rival(Ones, most=64),
    "ones-blind": Rival(Ones, most=64, shows_epochs_left=False),
    "smd": Rival(Smd, most=64),
    "las-16h-1s": Rival(lambda: LeastAttainedService(thresholds=(57600,)), restart_seconds=1.0),
    "ones-1s": Rival(Ones, most=64, restart_seconds=1.0),
}


def rows(
    traces: Path,
    names: Sequence[str] = tuple(RIVALS),
    workloads: Sequence[int] = tuple(range(1, 9)),
) -> Iterator[dict[str, Any]]:
    """One row for each workload and policy.

    Args:
        traces: has ``elastic/models`` and ``elastic/workloads``.
        names: of ``RIVALS``.
        workloads: their numbers.
    """
    folder = traces / "elastic"
    applications = {
        path.name: read_application(path) for path in sorted((folder / "models").iterdir())
    }
    for workload in workloads:
        for name in names:
            rival = RIVALS[name]
            jobs = read_elastic_jobs(
                folder / "workloads" / f"workload-{workload}.csv",
                applications,
                most_devices=rival.most,
                shows_epochs_left=rival.shows_epochs_left,
            )
            began = time.process_time()
            trace = JobSimulator(
                rival.make(),
                jobs,
                groups={None: HOSTS},
                slice_seconds=SLICE_SECONDS if rival.slices else None,
                restart_seconds=rival.restart_seconds,
            ).run()
            yield row(f"elastic-{workload}", name, trace, time.process_time() - began)


def row(trace_name: str, policy: str, trace: JobTrace, cpu_seconds: float) -> dict[str, Any]:
    """Return the measures of a policy on a workload."""
    metrics = measure_jobs(trace)
    return {
        "trace": trace_name,
        "policy": policy,
        "mean_completion_seconds": metrics.mean_completion_seconds,
        "median_completion_seconds": metrics.median_completion_seconds,
        "mean_queueing_seconds": metrics.mean_queueing_seconds,
        "p99_completion_seconds": metrics.p99_completion_seconds,
        "utilisation": metrics.utilisation,
        "utility": mean_utility(trace),
        "delayed_fraction": metrics.delayed_fraction,
        "restarts": metrics.restarts,
        "device_hours": metrics.device_seconds / 3600,
        "decision_seconds": cpu_seconds / max(trace.decisions, 1),
    }


def mean_utility(trace: JobTrace) -> float:
    """Mean utility of completion times, as ``smd`` has it.

    The target of a job is three times what it takes alone on the devices that it wants.
    """
    return float(
        np.mean(
            [
                utility(each.completion_seconds, PATIENCE * alone_seconds(each.job))
                for each in trace.records
            ]
        )
    )


def text(found: Sequence[dict[str, Any]]) -> str:
    """Means over the workloads, with ratios to two of ``RIVALS``, then each of them."""
    policies = list(dict.fromkeys(each["policy"] for each in found))
    mean = {
        policy: {
            key: float(np.mean([each[key] for each in found if each["policy"] == policy]))
            for key in found[0]
            if key not in ("trace", "policy")
        }
        for policy in policies
    }
    lines = [
        "| policy | mean completion | of `las-trials` | of `las-16h` | mean queueing | p99 "
        "| utility | device hours | restarts | seconds a decision |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for policy, each in mean.items():
        ratios = [
            f"{mean[rival]['mean_completion_seconds'] / each['mean_completion_seconds']:.2f}x"
            if rival in mean
            else ""
            for rival in ("las-trials", "las-16h")
        ]
        cells = [
            f"`{policy}`",
            f"{each['mean_completion_seconds']:.0f} s",
            *ratios,
            f"{each['mean_queueing_seconds']:.0f} s",
            f"{each['p99_completion_seconds']:.0f} s",
            f"{each['utility']:.3f}",
            f"{each['device_hours']:.0f}",
            f"{each['restarts']:.1f}",
            f"{each['decision_seconds']:.4f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(
        [*lines, "", "Mean completion and utility of each workload:", "", *_each(found)]
    )


def _each(found: Sequence[dict[str, Any]]) -> list[str]:
    policies = list(dict.fromkeys(each["policy"] for each in found))
    cells = {
        (
            each["trace"],
            each["policy"],
        ): f"{each['mean_completion_seconds']:.0f} s, {each['utility']:.2f}"
        for each in found
    }
    lines = [
        "| workload | " + " | ".join(f"`{policy}`" for policy in policies) + " |",
        "|---" * (len(policies) + 1) + "|",
    ]
    for trace in sorted({each["trace"] for each in found}):
        row = " | ".join(cells.get((trace, policy), "") for policy in policies)
        lines.append(f"| {trace.removeprefix('elastic-')} | {row} |")
    return lines
