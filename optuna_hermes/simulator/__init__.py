"""The simulator: replays of recorded trainings under a policy, deterministic."""

from optuna_hermes.simulator._metrics import Metrics, measure
from optuna_hermes.simulator._simulator import EventQueue, TrialSimulator
from optuna_hermes.simulator._values import Failure, Slice, SwitchCosts, Trace
from optuna_hermes.simulator._workload import CurveSet, FixedList, Recording, Source
from optuna_hermes.simulator.rivals import RIVALS, arrange, make_rival

__all__ = [
    "RIVALS",
    "CurveSet",
    "EventQueue",
    "Failure",
    "FixedList",
    "Metrics",
    "Recording",
    "Slice",
    "Source",
    "SwitchCosts",
    "Trace",
    "TrialSimulator",
    "arrange",
    "make_rival",
    "measure",
]
