"""The job of SLURM, or the pod of Kubernetes, that this process belongs to."""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from numbers import Real

from optuna_hermes._programs import ask
from optuna_hermes.errors import InvalidInputError, LaunchError

HOST_VARIABLE = "OPTUNA_HERMES_HOST"
"""Name of this host for a ledger, where several of one machine must differ."""
GRACE_VARIABLE = "OPTUNA_HERMES_GRACE_SECONDS"

DEFAULT_GRACE_SECONDS = 15.0
SLURM_GRACE_SECONDS = 30.0
"""SLURM's ``KillWait``, unless a site has set another one."""

MOST_GRACE_SECONDS = 1e6

_ASK_SECONDS = 10.0
"""Time for SLURM's controller to answer; on a busy cluster it takes some seconds."""

_OF_JOB = re.compile(r"[0-9]{1,18}")
_NUMBER = re.compile(r"[0-9]{1,12}")
"""A count or a time: no calendar has the seconds of more digits."""


@dataclass(frozen=True, kw_only=True)
class JobEnvironment:
    """A manager's facts about this process, from its environment.

    Args:
        job: the id of its job in SLURM, as ``scontrol`` takes it: ``17``, or ``12_3`` for task 3 of
            the array 12; None outside of SLURM.
        node: SLURM's name of this node, empty if it is not known.
        restarts: how often SLURM has begun that job again.
        began_at: when SLURM has begun it, in seconds since 1970; None if that is not known.
        ends_at: when SLURM ends it, likewise.
        grace_seconds: time from a signal to the end of all processes.
    """

    job: str | None = None
    node: str = ""
    restarts: int = 0
    began_at: float | None = None
    ends_at: float | None = None
    grace_seconds: float = DEFAULT_GRACE_SECONDS


def job_environment(environ: Mapping[str, str]) -> JobEnvironment:
    """Read it from the environment of a process.

    Raises:
        InvalidInputError: ``$OPTUNA_HERMES_GRACE_SECONDS`` is no number of seconds.
    """
    job = _job(environ)
    if job is None:
        return JobEnvironment(grace_seconds=_grace(environ, DEFAULT_GRACE_SECONDS))
    return JobEnvironment(
        job=job,
        node=environ.get("SLURMD_NODENAME", ""),
        restarts=int(_number(environ, "SLURM_RESTART_COUNT") or 0),
        began_at=_number(environ, "SLURM_JOB_START_TIME") or None,
        ends_at=_number(environ, "SLURM_JOB_END_TIME") or None,
        grace_seconds=_grace(environ, SLURM_GRACE_SECONDS),
    )


def job_label(environ: Mapping[str, str]) -> str | None:
    """Name of the job that an environment is of, for files; None outside of SLURM."""
    job = _job(environ)
    return None if job is None else f"slurm-{job}"


def host_name(environ: Mapping[str, str] = os.environ) -> str:
    """Name of this host for a ledger: several jobs on one node are as many hosts."""
    if named := environ.get(HOST_VARIABLE):
        return named
    host = socket.gethostname()
    label = job_label(environ)
    return host if label is None else f"{host}-{label}"


def end_of_job(known: JobEnvironment) -> float | None:
    """End of the job, in seconds since 1970: SLURM is asked if its environment does not say."""
    if known.job is None or known.ends_at is not None:
        return known.ends_at
    command = ["squeue", "--noheader", "--jobs", known.job, "--format", "%e"]
    try:
        return time_of(ask(command, "", {"SLURM_TIME_FORMAT": "standard"}, seconds=_ASK_SECONDS))
    except LaunchError:
        return None


def time_of(told: str) -> float | None:
    """Seconds since 1970 of what ``squeue`` prints, in local time; None for a job without end.

    Example:
        >>> time_of("NONE") is None
        True
    """
    try:
        return datetime.fromisoformat(told.strip()).timestamp()
    except (ValueError, OverflowError):
        return None


def requeue(job: str) -> None:
    """Let SLURM begin a job (``JobEnvironment.job``) again, which ends it.

    Raises:
        LaunchError: SLURM does not.
    """
    ask(["scontrol", "requeue", job], "", seconds=_ASK_SECONDS)


def _job(environ: Mapping[str, str]) -> str | None:
    array, task = environ.get("SLURM_ARRAY_JOB_ID", ""), environ.get("SLURM_ARRAY_TASK_ID", "")
    job = environ.get("SLURM_JOB_ID", "")
    # It names a folder: nothing but numbers is taken.
    if not _OF_JOB.fullmatch(job):
        return None
    if _OF_JOB.fullmatch(array) and _OF_JOB.fullmatch(task):
        return f"{array}_{task}"
    return job


def _number(environ: Mapping[str, str], name: str) -> float | None:
    text = environ.get(name, "")
    return float(text) if _NUMBER.fullmatch(text) else None


def _grace(environ: Mapping[str, str], usual: float) -> float:
    text = environ.get(GRACE_VARIABLE, "").strip()
    return check_grace(seconds_of(text), f"${GRACE_VARIABLE}") if text else usual


def seconds_of(text: str) -> float:
    """A number of seconds; NaN for a text that is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def check_grace(seconds: float, name: str = "grace") -> float:
    """Return a grace period that is in range.

    Raises:
        InvalidInputError: it is not.
    """
    if not (isinstance(seconds, Real) and 1.0 <= seconds <= MOST_GRACE_SECONDS):  # nor NaN
        raise InvalidInputError(
            f"{name} must be from 1 to {MOST_GRACE_SECONDS:.0f} seconds but got {seconds!r}: give "
            "the time between the manager's signal and its SIGKILL."
        )
    return seconds
