"""Everything that relies on Lightning's private attributes; each is pinned by a test."""

from __future__ import annotations

from optuna_hermes._lightning._around import ended, parked
from optuna_hermes._lightning._callbacks import expect_suspension, tunes
from optuna_hermes._lightning._checkpoints import Checkpoints
from optuna_hermes._lightning._ddp import (
    merged,
    refused_strategy,
    watch_launches,
    why_not_exact,
)
from optuna_hermes._lightning._loggers import own_root, release_loggers
from optuna_hermes._lightning._units import Units
from optuna_hermes._lightning._wiring import (
    Wiring,
    batches_done,
    clean,
    roots,
    why_not_storable,
)

__all__ = [
    "Checkpoints",
    "Units",
    "Wiring",
    "batches_done",
    "clean",
    "ended",
    "expect_suspension",
    "merged",
    "own_root",
    "parked",
    "refused_strategy",
    "release_loggers",
    "roots",
    "tunes",
    "watch_launches",
    "why_not_exact",
    "why_not_storable",
]
