"""What is done to a study while it does not run: closing suspended trials, clearing away."""

from __future__ import annotations

from optuna_hermes.upkeep._files import (
    LOG_NAME,
    ORPHAN_SECONDS,
    Litter,
    find_litter,
    remove,
    with_files_of,
)
from optuna_hermes.upkeep._finish import Finish, finish, plan_finish
from optuna_hermes.upkeep._held import held_trials
from optuna_hermes.upkeep._rows import Rows, find_rows, remove_rows

__all__ = [
    "LOG_NAME",
    "ORPHAN_SECONDS",
    "Finish",
    "Litter",
    "Rows",
    "find_litter",
    "find_rows",
    "finish",
    "held_trials",
    "plan_finish",
    "remove",
    "remove_rows",
    "with_files_of",
]
