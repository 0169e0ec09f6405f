"""Metrics of a simulated schedule of jobs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from optuna_hermes.cluster.job_estimates import alone_seconds
from optuna_hermes.cluster.jobs import JobTrace

# Power of a device that a job has, and of one that none has: about those of a V100, the GPU of the
# Helios clusters.
BUSY_WATTS = 300.0
IDLE_WATTS = 45.0


@dataclass(frozen=True, kw_only=True)
class JobMetrics:
    """Metrics over all jobs that ended; NaN where none has.

    Completion is the time from submission to end, queueing the part of it without devices, and the
    finish time ratio is completion in multiples of the job's time alone on the devices it wants.
    """

    jobs: int  # number of jobs
    mean_completion_seconds: float
    median_completion_seconds: float
    p99_completion_seconds: float
    mean_queueing_seconds: float
    median_queueing_seconds: float
    p99_queueing_seconds: float
    makespan_seconds: float  # from the first submission to the last end
    utilisation: float  # device time given to jobs, as a share of all devices' over the makespan
    # Mahajan et al., "Themis", NSDI 2020, divide by the time on an equal share of the cluster.
    mean_finish_time_ratio: float
    p99_finish_time_ratio: float
    delayed_fraction: float  # share of the jobs that ever waited without devices
    restarts: float  # mean number of restarts of a job
    device_seconds: float  # given to all jobs
    energy_joules: float  # of all devices over the makespan, idle ones included


def measure_jobs(trace: JobTrace) -> JobMetrics:
    """Measure a simulation of jobs.

    Example:
        >>> from optuna_hermes.cluster.job_simulator import JobSimulator
        >>> from optuna_hermes.cluster.jobs import ClusterJob, FixedWork
        >>> from optuna_hermes.policies import make_policy
        >>> jobs = [ClusterJob(number=i, submitted=0.0, work=FixedWork(10.0)) for i in (0, 1)]
        >>> trace = JobSimulator(make_policy("fifo"), jobs, groups={None: [1]}).run()
        >>> metrics = measure_jobs(trace)
        >>> metrics.mean_completion_seconds, metrics.mean_queueing_seconds, metrics.utilisation
        (15.0, 5.0, 1.0)
    """
    records = trace.records
    completion = np.array([record.completion_seconds for record in records])
    queueing = np.array([record.queueing_seconds for record in records])
    queueing[queueing < _ROUNDING * completion] = 0.0
    ratios = completion / np.array([alone_seconds(record.job) for record in records])
    used = math.fsum(record.device_seconds for record in records)
    makespan = math.nan
    if records:
        first = min(record.job.submitted for record in records)
        makespan = max(record.finished for record in records) - first
    available = makespan * trace.n_devices
    return JobMetrics(
        jobs=len(records),
        mean_completion_seconds=_mean(completion),
        median_completion_seconds=_percentile(completion, 50),
        p99_completion_seconds=_percentile(completion, 99),
        mean_queueing_seconds=_mean(queueing),
        median_queueing_seconds=_percentile(queueing, 50),
        p99_queueing_seconds=_percentile(queueing, 99),
        makespan_seconds=makespan,
        utilisation=used / available if available else math.nan,
        mean_finish_time_ratio=_mean(ratios),
        p99_finish_time_ratio=_percentile(ratios, 99),
        delayed_fraction=_mean(queueing > 0),
        restarts=_mean(np.array([record.restarts for record in records])),
        device_seconds=used,
        energy_joules=BUSY_WATTS * used + IDLE_WATTS * (available - used),
    )


# Share of the completion time below which a queueing time counts as rounding error.
_ROUNDING = 1e-9


def _mean(values: np.typing.NDArray[np.generic]) -> float:
    return float(values.mean()) if len(values) else math.nan


def _percentile(values: np.typing.NDArray[np.float64], percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else math.nan
