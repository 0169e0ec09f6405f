"""The simulator: replays of recorded trainings and jobs under a policy, deterministic."""

from optuna_hermes.simulator._cluster import Cluster
from optuna_hermes.simulator._costs import SwitchCosts
from optuna_hermes.simulator._elastic import Application, Validation
from optuna_hermes.simulator._elastic_times import Measured, StepTime, StepTimes
from optuna_hermes.simulator._elastic_work import ElasticWork
from optuna_hermes.simulator._jobs import (
    FixedWork,
    Job,
    JobRecord,
    JobTrace,
    Placement,
    SoFar,
    Work,
)
from optuna_hermes.simulator._jobs_cluster import JobCluster
from optuna_hermes.simulator._jobs_estimates import (
    Clairvoyant,
    Estimator,
    Noisy,
    alone_seconds,
)
from optuna_hermes.simulator._jobs_learned import Learned
from optuna_hermes.simulator._jobs_metrics import JobMetrics, Watts, measure_jobs
from optuna_hermes.simulator._metrics import Metrics, measure
from optuna_hermes.simulator._nodes import (
    NodeSeries,
    NodeUse,
    never_powered_down,
    replay_nodes,
)
from optuna_hermes.simulator._nodes_bound import clairvoyant_nodes
from optuna_hermes.simulator._trace import Failure, Slice, Trace
from optuna_hermes.simulator._workload import CurveSet, FixedList, Recording, Source
from optuna_hermes.simulator.rivals import RIVALS, ShortestRemaining, arrange, make_rival

__all__ = [
    "RIVALS",
    "Application",
    "Clairvoyant",
    "Cluster",
    "CurveSet",
    "ElasticWork",
    "Estimator",
    "Failure",
    "FixedList",
    "FixedWork",
    "Job",
    "JobCluster",
    "JobMetrics",
    "JobRecord",
    "JobTrace",
    "Learned",
    "Measured",
    "Metrics",
    "NodeSeries",
    "NodeUse",
    "Noisy",
    "Placement",
    "Recording",
    "ShortestRemaining",
    "Slice",
    "SoFar",
    "Source",
    "StepTime",
    "StepTimes",
    "SwitchCosts",
    "Trace",
    "Validation",
    "Watts",
    "Work",
    "alone_seconds",
    "arrange",
    "clairvoyant_nodes",
    "make_rival",
    "measure",
    "measure_jobs",
    "never_powered_down",
    "replay_nodes",
]
