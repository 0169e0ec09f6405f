"""Replays: recorded trainings, from files and studies, simulated under policies and compared."""

from __future__ import annotations

from optuna_hermes.replay._files import read_curve_set
from optuna_hermes.replay._processes import spread
from optuna_hermes.replay._simulate import (
    REFERENCES,
    Result,
    SimulationRules,
    check_names,
    check_policy,
    replay,
    simulate,
)
from optuna_hermes.replay._study import curve_set_of, unfinished_trials
from optuna_hermes.replay._table import Row, tabulate

__all__ = [
    "REFERENCES",
    "Result",
    "Row",
    "SimulationRules",
    "check_names",
    "check_policy",
    "curve_set_of",
    "read_curve_set",
    "replay",
    "simulate",
    "spread",
    "tabulate",
    "unfinished_trials",
]
