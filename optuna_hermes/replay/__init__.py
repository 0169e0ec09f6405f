"""Replays: recorded trainings, from files and studies, simulated under policies and compared."""

from __future__ import annotations

from optuna_hermes.replay._curve_sets import curve_set_of as curve_set_of
from optuna_hermes.replay._curve_sets import incomplete_trials as incomplete_trials
from optuna_hermes.replay._curve_sets import read_curve_set as read_curve_set
from optuna_hermes.replay._processes import parallel_map as parallel_map
from optuna_hermes.replay._simulate import REFERENCES as REFERENCES
from optuna_hermes.replay._simulate import Result as Result
from optuna_hermes.replay._simulate import SimulationRules as SimulationRules
from optuna_hermes.replay._simulate import check_names as check_names
from optuna_hermes.replay._simulate import replay as replay
from optuna_hermes.replay._simulate import simulate_one as simulate_one
from optuna_hermes.replay._table import tabulate as tabulate
