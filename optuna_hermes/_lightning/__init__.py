"""The only place that touches what Lightning does not promise; each piece is pinned by a test."""

from __future__ import annotations

from optuna_hermes._lightning._around import ended, leave_out, parked
from optuna_hermes._lightning._callbacks import expect_suspension
from optuna_hermes._lightning._ddp import (
    buffers,
    count_of,
    gone,
    merged,
    own_part,
    part_of,
    refused_strategy,
    restore_buffers,
    watch_launches,
    why_not_exact,
)
from optuna_hermes._lightning._loggers import (
    logger_state,
    own_root,
    release_loggers,
    restore_loggers,
    rewind_loggers,
)
from optuna_hermes._lightning._loops import add_up, count_anew, loop_state, restore_loop_state
from optuna_hermes._lightning._units import units_left
from optuna_hermes._lightning._wiring import (
    Wiring,
    batches_done,
    clean,
    roots,
    unsynchronised,
    validated_names,
    why_not_storable,
)

__all__ = [
    "Wiring",
    "add_up",
    "batches_done",
    "buffers",
    "clean",
    "count_anew",
    "count_of",
    "ended",
    "expect_suspension",
    "gone",
    "leave_out",
    "logger_state",
    "loop_state",
    "merged",
    "own_part",
    "own_root",
    "parked",
    "part_of",
    "refused_strategy",
    "release_loggers",
    "restore_buffers",
    "restore_loggers",
    "restore_loop_state",
    "rewind_loggers",
    "roots",
    "units_left",
    "unsynchronised",
    "validated_names",
    "watch_launches",
    "why_not_exact",
    "why_not_storable",
]
