"""Replays of traces of jobs under policies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from optuna_hermes.cluster.job_estimates import Clairvoyant, Estimator, Learned, Noisy
from optuna_hermes.cluster.job_simulator import JobSimulator
from optuna_hermes.cluster.jobs import ClusterJob, JobTrace
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import TrialView
from optuna_hermes.policies import Fifo, LeastAttainedService, Policy, Qssf, Ranked, make_policy

# Slice length of ``srtf`` where jobs are not interrupted otherwise.
ORACLE_SLICE_SECONDS = 600.0

JOB_POLICIES: Mapping[str, Callable[[int], tuple[Policy, Estimator | None]]] = {
    # First come, first served; the queue stops at a job that does not fit.
    "fifo": lambda seed: (Fifo(backfill=False), None),
    # The same, but those behind such a job may overtake it.
    "fifo-backfill": lambda seed: (Fifo(), None),
    # Least predicted service first, learned from jobs that are over.
    "qssf": lambda seed: (Qssf(backfill=False), Learned()),
    # The same without trees: the recent times of jobs like it.
    "qssf-rolling": lambda seed: (Qssf(backfill=False), Learned(trees=False)),
    # The same, with the errors of its authors' replay in place of a predictor.
    "qssf-noise": lambda seed: (Qssf(backfill=False), Noisy(seed)),
    # Thresholds in device seconds, as in the paper: jobs report no units.
    "las": lambda seed: (LeastAttainedService(thresholds=(3250, 7200, 18000)), None),
    # Shortest job first, an oracle.
    "sjf": lambda seed: (ShortestRemaining(backfill=False), Clairvoyant()),
    # Shortest remaining time first, an oracle that interrupts.
    "srtf": lambda seed: (ShortestRemaining(backfill=False), Clairvoyant()),
}
"""Makers of the policies for jobs, and of their predictors, from a seed; others can be used too."""

NEED_SLICES = ("round-robin", "las")
"""Policies that decide by what jobs have had: without slices they do as ``fifo-backfill``."""

NEED_VALUES = ("hermes", "hermes-slope", "slaq", "asha", "freeze-thaw")
"""Policies that decide by what trials report: of jobs, which report nothing, they do likewise."""


@dataclass(frozen=True, kw_only=True)
class JobRules:
    """Settings of a replay of jobs, the same for every policy: see ``JobSimulator``.

    A restart costs nothing: a trace does not tell what one would.
    """

    groups: Mapping[str | None, Sequence[int]]
    slice_seconds: float | None = None


def one_group(n_devices: int, devices_per_host: int) -> dict[str | None, list[int]]:
    """Hosts of one cluster, all of one size but perhaps the last."""
    if n_devices < 1 or devices_per_host < 1:
        raise InvalidInputError(
            "There must be a device at least, and one on each host, but got "
            f"{n_devices} devices and {devices_per_host} on each host."
        )
    whole, rest = divmod(n_devices, devices_per_host)
    return {None: [devices_per_host] * whole + [rest] * bool(rest)}


def simulate_jobs(
    jobs: Sequence[ClusterJob],
    name: str,
    rules: JobRules,
    *,
    seed: int = 0,
    past: Sequence[ClusterJob] = (),
) -> JobTrace:
    """Replay jobs under one of ``JOB_POLICIES`` or ``POLICIES``, or a policy of one's own.

    ``past`` are earlier jobs, for a predictor that learns.
    """
    is_of_jobs = name in JOB_POLICIES
    policy, estimator = JOB_POLICIES[name](seed) if is_of_jobs else (make_policy(name), Learned())
    # Those that ended before the first job is submitted: later ends would be the future.
    if isinstance(estimator, Learned) and past:
        estimator.read(past, min((job.submitted for job in jobs), default=math.inf))
    interrupts = name == "srtf" and rules.slice_seconds is None
    return JobSimulator(
        policy,
        jobs,
        groups=rules.groups,
        slice_seconds=ORACLE_SLICE_SECONDS if interrupts else rules.slice_seconds,
        estimator=estimator,
        seed=seed,
    ).run()


class ShortestRemaining(Ranked):
    """Serves the job that has least time left, where the ``estimator`` is ``Clairvoyant``.

    A textbook rule; where jobs are not interrupted it is shortest job first. As an oracle in Hu et
    al., "Helios", SC 2021.
    """

    def rank(self, trial: TrialView) -> tuple[float, float, int]:
        """Rank by the time left on the devices it wants, then by arrival."""
        if trial.expected_seconds is None:
            raise ValueError(f"Job {trial.number} must have expected_seconds but has none.")
        left = (trial.expected_seconds - trial.attained_seconds) / trial.devices_wanted
        return left, trial.submitted, trial.number
