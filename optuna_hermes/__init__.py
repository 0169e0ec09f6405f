"""Scheduling of an Optuna study with more live trials than GPUs: trials are paused, not killed.

A broker on each host leases its devices for time slices to the trials that do best at the same age,
suspends the others, and resumes them exactly where they were.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna_hermes._optuna import wait_for_device
    from optuna_hermes.lightning import HermesCallback as HermesCallback
    from optuna_hermes.pruner import HermesPruner
    from optuna_hermes.pytorch import suspendable as suspendable
    from optuna_hermes.sampler import HermesSampler
    from optuna_hermes.workers._once import once
    from optuna_hermes.workers._optimize import OptimizeResult, optimize

__version__ = "0.1.0"

# HermesCallback and suspendable are here too, but need the extra [lightning]: `import *` must not.
__all__ = ["HermesPruner", "HermesSampler", "OptimizeResult", "once", "optimize", "wait_for_device"]

_HOMES = {
    "HermesCallback": "optuna_hermes.lightning",
    "HermesPruner": "optuna_hermes.pruner",
    "HermesSampler": "optuna_hermes.sampler",
    "OptimizeResult": "optuna_hermes.workers._optimize",
    "once": "optuna_hermes.workers._once",
    "optimize": "optuna_hermes.workers._optimize",
    "suspendable": "optuna_hermes.pytorch",
    "wait_for_device": "optuna_hermes._optuna",
}


def __getattr__(name: str) -> Any:
    # Nothing is imported before it is used: the package costs what its parts cost.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_HOMES, "__version__"])
