"""Replays: recorded trainings, from files and studies, simulated under policies and compared."""

from __future__ import annotations

from optuna_hermes.replay._curve_sets import curve_set_of, read_curve_set, unfinished_trials
from optuna_hermes.replay._processes import parallel_map
from optuna_hermes.replay._simulate import (
    REFERENCES,
    Result,
    SimulationRules,
    check_names,
    check_policy,
    replay,
    simulate,
)
from optuna_hermes.replay._table import Row, tabulate

__all__ = [
    "REFERENCES",
    "Result",
    "Row",
    "SimulationRules",
    "check_names",
    "check_policy",
    "curve_set_of",
    "parallel_map",
    "read_curve_set",
    "replay",
    "simulate",
    "tabulate",
    "unfinished_trials",
]
