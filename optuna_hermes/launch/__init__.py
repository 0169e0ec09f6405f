"""Launchers: they start ``optuna-hermes optimize`` on the hosts of SLURM, Kubernetes or Ray.

A launcher hands a job to an engine and asks it about the hosts. What the hosts do with each other,
they do over the study's database; no launcher schedules.
"""

from optuna_hermes.launch._base import Host, HostState, Launch, Launcher
from optuna_hermes.launch._job import Job
from optuna_hermes.launch._launch_records import kept, record
from optuna_hermes.launch._names import LAUNCHERS, launcher

__all__ = [
    "LAUNCHERS",
    "Host",
    "HostState",
    "Job",
    "Launch",
    "Launcher",
    "kept",
    "launcher",
    "record",
]
