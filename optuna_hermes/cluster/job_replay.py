"""Replays of traces of jobs under policies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from optuna_hermes.cluster.job_cluster import JobCluster
from optuna_hermes.cluster.job_estimates import Clairvoyant, Estimator, Noisy
from optuna_hermes.cluster.job_learning import Learned
from optuna_hermes.cluster.jobs import Job, JobTrace
from optuna_hermes.errors import InvalidInputError, UnknownPolicyError
from optuna_hermes.model import TrialView
from optuna_hermes.policies import POLICIES, Fifo, Policy, Qssf, Ranked, make_policy

ORACLE_SLICE_SECONDS = 600.0
"""Slice length of ``srtf`` where jobs are not interrupted otherwise."""

JOB_POLICIES: Mapping[str, str] = {
    "fifo": "first come, first served; the queue stops at a job that does not fit",
    "fifo-backfill": "the same, but those behind such a job may overtake it",
    "qssf": "least predicted service first, learned from jobs that are over",
    "qssf-rolling": "the same without trees: what jobs like it took of late",
    "qssf-noise": "the same, with the errors of its authors' replay in place of a predictor",
    "sjf": "shortest job first, an oracle",
    "srtf": "shortest remaining time first, an oracle that interrupts",
}
"""The policies that are made for jobs; all others can be used too."""


@dataclass(frozen=True, kw_only=True)
class JobRules:
    """Settings of a replay of jobs, the same for every policy.

    Args:
        groups: the number of devices of each host of each group.
        slice_seconds: interval at which jobs may be interrupted, None for never.
        restart_seconds: time that a job loses when it goes on elsewhere, or after a pause.
    """

    groups: Mapping[str | None, Sequence[int]]
    slice_seconds: float | None = None
    restart_seconds: float = 0.0


def one_group(n_devices: int, devices_per_host: int) -> dict[str | None, list[int]]:
    """Hosts of one cluster: all of one size, the last one smaller if there is a remainder.

    Raises:
        InvalidInputError: a number is below 1.
    """
    if n_devices < 1 or devices_per_host < 1:
        raise InvalidInputError(
            "There must be a device at least, and one on each host, but got "
            f"{n_devices} devices and {devices_per_host} on each host."
        )
    whole, rest = divmod(n_devices, devices_per_host)
    return {None: [devices_per_host] * whole + [rest] * bool(rest)}


def simulate_jobs(
    jobs: Sequence[Job], name: str, rules: JobRules, *, seed: int = 0, past: Sequence[Job] = ()
) -> JobTrace:
    """Replay jobs under one policy.

    Args:
        jobs: the jobs, in any order.
        name: a key of ``JOB_POLICIES`` or ``POLICIES``, or ``module:Class`` or ``FILE.py:Class``.
        rules: hosts, slices and costs.
        seed: for the errors of predictions, and for policies that draw random numbers.
        past: earlier jobs; a learning predictor knows those that ended before the first of
            ``jobs`` is submitted.

    Raises:
        InvalidInputError: there is no such policy.
    """
    policy, estimator = _made(name, seed)
    if isinstance(estimator, Learned) and past:
        estimator.read(past, min((job.submitted for job in jobs), default=math.inf))
    interrupts = name == "srtf" and rules.slice_seconds is None
    return JobCluster(
        policy,
        jobs,
        groups=rules.groups,
        slice_seconds=ORACLE_SLICE_SECONDS if interrupts else rules.slice_seconds,
        restart_seconds=rules.restart_seconds,
        estimator=estimator,
        seed=seed,
    ).run()


def check_job_policy(name: str) -> None:
    """Raise if no policy has this name.

    Raises:
        UnknownPolicyError: no policy has it; the error lists all names.
    """
    if name not in JOB_POLICIES and name not in POLICIES and ":" not in name:
        known = ", ".join(dict.fromkeys([*JOB_POLICIES, *POLICIES]))
        raise UnknownPolicyError(
            f"With jobs a policy must be one of {known}, or module:Class of your own, but got "
            f"{name!r}."
        )
    _made(name, 0)


def _made(name: str, seed: int) -> tuple[Policy, Estimator | None]:
    """A policy, and the predictor of its jobs' device time."""
    made: dict[str, tuple[Policy, Estimator | None]] = {
        "fifo": (Fifo(backfill=False), None),
        "fifo-backfill": (Fifo(), None),
        "qssf": (Qssf(backfill=False), Learned()),
        "qssf-rolling": (Qssf(backfill=False), Learned(trees=False)),
        "qssf-noise": (Qssf(backfill=False), Noisy(seed)),
        "sjf": (ShortestRemaining(backfill=False), Clairvoyant()),
        "srtf": (ShortestRemaining(backfill=False), Clairvoyant()),
    }
    return made[name] if name in made else (make_policy(name), Learned())


class ShortestRemaining(Ranked):
    """Serves the job that has least time left: an oracle, for comparison.

    Where jobs are not interrupted it is shortest job first. It needs a simulation whose
    ``estimator`` is ``Clairvoyant``.

    A textbook rule; as an oracle in Hu et al., "Helios", SC 2021.

    Args:
        backfill: whether those behind a job that finds too few devices may have them.
    """

    def rank(self, trial: TrialView) -> tuple[float, float, int]:
        """Rank by the time left on the devices it wants, then by arrival.

        Raises:
            ValueError: the job has no ``expected_seconds``.
        """
        if trial.expected_seconds is None:
            raise ValueError(f"Run {trial.number} must have expected_seconds but has none.")
        left = (trial.expected_seconds - trial.attained_seconds) / trial.devices_wanted
        return left, trial.submitted, trial.number
