"""Launchers: they start ``optuna-hermes optimize`` on the hosts of SLURM, Kubernetes or Ray.

A launcher hands a job to an engine and asks it about the hosts. What the hosts do with each other,
they do over the study's database; no launcher schedules.
"""

from optuna_hermes.launch._base import Host as Host
from optuna_hermes.launch._base import HostState as HostState
from optuna_hermes.launch._base import Launch as Launch
from optuna_hermes.launch._base import Launcher as Launcher
from optuna_hermes.launch._job import Job as Job
from optuna_hermes.launch._launch_records import kept as kept
from optuna_hermes.launch._launch_records import record as record
from optuna_hermes.launch._names import LAUNCHERS as LAUNCHERS
from optuna_hermes.launch._names import launcher as launcher
