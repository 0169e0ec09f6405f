"""The simulator: replays of recorded trainings under a policy, deterministic."""

from optuna_hermes.simulator._metrics import Metrics as Metrics
from optuna_hermes.simulator._metrics import measure as measure
from optuna_hermes.simulator._simulator import EventQueue as EventQueue
from optuna_hermes.simulator._simulator import TrialSimulator as TrialSimulator
from optuna_hermes.simulator._values import Overheads as Overheads
from optuna_hermes.simulator._values import Slice as Slice
from optuna_hermes.simulator._values import SwitchCosts as SwitchCosts
from optuna_hermes.simulator._values import Trace as Trace
from optuna_hermes.simulator._workload import CurveSet as CurveSet
from optuna_hermes.simulator._workload import FixedList as FixedList
from optuna_hermes.simulator._workload import Recording as Recording
from optuna_hermes.simulator._workload import Source as Source
from optuna_hermes.simulator.rivals import RIVALS as RIVALS
from optuna_hermes.simulator.rivals import arrange as arrange
from optuna_hermes.simulator.rivals import make_rival as make_rival
