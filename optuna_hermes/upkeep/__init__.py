"""Maintenance of a study: overrides of trials, finishing them, and garbage collection."""

from __future__ import annotations

from optuna_hermes.upkeep._files import (
    ORPHAN_SECONDS,
    Litter,
    find_litter,
    remove,
    with_deleted,
)
from optuna_hermes.upkeep._finish import FinishPlan, finish, held_trials, plan_finish
from optuna_hermes.upkeep._overrides import change_policy, finish_live, want
from optuna_hermes.upkeep._rows import Rows, find_rows, remove_rows

__all__ = [
    "ORPHAN_SECONDS",
    "FinishPlan",
    "Litter",
    "Rows",
    "change_policy",
    "find_litter",
    "find_rows",
    "finish",
    "finish_live",
    "held_trials",
    "plan_finish",
    "remove",
    "remove_rows",
    "want",
    "with_deleted",
]
