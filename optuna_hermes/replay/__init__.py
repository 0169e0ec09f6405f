"""Replays: recorded trainings, from files and studies, simulated under policies and compared."""

from __future__ import annotations

from optuna_hermes.replay._elastic_files import read_application, read_elastic_jobs
from optuna_hermes.replay._files import read_curve_set
from optuna_hermes.replay._job_files import DEVICES_OF_A_NODE, JobSet, read_jobs, read_philly
from optuna_hermes.replay._jobs import (
    JOB_POLICIES,
    JobRules,
    check_job_policy,
    one_group,
    simulate_jobs,
)
from optuna_hermes.replay._processes import spread
from optuna_hermes.replay._simulate import (
    REFERENCES,
    Result,
    Rules,
    check_names,
    check_policy,
    replay,
    simulate,
)
from optuna_hermes.replay._study import curve_set_of, unfinished_trials
from optuna_hermes.replay._table import Row, tabulate

__all__ = [
    "DEVICES_OF_A_NODE",
    "JOB_POLICIES",
    "REFERENCES",
    "JobRules",
    "JobSet",
    "Result",
    "Row",
    "Rules",
    "check_job_policy",
    "check_names",
    "check_policy",
    "curve_set_of",
    "one_group",
    "read_application",
    "read_curve_set",
    "read_elastic_jobs",
    "read_jobs",
    "read_philly",
    "replay",
    "simulate",
    "simulate_jobs",
    "spread",
    "tabulate",
    "unfinished_trials",
]
