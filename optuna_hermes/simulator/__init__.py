"""The simulator: replays of recorded trainings under a policy, deterministic."""

from optuna_hermes.simulator._cluster import Cluster
from optuna_hermes.simulator._costs import SwitchCosts
from optuna_hermes.simulator._metrics import Metrics, measure
from optuna_hermes.simulator._trace import Failure, Slice, Trace
from optuna_hermes.simulator._workload import CurveSet, FixedList, Recording, Source
from optuna_hermes.simulator.rivals import RIVALS, arrange, make_rival

__all__ = [
    "RIVALS",
    "Cluster",
    "CurveSet",
    "Failure",
    "FixedList",
    "Metrics",
    "Recording",
    "Slice",
    "Source",
    "SwitchCosts",
    "Trace",
    "arrange",
    "make_rival",
    "measure",
]
