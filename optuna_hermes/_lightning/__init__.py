"""The only place that touches what Lightning does not promise; each piece is pinned by a test."""

from __future__ import annotations

from optuna_hermes._lightning._around import ended, leave_out, parked
from optuna_hermes._lightning._callbacks import expect_suspension
from optuna_hermes._lightning._loggers import (
    logger_state,
    own_root,
    release_loggers,
    restore_loggers,
    rewind_loggers,
)
from optuna_hermes._lightning._loops import loop_state, restore_loop_state
from optuna_hermes._lightning._wiring import (
    Wiring,
    batches_done,
    clean,
    roots,
    validated_names,
    why_not_storable,
)

__all__ = [
    "Wiring",
    "batches_done",
    "clean",
    "ended",
    "expect_suspension",
    "leave_out",
    "logger_state",
    "loop_state",
    "own_root",
    "parked",
    "release_loggers",
    "restore_loggers",
    "restore_loop_state",
    "rewind_loggers",
    "roots",
    "validated_names",
    "why_not_storable",
]
